"""Consumer warpgroups of prefill: 64 queries each, with an online softmax in registers."""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import prefill_turns
from kernels_pallas.common import LOG2_E, filled, scaled
from kernels_pallas.prefill_inputs import GAIN_BLOCK, ROWS, PrefillConfig
from kernels_pallas.prefill_items import Geometry, Item
from kernels_pallas.prefill_softmax import State, empty, lanes, raised, weights


def attend(
    g: Geometry,
    config: PrefillConfig,
    smem: Any,
    item: Item,
    wg: Array,
    q_ref: Any,
    o_ref: Any,
    lse_ref: Any,
    dtype: Any,
    positions: Any,
    gains: Any,
) -> None:
    """Run one consumer warpgroup: its 64 queries against all blocks, then store the results."""
    rows = pl.ds(pl.multiple_of(item.row + wg * ROWS, 8), ROWS)
    parts = (("q", pl.ds(0, g.R)), ("q_tail", pl.ds(g.R, g.H - g.R)))[: 2 if g.H > g.R else 1]
    for name, columns in parts:
        source = q_ref.at[item.b, rows, item.head, columns]
        plgpu.copy_gmem_to_smem(source, smem[name].at[wg], smem["q_ready"].at[wg])
    plgpu.barrier_wait(smem["q_ready"].at[wg])
    column = plgpu.Layout.WGMMA.reduce(1)
    steps = Consumer(g, config, smem, item, wg, dtype, positions, gains)
    state = lax.cond(item.plain > 0, steps.plain, lambda state: state, empty(g.Z))
    if g.HV > g.Z:
        state = state._replace(tail=filled((ROWS, g.HV - g.Z), 0, plgpu.Layout.WGMMA))
    inner = item.plain + item.mixed
    if g.two_ranks:
        state = lax.fori_loop(item.plain, inner, functools.partial(steps.masked, mixed=True), state)
    state = lax.fori_loop(inner, inner + item.inner, functools.partial(steps.masked, mixed=False), state)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=column)
    l = jnp.where(row + item.first + wg * ROWS < item.length, state.l.sum(axis=1), 0.0)
    inverse = jnp.where(l > 0, 1.0 / l, 0.0)
    smem["o"].at[wg][...] = scaled(state.acc, inverse).astype(dtype)
    if state.tail is not None:
        smem["o_tail"].at[wg][...] = scaled(state.tail, inverse).astype(dtype)
    smem["lse"].at[wg][...] = jnp.where(l > 0, state.m / LOG2_E + jnp.log(l), -jnp.inf)
    plgpu.commit_smem()
    parts = (("o", pl.ds(0, g.Z)), ("o_tail", pl.ds(g.Z, g.HV - g.Z)))[: 2 if g.HV > g.Z else 1]
    for name, columns in parts:
        plgpu.copy_smem_to_gmem(smem[name].at[wg], o_ref.at[item.b, rows, item.head, columns])
    plgpu.copy_smem_to_gmem(smem["lse"].at[wg], lse_ref.at[item.b, item.head, rows])
    plgpu.wait_smem_to_gmem(0)


class Consumer(NamedTuple):
    """Steps of a consumer warpgroup over blocks of keys."""

    g: Geometry
    config: PrefillConfig
    smem: Any
    item: Item
    wg: Array
    dtype: Any
    positions: Any
    gains: Any

    def plain(self, state: State) -> State:
        """Add all unmasked blocks, at least one."""
        if self.config.turns:
            return prefill_turns.attend(self, state)
        if not self.config.overlap:
            return lax.fori_loop(0, self.item.plain, self._plain_step, state)
        last = self.item.plain - 1
        carry = (state, self.scores(jnp.int32(0)))
        state, scores = lax.fori_loop(0, last, self._overlapped_step, carry)
        return self._add_block(last, state, scores)

    def masked(self, step: Array, state: State, *, mixed: bool) -> State:
        """Add one block in which visibility and (if `mixed`) rank differ between keys.

        With two ranks, or near keys alone, 64 keys are processed at a time: spilled registers would slow down
        every step.
        """
        g, slot = self.g, self._slot(step)
        width = ROWS if g.two_ranks or g.keys == "near" else self.config.block_kv
        for name in ["k_ready", "v_ready"]:
            plgpu.barrier_wait(self.smem[name].at[slot])
        if g.two_ranks:
            plgpu.barrier_wait(self.smem["tail_ready"])
        first_key, at_sinks = self.item.block(g, step) * self.config.block_kv, self.item.at_sinks(step)
        if g.keys == "near":
            first_key = first_key + jnp.where(at_sinks, 0, self.item.base)

        def part(i: Array, state: State) -> State:
            rows = pl.ds(pl.multiple_of(i * width, 8), width)
            return self._masked_part(state, slot, rows, first_key + i * width, at_sinks, mixed)

        parts: tuple[Any, Any] = (0, self.config.block_kv // width)
        if g.keys == "near":
            parts = self._seen_parts(first_key, at_sinks)
        state = lax.fori_loop(*parts, part, state)
        for name in ["k_free", "v_free"]:
            plgpu.barrier_arrive(self.smem[name].at[slot])
        if g.two_ranks:
            plgpu.barrier_arrive(self.smem["tail_free"])
        return state

    def _seen_parts(self, first_key: Array, at_sinks: Array) -> tuple[Array, Array]:
        """Return the range of a block's parts of 64 near keys that queries of this warpgroup see.

        All sinks are in the first part of their block.
        """
        first, rows = self.item.first + self.wg * ROWS - first_key, jnp.int32(ROWS)

        def part(key):
            return lax.div(jnp.clip(key, 0, self.config.block_kv), rows)

        begin, end = part(first - self.g.window + 1), part(first + 2 * ROWS - 1)
        return jnp.where(at_sinks, 0, begin), jnp.where(at_sinks, 1, end)

    def _masked_part(
        self, state: State, slot: Array, part: Any, first_key: Array, at_sinks: Array, mixed: bool
    ) -> State:
        g, smem, width = self.g, self.smem, part.size
        q, k, v = smem["q"].at[self.wg], smem["k"].at[slot, part], smem["v"].at[slot, part]
        q_tail = (smem["q_tail"].at[self.wg], smem["k_tail"].at[part]) if g.H > g.R else None

        def iota(axis):
            return plgpu.broadcasted_iota(jnp.int32, (ROWS, width), axis, layout=plgpu.Layout.WGMMA)

        t = iota(0) + (self.item.first + self.wg * ROWS)
        j = iota(1) + first_key
        if g.positions:
            t, j = self._positions_of(first_key, width)

        def near(t, j):
            return (j > t - g.window) | (j < g.sinks)

        if mixed:
            scores = _product((q, k))
            if q_tail is not None:
                scores = scores + jnp.where(near(t, j), _product(q_tail), 0.0)
        else:
            scores = _product((q, k), *([q_tail] if q_tail is not None else []))
        scores = self.with_gains(scores, first_key)
        p, state = self._weighed(state, jnp.where(self._visible(t, j, at_sinks), scores, -jnp.inf))
        state = state._replace(acc=_accumulate(state.acc, p.astype(self.dtype), v))
        if state.tail is not None:
            if mixed:
                # The inner barrier makes the compiler recompute the mask instead of keeping it in registers.
                # The outer barrier keeps the selection before the conversion, which then converts pairs.
                far_zero = jnp.where(near(*lax.optimization_barrier((t, j))), p, 0.0)
                p = lax.optimization_barrier(far_zero)
            tail = _accumulate(state.tail, p.astype(self.dtype), smem["v_tail"].at[part])
            state = state._replace(tail=tail)
        return state

    def _positions_of(self, first_key: Array, width: int) -> tuple[Array, Array]:
        """Return the positions of queries and of `width` keys, each [ROWS, width]."""
        starts, sizes = (self.item.row + self.wg * ROWS, first_key), (ROWS, width)
        shape, layout = (ROWS, width), plgpu.Layout.WGMMA
        loaded = []
        for axis, (ref, start, size) in enumerate(zip(self.positions, starts, sizes, strict=True)):
            rows = ref.at[self.item.b, pl.ds(pl.multiple_of(start, 8), size)]
            values = plgpu.load(rows, layout=layout.reduce(1 - axis), optimized=False)
            loaded.append(lax.broadcast_in_dim(values, shape, [axis]))
        return loaded[0], loaded[1]

    def _visible(self, t: Array, j: Array, at_sinks: Array) -> Array:
        """Return which keys at positions j are visible to queries at positions t, in this step."""
        g = self.g
        if g.keys == "all":
            return j <= t
        if g.keys == "far":
            return (j <= t - g.window) & (j >= g.sinks) & (j < g.S)
        never = jnp.iinfo(jnp.int32).max // 2

        def pick(of_sinks, recent):
            return jnp.where(at_sinks, jnp.int32(of_sinks), jnp.int32(recent))

        first = jnp.maximum(t - (pick(never, g.window) - 1), pick(0, g.sinks))
        last = jnp.minimum(t, pick(g.sinks - 1, never))
        return (first <= j) & (j <= last)

    def _plain_step(self, step: Array, state: State) -> State:
        return self._add_block(step, state, self.scores(step))

    def _overlapped_step(self, step: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        """Add the block whose scores are ready while the tensor cores compute the next block's scores.

        The waits come first. After them the next product is issued as soon as registers are free: no branch
        may lie between it and the weights of this block.
        """
        (state, scores), slot, ahead = carry, self._slot(step), self._slot(step + 1)
        plgpu.barrier_wait(self.smem["k_ready"].at[ahead])
        plgpu.barrier_wait(self.smem["v_ready"].at[slot])
        p, state = self._weighed(state, scores)
        p = p.astype(self.dtype)

        def body(next_scores: Any) -> tuple[State, Array]:
            plgpu.wgmma(next_scores, self.smem["q"].at[self.wg], self.smem["k"].at[ahead].transpose((1, 0)))
            acc = _accumulate(state.acc, p, self.smem["v"].at[slot])
            return state._replace(acc=acc), next_scores[...]

        state, scores = pl.run_scoped(body, plgpu.ACC((ROWS, self.config.block_kv), jnp.float32))
        plgpu.barrier_arrive(self.smem["k_free"].at[ahead])
        plgpu.barrier_arrive(self.smem["v_free"].at[slot])
        return state, self.with_gains(scores, self._first_key(step + 1))

    def _slot(self, step: Array) -> Array:
        return lax.rem(step, jnp.int32(self.config.stages))

    @property
    def factor(self) -> float:
        """Factor that turns results of `scores` into base-2 scores; scores with gains are in base 2."""
        return self.g.scale * LOG2_E if self.gains is None else 1.0

    def with_gains(self, scores: Array, first_key: Array) -> Array:
        """Return products [ROWS, width] of keys from position `first_key` on with the gains of their blocks.

        The result is in base 2. Without gains the products are unchanged.
        """
        if self.gains is None:
            return scores
        b, head, rows = self.item.b, self.item.head, self._rows_of_gains()
        block, last = lax.div(first_key, jnp.int32(GAIN_BLOCK)), jnp.int32(self.gains.shape[2] - 1)
        parts = []
        for i in range(scores.shape[1] // GAIN_BLOCK):
            source = self.gains.at[b, head, jnp.minimum(block + i, last), rows]
            part = plgpu.load(source, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            parts.append(lax.broadcast_in_dim(part * LOG2_E, scores.shape, [0]))
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        gains = parts[0]
        for i, part in enumerate(parts[1:], 1):
            gains = jnp.where(column < i * GAIN_BLOCK, gains, part)
        return scores * (self.g.scale * LOG2_E) + gains

    def _rows_of_gains(self) -> Any:
        """Return the rows of this warpgroup's queries, or the last rows if it has no queries."""
        first = jnp.minimum(self.item.row + self.wg * ROWS, self.gains.shape[3] - ROWS)
        return pl.ds(pl.multiple_of(first, 8), ROWS)

    def _first_key(self, step: Array) -> Array:
        """Return the position of the first key of an unmasked block."""
        first = self.item.block(self.g, step) * self.config.block_kv
        return first + self.item.base if self.g.keys == "near" else first

    def scores(self, step: Array) -> Array:
        """Return the scores of an unmasked block, which `factor` turns into base-2 scores."""
        slot = self._slot(step)
        plgpu.barrier_wait(self.smem["k_ready"].at[slot])
        scores = _product((self.smem["q"].at[self.wg], self.smem["k"].at[slot]))
        plgpu.barrier_arrive(self.smem["k_free"].at[slot])
        return self.with_gains(scores, self._first_key(step))

    def _weighed(self, state: State, scores: Array) -> tuple[Array, State]:
        """Return the weights of a block, and the state with their sums."""
        state = raised(state, scores, self.factor)
        p = weights(state, scores, self.factor)
        return p, state._replace(l=sum(lanes(p), state.l))

    def _add_block(self, step: Array, state: State, scores: Array) -> State:
        p, state = self._weighed(state, scores)
        return self.add_values(step, state, p.astype(self.dtype))

    def add_values(self, step: Array, state: State, p: Array) -> State:
        slot = self._slot(step)
        plgpu.barrier_wait(self.smem["v_ready"].at[slot])
        acc = _accumulate(state.acc, p, self.smem["v"].at[slot])
        plgpu.barrier_arrive(self.smem["v_free"].at[slot])
        return state._replace(acc=acc)


def _product(*pairs: tuple[Any, Any]) -> Array:
    """Return the sum of q kᵀ over pairs of query and key buffers."""

    def body(acc: Any) -> Array:
        for q, k in pairs:
            plgpu.wgmma(acc, q, k.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((ROWS, pairs[0][1].shape[0]), jnp.float32))


def _accumulate(acc: Array, p: Array, values: Any) -> Array:
    return pl.run_state(lambda ref: plgpu.wgmma(ref, p, values))(plgpu.ACC.init(acc))
