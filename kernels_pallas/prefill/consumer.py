"""Consumer warpgroups of prefill: 64 queries each, with an online softmax in registers."""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.common import GAIN_BLOCK, LOG2_E, filled, scaled
from kernels_pallas.prefill import turns
from kernels_pallas.prefill.inputs import ROWS, PrefillConfig
from kernels_pallas.prefill.items import Geometry, Item
from kernels_pallas.prefill.memory import Buffers, Operands
from kernels_pallas.prefill.softmax import Gains, State, empty, lanes, raised, weights

_FAR, _RECENT, _SINKS = 0, 1, 2
"""Kinds of masked blocks: far keys, recent keys, or the sinks' own array."""
_LARGEST_GAIN = 2.0**100
"""Bound on what base-2 scores gain: larger ones, and NaN, are of blocks without a visible key."""


class Consumer(NamedTuple):
    """Steps of a consumer warpgroup over blocks of keys."""

    g: Geometry
    config: PrefillConfig
    smem: Buffers
    item: Item
    wg: Array
    refs: Operands

    @property
    def dtype(self) -> Any:
        """Dtype of queries, keys and values."""
        return self.refs.q.dtype

    def plain(self, state: State, gains: Gains) -> State:
        """Add all unmasked blocks, at least one; `gains` are those of the first."""
        carry = state, gains
        if self.config.turns:
            return turns.attend(self, carry)
        if not self.config.overlap:
            return lax.fori_loop(0, self.item.plain, self._plain_step, carry)[0]
        last = self.item.plain - 1
        first = carry, self.scores(jnp.int32(0))
        (state, gains), scores = lax.fori_loop(0, last, self._overlapped_step, first)
        return self._add_block(last, state, gains, scores)

    def masked(self, step: Array, carry: tuple[State, Gains], *, mixed: bool) -> tuple[State, Gains]:
        """Add one block in which visibility and (if `mixed`) rank differ between keys.

        With two ranks, or near keys from arrays of their own, 64 keys are processed at a time: spilled
        registers would slow down every step.
        """
        g, slot, width = self.g, self._slot(step), self._masked_width
        following = self.masked_gains(step + 1)
        for ring in (self.smem.k, self.smem.v):
            plgpu.barrier_wait(ring.ready.at[slot])
        if g.two_ranks:
            plgpu.barrier_wait(self.smem.tail_ready)
        first_key, kind = self._masked_keys(step)

        def part(i: Array, carry: tuple[State, Gains]) -> tuple[State, Gains]:
            rows = pl.ds(pl.multiple_of(i * width, 8), width)
            key, (state, gains) = first_key + i * width, carry
            ahead = gains if width == self.config.block_kv else self._bounded_gains(key + width, width)
            return self._masked_part(state, gains, slot, rows, key, kind, mixed), ahead

        state, _ = lax.fori_loop(*self._parts(first_key, kind), part, carry)
        for ring in (self.smem.k, self.smem.v):
            plgpu.barrier_arrive(ring.free.at[slot])
        if g.two_ranks:
            plgpu.barrier_arrive(self.smem.tail_free)
        return state, following

    @property
    def _masked_width(self) -> int:
        """Keys that are processed at a time where visibility differs."""
        own_arrays = self.g.two_ranks or self.g.keys in ("near", "both")
        return ROWS if own_arrays else self.config.block_kv

    def _masked_keys(self, step: Array) -> tuple[Array, Array]:
        """Return the position of a masked block's first key, and the kind of its keys."""
        first_key, kind = self.item.block(self.g, step) * self.config.block_kv, jnp.int32(_FAR)
        if self.g.keys == "near":
            kind = jnp.where(self.item.at_sinks(step), jnp.int32(_SINKS), jnp.int32(_RECENT))
            first_key = first_key + jnp.where(kind == _SINKS, 0, self.item.base)
        if self.g.keys == "both":
            kind = jnp.where(self.item.is_near(step), jnp.int32(_RECENT), jnp.int32(_FAR))
            first_key = first_key + jnp.where(kind == _RECENT, self.item.base, 0)
        return first_key, kind

    def _parts(self, first_key: Array, kind: Array) -> tuple[Any, Any]:
        """Return the range of a masked block's parts that queries of this warpgroup see."""
        if self.g.keys in ("near", "both"):
            return self._seen_parts(first_key, kind)
        return 0, self.config.block_kv // self._masked_width

    def _seen_parts(self, first_key: Array, kind: Array) -> tuple[Array, Array]:
        """Return the range of a block's parts of 64 keys that queries of this warpgroup see.

        All sinks are in the first part of their block.
        """
        first, rows = self.item.first + self.wg * ROWS - first_key, jnp.int32(ROWS)

        def part(key):
            return lax.div(jnp.clip(key, 0, self.config.block_kv), rows)

        begin, end = part(first - self.g.window + 1), part(first + 2 * ROWS - 1)
        if self.g.keys == "near":
            return jnp.where(kind == _SINKS, 0, begin), jnp.where(kind == _SINKS, 1, end)
        is_far = kind == _FAR
        return jnp.where(is_far, 0, begin), jnp.where(is_far, part(first + 2 * ROWS - 1 - self.g.window), end)

    def _masked_part(
        self, state: State, gains: Gains, slot: Array, part: Any, first_key: Array, kind: Array, mixed: bool
    ) -> State:
        g, smem, width = self.g, self.smem, part.size
        q, k, v = smem.q.at[self.wg], smem.k.data.at[slot, part], smem.v.data.at[slot, part]
        q_tail = (smem.q_tail.at[self.wg], smem.k_tail.at[part]) if g.H > g.R else None

        def iota(axis):
            return plgpu.broadcasted_iota(jnp.int32, (ROWS, width), axis, layout=plgpu.Layout.WGMMA)

        t = iota(0) + (self.item.first + self.wg * ROWS)
        j = iota(1) + first_key

        def near(t, j):
            return (j > t - g.window) | (j < g.sinks)

        if mixed:
            scores = _product((q, k))
            if q_tail is not None:
                scores = scores + jnp.where(near(t, j), _product(q_tail), 0.0)
        else:
            scores = _product((q, k), *([q_tail] if q_tail is not None else []))
        scores = jnp.where(self._visible(t, j, kind), scores, -jnp.inf)
        p, state = self._weighed(state, gains, scores)
        state = state._replace(acc=_accumulate(state.acc, p.astype(self.dtype), v))
        if state.tail is not None:
            if mixed:
                # The inner barrier makes the compiler recompute the mask instead of keeping it in registers.
                # The outer barrier keeps the selection before the conversion, which then converts pairs.
                far_zero = jnp.where(near(*lax.optimization_barrier((t, j))), p, 0.0)
                p = lax.optimization_barrier(far_zero)
            tail = _accumulate(state.tail, p.astype(self.dtype), smem.v_tail.at[part])
            state = state._replace(tail=tail)
        return state

    def _visible(self, t: Array, j: Array, kind: Array) -> Array:
        """Return which keys at positions j are visible to queries at positions t, in a step of this kind."""
        g = self.g
        if g.keys == "all":
            return j <= t
        if g.keys == "far":
            return (j <= t - g.window) & (j >= g.sinks) & (j < g.S)
        never = jnp.iinfo(jnp.int32).max // 2

        def pick(other: int, recent: int) -> Array:
            return jnp.where(kind == _RECENT, jnp.int32(recent), jnp.int32(other))

        first, last = t - pick(never, g.window - 1), t
        if g.keys == "near":
            first, last = jnp.maximum(first, pick(0, g.sinks)), jnp.minimum(last, pick(g.sinks - 1, never))
        else:
            last = jnp.minimum(last - pick(g.window, 0), pick(g.S - 1, never))
        return (first <= j) & (j <= last)

    def _plain_step(self, step: Array, carry: tuple[State, Gains]) -> tuple[State, Gains]:
        ahead = self.plain_gains(step + 1)
        return self._add_block(step, *carry, self.scores(step)), ahead

    def _overlapped_step(
        self, step: Array, carry: tuple[tuple[State, Gains], Array]
    ) -> tuple[tuple[State, Gains], Array]:
        """Add the block whose scores are ready while the tensor cores compute the next block's scores.

        The waits come first. After them the next product is issued as soon as registers are free: no branch
        may lie between it and the weights of this block.
        """
        ((state, gains), scores), slot, ahead = carry, self._slot(step), self._slot(step + 1)
        next_gains = self.plain_gains(step + 1)
        plgpu.barrier_wait(self.smem.k.ready.at[ahead])
        plgpu.barrier_wait(self.smem.v.ready.at[slot])
        p, state = self._weighed(state, gains, scores)
        p = p.astype(self.dtype)

        def body(next_scores: Any) -> tuple[State, Array]:
            plgpu.wgmma(next_scores, self.smem.q.at[self.wg], self.smem.k.data.at[ahead].transpose((1, 0)))
            acc = _accumulate(state.acc, p, self.smem.v.data.at[slot])
            return state._replace(acc=acc), next_scores[...]

        state, scores = pl.run_scoped(body, plgpu.ACC((ROWS, self.config.block_kv), jnp.float32))
        plgpu.barrier_arrive(self.smem.k.free.at[ahead])
        plgpu.barrier_arrive(self.smem.v.free.at[slot])
        return (state, next_gains), scores

    def _slot(self, step: Array) -> Array:
        return lax.rem(step, jnp.int32(self.config.stages))

    @property
    def factor(self) -> float:
        """Factor that turns products into base-2 scores."""
        return self.g.scale * LOG2_E

    def plain_gains(self, step: Array) -> Gains:
        """Start to load the gains of an unmasked block, which no step needs before the next."""
        first_key = self.item.block(self.g, step) * self.config.block_kv
        if self.g.keys == "near":
            first_key = first_key + self.item.base
        return self._gains(first_key, self.config.block_kv)

    def masked_gains(self, step: Array) -> Gains:
        """Start to load the gains of the first part of a masked block that this warpgroup sees."""
        if self.refs.gains is None:
            return ()
        first_key, kind = self._masked_keys(step)
        width = self._masked_width
        return self._bounded_gains(first_key + self._parts(first_key, kind)[0] * width, width)

    def _gains(self, first_key: Array, width: int) -> Gains:
        """Load what base-2 scores of `width` keys from position `first_key` on gain, if there are gains."""
        if self.refs.gains is None:
            return ()
        block, last = lax.div(first_key, jnp.int32(GAIN_BLOCK)), jnp.int32(self.refs.gains.shape[2] - 1)
        blocks = [
            self.refs.gains.at[self.item.b, self.item.head, jnp.clip(block + i, 0, last)]
            for i in range(width // GAIN_BLOCK)
        ]
        column, rows = plgpu.Layout.WGMMA.reduce(1), self._rows_of_gains()
        return tuple(plgpu.load(x.at[rows], layout=column, optimized=False) * LOG2_E for x in blocks)

    def _bounded_gains(self, first_key: Array, width: int) -> Gains:
        """Return `_gains` with zeros for blocks without a visible key.

        Such blocks may have any score, but their weights must become zeros.
        """
        found = self._gains(first_key, width)
        return tuple(jnp.where(jnp.abs(gain) < _LARGEST_GAIN, gain, 0.0) for gain in found)

    def _rows_of_gains(self) -> Any:
        """Return the rows of this warpgroup's queries, or the last rows if it has no queries."""
        first = jnp.minimum(self.item.row + self.wg * ROWS, self.refs.gains.shape[3] - ROWS)
        return pl.ds(pl.multiple_of(first, 8), ROWS)

    def scores(self, step: Array) -> Array:
        """Return the products of an unmasked block, which `factor` turns into base-2 scores."""
        slot = self._slot(step)
        plgpu.barrier_wait(self.smem.k.ready.at[slot])
        scores = _product((self.smem.q.at[self.wg], self.smem.k.data.at[slot]))
        plgpu.barrier_arrive(self.smem.k.free.at[slot])
        return scores

    def _weighed(self, state: State, gains: Gains, scores: Array) -> tuple[Array, State]:
        """Return the weights of a block, and the state with their sums."""
        state = raised(state, scores, self.factor, gains)
        p = weights(state, scores, self.factor, gains)
        return p, state._replace(l=sum(lanes(p), state.l))

    def _add_block(self, step: Array, state: State, gains: Gains, scores: Array) -> State:
        p, state = self._weighed(state, gains, scores)
        return self.add_values(step, state, p.astype(self.dtype))

    def add_values(self, step: Array, state: State, p: Array) -> State:
        slot = self._slot(step)
        plgpu.barrier_wait(self.smem.v.ready.at[slot])
        acc = _accumulate(state.acc, p, self.smem.v.data.at[slot])
        plgpu.barrier_arrive(self.smem.v.free.at[slot])
        return state._replace(acc=acc)


def attend(steps: Consumer, o_ref: Any, lse_ref: Any) -> None:
    """Run one consumer warpgroup: its 64 queries against all blocks, then store the results."""
    g, smem, item, wg = steps.g, steps.smem, steps.item, steps.wg
    rows = pl.ds(pl.multiple_of(item.row + wg * ROWS, 8), ROWS)
    for buffer, columns in _columns(g.R, g.H, smem.q, smem.q_tail):
        source = steps.refs.q.at[item.b, rows, item.head, columns]
        plgpu.copy_gmem_to_smem(source, buffer.at[wg], smem.q_ready.at[wg])
    of_plain, of_masked = steps.plain_gains(jnp.int32(0)), steps.masked_gains(item.plain)
    plgpu.barrier_wait(smem.q_ready.at[wg])
    plain = functools.partial(steps.plain, gains=of_plain)
    state = lax.cond(item.plain > 0, plain, lambda state: state, empty(g.Z))
    if g.HV > g.Z:
        state = state._replace(tail=filled((ROWS, g.HV - g.Z), 0, plgpu.Layout.WGMMA))
    inner, carry = item.plain + item.mixed, (state, of_masked)
    if g.two_ranks:
        carry = lax.fori_loop(item.plain, inner, functools.partial(steps.masked, mixed=True), carry)
    state, _ = lax.fori_loop(inner, inner + item.inner, functools.partial(steps.masked, mixed=False), carry)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    l = jnp.where(row + item.first + wg * ROWS < item.length, state.l.sum(axis=1), 0.0)
    inverse = jnp.where(l > 0, 1.0 / l, 0.0)
    smem.o.at[wg][...] = scaled(state.acc, inverse).astype(steps.dtype)
    if state.tail is not None:
        smem.o_tail.at[wg][...] = scaled(state.tail, inverse).astype(steps.dtype)
    smem.lse.at[wg][...] = jnp.where(l > 0, state.m / LOG2_E + jnp.log(l), -jnp.inf)
    plgpu.commit_smem()
    for buffer, columns in _columns(g.Z, g.HV, smem.o, smem.o_tail):
        plgpu.copy_smem_to_gmem(buffer.at[wg], o_ref.at[item.b, rows, item.head, columns])
    plgpu.copy_smem_to_gmem(smem.lse.at[wg], lse_ref.at[item.b, item.head, rows])
    plgpu.wait_smem_to_gmem(0)


def _columns(rank: int, width: int, first: Any, tail: Any) -> list[tuple[Any, Any]]:
    """Pair buffers of the first `rank` of `width` columns, and of the others if any, with their columns."""
    pairs = (first, pl.ds(0, rank)), (tail, pl.ds(rank, width - rank))
    return [(buffer, columns) for buffer, columns in pairs if buffer is not None]


def _product(*pairs: tuple[Any, Any]) -> Array:
    """Return the sum of q kᵀ over pairs of query and key buffers."""

    def body(acc: Any) -> Array:
        for q, k in pairs:
            plgpu.wgmma(acc, q, k.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((ROWS, pairs[0][1].shape[0]), jnp.float32))


def _accumulate(acc: Array, p: Array, values: Any) -> Array:
    return pl.run_state(lambda ref: plgpu.wgmma(ref, p, values))(plgpu.ACC.init(acc))
