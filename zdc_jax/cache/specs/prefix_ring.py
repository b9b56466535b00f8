"""The prefix ring: first coordinates of all tokens, and a ring with the others of near tokens (ours).

Near tokens are the sinks, which are the first tokens, and the last `window` tokens. All others are far. The
basis is nested: the first coordinates of a near token are also its far form. A token that leaves the window
is therefore just overwritten in the ring. Nothing is copied or recomputed. Without sinks and window there is
no ring, and the cache stores keys and values as the projections return them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from kernels_pallas import (
    BlockMeans,
    CodedPass,
    Parts,
    Ring,
    Trailing,
    decode_parts,
    first_near_row,
    merged,
    prefill_attention,
    rows_before,
)
from zdc_jax.axes import Array
from zdc_jax.cache.paging.pages import Pages, count_slots, pools_of
from zdc_jax.cache.specs.spec import Attended, Call, Exchange, LayerCacheSpec, NewTokens, move_shift, put_rows
from zdc_jax.ops.attention import (
    Implementation,
    cache_refusal,
    choose_implementation,
    self_attention,
)
from zdc_jax.ops.cache_attention import ArrangedQueries
from zdc_jax.ops.shift import BLOCK
from zdc_jax.ops.slots import last_read, ring_positions, ring_slot, slot_of_token
from zdc_jax.ops.xla import NearKeys, xla_attention


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "ring_k", "ring_v"], meta_fields=["near"])
@dataclass(frozen=True)
class PrefixRingState:
    """Arrays of one layer. k and v may be `Pages` where kernels compute attention.

    Attributes:
      k, v: first coordinates of all tokens, [B, K, S, R] and [B, K, S, Z], slot = position. S is 1 if the
        width is 0.
      ring_k, ring_v: other coordinates of near tokens, [B, K, M, H-R] and [B, K, M, H-Z]. Position p ≥ sinks
        is in slot p mod window, and sink p in slot window + p.
      near: number of sinks and length of the window, each at most the capacity.
    """

    k: Any
    v: Any
    ring_k: Array
    ring_v: Array
    near: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PrefixRing(LayerCacheSpec):
    """Spec that stores R and Z coordinates of every token, and all H coordinates of near tokens.

    A query scores its near keys, {j < sinks} ∪ {t - window < j ≤ t}, with all coordinates, and far keys with
    R coordinates, under one softmax. With R = Z = 0, far keys are not read. With sinks or a window, `attend`
    accepts q, k and v at full width; otherwise at the stored width.

    Attributes:
      R: coordinates of keys that are stored for every token.
      Z: coordinates of values that are stored for every token.
      sinks: number of first tokens that are near.
      window: number of last tokens that are near.
    """

    R: int
    Z: int
    sinks: int = 0
    window: int = 0
    clauses = LayerCacheSpec.clauses | {"pages", "shift"}
    exchange: ClassVar[Exchange | None] = "coordinates"

    def create(self, batch: int, capacity: int) -> PrefixRingState:
        def empty(slots: int, width: int) -> Array:
            return jnp.zeros((batch, self.num_kv_heads, slots, width), self.dtype)

        H, ring = self.head_dim, self.ring_slots(capacity)
        # One slot if the width is 0: XLA prints constants without elements slot by slot, which takes many
        # seconds for millions of slots.
        k, v = (empty(capacity if width else 1, width) for width in (self.R, self.Z))
        rings = empty(ring, H - self.R), empty(ring, H - self.Z)
        return PrefixRingState(k, v, *rings, self.near(capacity))

    def ring_slots(self, capacity: int) -> int:
        """Return the ring's slots M for a cache of `capacity` tokens."""
        return ring_slots(self.sinks, self.window, capacity)

    def near(self, capacity: int) -> tuple[int, int]:
        """Return the number of sinks and the window of a cache of `capacity` tokens."""
        return min(self.sinks, capacity), min(self.window, capacity)

    def write(self, state: PrefixRingState, new: NewTokens) -> PrefixRingState:
        keys, v, at = new.k.keys, new.v, (new.positions, new.end)
        new_k = put_tokens(state.k, keys[..., : self.R], *at)
        new_v = put_tokens(state.v, v[..., : self.Z], *at)
        if not (self.sinks or self.window):
            return replace(state, k=new_k, v=new_v)
        sinks, window = state.near
        put = partial(put_ring, positions=new.positions, end=new.end, sinks=sinks, window=window)
        ring_k, ring_v = put(state.ring_k, x=keys[..., self.R :]), put(state.ring_v, x=v[..., self.Z :])
        return PrefixRingState(new_k, new_v, ring_k, ring_v, state.near)

    def attend(
        self, state: PrefixRingState, q: Float[Array, "B T N Hq"], new: NewTokens, aux: object, call: Call
    ) -> Attended:
        new, call = move_shift(new, call, self.capacity(state))
        sinks, window = state.near if self._reads_near(q, new.v) else (0, 0)
        implementation = self._choose_implementation(state, q, new.v, call)
        on_kernel = _attend_decode if q.shape[1] == 1 else _attend_prefill
        attend = _attend_xla if implementation == "xla" else on_kernel
        written = self.write(state, new)
        o, lse = attend(_AttendArguments(state, written, q, new, (sinks, window), call))
        return Attended(written, o, lse, aux)

    def join_prompt(
        self, state: PrefixRingState, new: NewTokens, means: BlockMeans | None = None
    ) -> tuple[PrefixRingState, Trailing]:
        """Write a chunk of prompts, and return the near keys and values that its queries read, by position.

        Only with a window. Keys gain `means` there, but those of sinks do not.
        """
        written = self.write(state, new)
        rows = _list_near_rows(state, written, new.k.keys, new.v, new.start, *state.near)
        return written, rows if means is None else rows._replace(k=_add_means(rows, means))

    def reads_pages(self, state: PrefixRingState, q: Array, v: Array, call: Call) -> bool:
        return self._choose_implementation(state, q, v, call) == "pallas"

    def capacity(self, state: PrefixRingState) -> int:
        """Return the positions that the cache can store; only with R > 0."""
        return count_slots(state.k)

    def as_read(self, x: Shaped[Array, "*B C"]) -> Shaped[Array, "*B C"]:
        """Return near keys or values as queries read them; unchanged here."""
        return x

    def encode_state(self, state: PrefixRingState) -> PrefixRingState:
        """Convert a state with near tokens in the model's dtype to the stored form; unchanged here."""
        return state

    def kernel_rings(self, state: PrefixRingState) -> tuple[Any, Any] | None:
        """Return the rings that kernels write to if R = Z = 0; None if kernels do not support them."""
        return state.ring_k, state.ring_v

    def can_decode_stored(self, state: PrefixRingState, q: Array, v: Array, call: Call) -> bool:
        """Return whether `decode_stored` can run; raise as `attend` does."""
        return self._choose_implementation(state, q, v, call) == "pallas"

    def decode_stored(
        self,
        state: PrefixRingState,
        q: Float[Array, "B 1 N H"],
        positions: Int[Array, "B 1"],
        call: Call,
        arranged: ArrangedQueries | None = None,
    ) -> Parts | CodedPass:
        """Compute attention of single tokens that the cache stores already, on kernels.

        A quantized ring returns the pass that computes it. `arranged` are the queries as its kernel reads
        them, if other kernels wrote them so.
        """
        return _run_decode(state, q, positions, state.near, call)

    def _reads_near(self, q: Array, v: Array) -> bool:
        return q.shape[-1] > self.R or v.shape[-1] > self.Z

    def _choose_implementation(
        self, state: PrefixRingState, q: Array, v: Array, call: Call
    ) -> Implementation:
        """Return the implementation that computes attention to the cache; raise as `attend` does."""
        near, ((k, stored_v), table) = self._reads_near(q, v), pools_of((state.k, state.v))
        sinks, window = state.near if near else (0, 0)
        rings = (state.ring_k, state.ring_v) if near else None
        refusal = partial(cache_refusal, sinks=sinks, window=window, table=table)
        refusals: dict[Implementation, Callable[[], str | None]] = {
            "pallas": lambda: refusal(q, k, stored_v, rings),
            "cudnn": lambda: "it does not read this cache",
        }
        kind = "decode" if q.shape[1] == 1 else "prefill"
        return choose_implementation(kind, call.implementation, refusals)

    def attend_whole(self, q: Array, new: NewTokens, aux: object, call: Call) -> Attended:
        new, call = move_shift(new, call, q.shape[1], up_to_end=False)
        o, lse = self_attention(
            q,
            new.k.keys,
            new.v,
            scale=call.scale,
            qk_rank=self.R,
            v_rank=self.Z,
            sinks=self.sinks,
            window=self.window,
            implementation=call.implementation,
            block_scores=call.block_scores,
        )
        return Attended(None, o, lse, aux)


def put_tokens(
    stored: Array | Pages, x: Shaped[Array, "B T K C"], positions: Int[Array, "B T"], end: Int[Array, " B"]
) -> Array | Pages:
    """Write the tokens x below `end` into the slots of their positions.

    `stored` is an array [B, K, S, C] or `Pages` of it.
    """
    start = positions[:, 0]
    if not x.shape[-1]:
        return stored
    if not isinstance(stored, Pages):
        return put_rows(stored, x, start, positions < end[:, None])
    if x.shape[1] == 1:
        return stored.put_token(x[:, 0], jnp.where(start < end, start, stored.slots))
    return stored.put_chunk(x, start, end)


def ring_slots(sinks: int, window: int, capacity: int) -> int:
    """Return the slots of the ring of a cache of `capacity` tokens.

    The window's slots are followed by those of the sinks, rounded up to the 8 rows that a GPU copies at a
    time.
    """
    return min(window, capacity) + -(-min(sinks, capacity) // 8) * 8


def put_ring(ring: Array, *, x: Array, positions: Array, end: Array, sinks: int, window: int) -> Array:
    """Write the near tokens among x [B, T, K, C] below `end` into their slots of `ring` [B, K, M, C]."""
    if x.shape[1] == 1:
        slot, has_slot = slot_of_token(positions, end, sinks=sinks, window=window)
        rows = jnp.arange(x.shape[0])[:, None]
        return ring.at[rows, :, jnp.where(has_slot, slot, ring.shape[2])].set(x, mode="drop")
    return ring_of_piece(ring, x, positions, end, sinks=sinks, window=window)


def ring_of_piece(
    ring: Shaped[Array, "B K M C"],
    x: Shaped[Array, "B T K C"],
    positions: Int[Array, "B T"],
    end: Int[Array, " B"],
    *,
    sinks: int,
    window: int,
) -> Shaped[Array, "B K M C"]:
    """Return the ring of sequences of `end` tokens.

    Tokens come from x, at `positions`, where x has them, and else from the old `ring`.
    """
    wanted = ring_positions(ring.shape[2], end[:, None] - 1, sinks=sinks, window=window)
    start, T = positions[:, :1], x.shape[1]
    kept = (wanted >= start) & (wanted < start + T)
    source = jnp.clip(wanted - start, 0, T - 1)
    new = jnp.take_along_axis(x, source[:, :, None, None], axis=1).swapaxes(1, 2)
    return jnp.where(kept[:, None, :, None], new, ring)


def _read_recent(state: PrefixRingState, start: Array, sinks: int, window: int) -> NearKeys:
    """Return all coordinates of the `window` positions before `start` [B]; -1 marks an absent token."""
    positions = start[:, None] - window + jnp.arange(window)  # [B, W]
    slots = ring_slot(positions, sinks=sinks, window=window)
    rows = jnp.arange(start.shape[0])[:, None]

    def gather(buffer: Array, slot: Array) -> Array:
        return buffer[rows, :, slot].swapaxes(1, 2)

    prefix = jnp.maximum(positions, 0)
    return NearKeys(
        _join_coordinates(gather(state.k, prefix), gather(state.ring_k, slots)),
        _join_coordinates(gather(state.v, prefix), gather(state.ring_v, slots)),
        jnp.where(positions >= sinks, positions, -1),
    )


def _read_sinks(state: PrefixRingState, sinks: int, window: int) -> NearKeys:
    """Return all coordinates of the sinks."""
    batch = state.k.shape[0]

    def join(prefix: Array, ring: Array) -> Array:
        return _join_coordinates(prefix[:, :, :sinks], ring[:, :, window : window + sinks])

    return NearKeys(
        join(state.k, state.ring_k),
        join(state.v, state.ring_v),
        jnp.broadcast_to(jnp.arange(sinks), (batch, sinks)),
    )


def _join_coordinates(first: Array, trailing: Array) -> Array:
    """Concatenate first and other coordinates; arrays of width 0 lack the slots to join."""
    return jnp.concatenate([first, trailing], -1) if first.shape[-1] else trailing


def recent_rows(
    ring: Float[Array, "B K M C"],
    new: Float[Array, "B T K C"],
    start: Int[Array, " B"],
    first: Int[Array, " B"],
    *,
    sinks: int,
    window: int,
    past: int,
) -> Float[Array, "B K {past}+T C"]:
    """Return the ring's coordinates by position, row i for position first + i.

    Rows before `start` come from the ring, later rows from `new`. Sinks are in their rows if `first` allows
    it. Other rows of positions before start - window, and rows after the new tokens, are unspecified. `past`
    must be at least start - first.
    """
    positions = first[:, None] + jnp.arange(past)
    slots = ring_slot(positions, sinks=sinks, window=window)
    old = jnp.take_along_axis(ring, slots[:, None, :, None], axis=2)
    both = jnp.concatenate([old, new.swapaxes(1, 2)], axis=2)
    T = new.shape[1]
    rows, num_old = jnp.arange(past + T), (start - first)[:, None]
    source = jnp.where(rows < num_old, rows, jnp.minimum(past + rows - num_old, past + T - 1))
    return jnp.take_along_axis(both, source[:, None, :, None], axis=2)


class _AttendArguments(NamedTuple):
    """Arguments of one attention call, with the cache before (`state`) and after it (`written`)."""

    state: PrefixRingState
    written: PrefixRingState
    q: Array
    new: NewTokens
    near: tuple[int, int]
    call: Call


def _attend_xla(step: _AttendArguments) -> tuple[Array, Array]:
    """Compute attention on any device; near keys are gathered from the old cache and the new tokens."""
    state, written, q, new, (sinks, window), call = step
    near, positions = None, new.positions
    if sinks or window:
        recent = _read_recent(state, new.start, sinks, window) if window else None
        k, v = new.k.keys.swapaxes(1, 2), new.v.swapaxes(1, 2)
        own = NearKeys(k, v, jnp.where(positions >= sinks, positions, -1))
        parts = [part for part in (_read_sinks(written, sinks, window), recent, own) if part is not None]
        near = NearKeys(
            *(jnp.concatenate([part[i] for part in parts], axis) for i, axis in enumerate((2, 2, 1)))
        )
    return xla_attention(
        q,
        written.k,
        written.v,
        positions,
        scale=call.scale,
        near=near,
        sinks=sinks,
        window=window,
        block_scores=call.block_scores,
    )


def _attend_decode(step: _AttendArguments) -> tuple[Array, Array]:
    """Compute attention of one token per sequence on the kernel, which reads the token from the cache."""
    last = last_read(step.new.positions, step.new.end)
    parts = _run_decode(step.written, step.q, last, step.near, step.call)
    o, lse = merged(parts, step.q.shape[2] // parts.o.shape[1], step.q.dtype)
    return o[:, None], lse[..., None]


def _run_decode(
    state: PrefixRingState, q: Array, positions: Array, near: tuple[int, int], call: Call
) -> Parts:
    """Call the decoding kernel for single tokens that the cache stores."""
    (k, v), table = pools_of((state.k, state.v))
    (sinks, window), block_scores = near, call.block_scores
    return decode_parts(
        q[:, 0],
        k,
        v,
        positions[:, 0] + 1,
        scale=call.scale,
        ring=Ring(state.ring_k, state.ring_v) if sinks or window else None,
        sinks=sinks,
        window=window,
        block_table=table,
        block_scores=None if block_scores is None else block_scores[:, 0],
    )


def _add_means(near: Trailing, means: BlockMeans) -> Float[Array, "B K M C"]:
    """Return near keys with the means of their blocks."""
    blocks = (near.start[:, None] + jnp.arange(near.k.shape[2])) // BLOCK
    own, subtracted = (means.values.at[:, at].get(mode="clip") for at in (blocks, means.references[:, None]))
    return (near.k.astype(jnp.float32) + (own - subtracted).swapaxes(0, 1)).astype(near.k.dtype)


def _attend_prefill(step: _AttendArguments) -> tuple[Array, Array]:
    """Compute attention of a chunk of each prompt on the kernel.

    The kernel reads the ring as it was before the new tokens overwrote it.
    """
    state, written, q, new, (sinks, window), call = step
    trailing = None
    (stored_k, stored_v), table = pools_of((written.k, written.v))
    if window:
        R, Z = stored_k.shape[-1], stored_v.shape[-1]
        k, v = new.k.keys[..., R:], new.v[..., Z:]
        trailing = _list_near_rows(state, written, k, v, new.start, sinks, window)
    return prefill_attention(
        q,
        stored_k,
        stored_v,
        scale=call.scale,
        starts=new.start,
        lengths=new.end,
        needed_from=call.needed_from,
        trailing=trailing,
        sinks=sinks,
        window=window,
        block_table=table,
        block_scores=call.block_scores,
    )


def _list_near_rows(
    state: PrefixRingState,
    written: PrefixRingState,
    k: Float[Array, "B T K C"],
    v: Float[Array, "B T K Z"],
    start: Int[Array, " B"],
    sinks: int,
    window: int,
) -> Trailing:
    """Return the coordinates of near keys and values that the ring stores, by position.

    Args:
      state: ring before the new tokens overwrote it.
      written: ring with the new tokens.
      k, v: coordinates of the new tokens that the ring stores.
      start: position of the first new token.
      sinks, window: near tokens.
    """
    first, past = first_near_row(start, window), rows_before(window)
    rows = partial(recent_rows, start=start, first=first, sinks=sinks, window=window, past=past)
    of_sinks = (ring[:, :, window:] for ring in (written.ring_k, written.ring_v)) if sinks else (None, None)
    return Trailing(rows(state.ring_k, k), rows(state.ring_v, v), first, *of_sinks)
