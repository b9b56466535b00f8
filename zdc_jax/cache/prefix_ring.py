"""The prefix ring: first coordinates of all tokens, and a ring of the trailing ones of near tokens.

Because the basis is nested, a token leaves the window by being overwritten in the ring: its prefix
coordinates are already where far attention reads them. Nothing is copied, nothing is recomputed (ours).
Without sinks and window there is no ring: the plain cache, of keys and values as the projections give them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from kernels_pallas import (
    TAIL_ALIGNMENT,
    Parts,
    Ring,
    Trailing,
    decode_attention,
    decode_parts,
    prefill_attention,
)
from zdc_jax.axes import Array
from zdc_jax.cache.pages import Pages, pools_of
from zdc_jax.cache.spec import Attended, Call, LayerCacheSpec, put_rows
from zdc_jax.ops.attention import Implementation, cache_refusal, choose_implementation, self_attention
from zdc_jax.ops.slots import ring_positions, ring_slot, slot_of_token
from zdc_jax.ops.xla import NearKeys, xla_attention


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "ring_k", "ring_v"], meta_fields=["near"])
@dataclass(frozen=True)
class PrefixRingState:
    """Arrays of one layer; k and v may be `Pages` where kernels attend.

    k [B, K, S, R], v [B, K, S, Z]: first coordinates of all tokens, slot = position; S = 1 of none.
    ring_k [B, K, M, H-R], ring_v [B, K, M, H-Z]: trailing coordinates of the last tokens, position p ≥ sinks
    in slot p mod window, and of the sinks, position p in slot window + p. near: sinks and window, at most the
    capacity each.
    """

    k: Any
    v: Any
    ring_k: Array
    ring_v: Array
    near: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PrefixRing(LayerCacheSpec):
    """R and Z coordinates of every token, all H of the first `sinks` and of the last `window` tokens.

    Queries score their near keys, {j < sinks} ∪ {t - window < j ≤ t}, with all coordinates and the far ones
    with R of them, under one softmax; R = Z = 0: far keys are not seen. With sinks or a window `attend` takes
    q, k and v at full width, without as they are kept.
    """

    R: int
    Z: int
    sinks: int = 0
    window: int = 0
    clauses = LayerCacheSpec.clauses | {"pages"}

    def create(self, batch: int, capacity: int) -> PrefixRingState:
        def empty(slots, width):
            return jnp.zeros((batch, self.num_kv_heads, slots, width), self.dtype)

        H, ring = self.head_dim, self.ring_slots(capacity)
        # XLA prints constants of no elements slot by slot, for many seconds where there are millions.
        first, second = (empty(capacity if width else 1, width) for width in (self.R, self.Z))
        rings = empty(ring, H - self.R), empty(ring, H - self.Z)
        return PrefixRingState(first, second, *rings, self.near(capacity))

    def ring_slots(self, capacity: int) -> int:
        """M for a cache of `capacity` tokens."""
        return ring_slots(self.sinks, self.window, capacity)

    def near(self, capacity: int) -> tuple[int, int]:
        """Sinks and window of a cache of `capacity` tokens."""
        return min(self.sinks, capacity), min(self.window, capacity)

    def write(
        self, state: PrefixRingState, k: Array, v: Array, positions: Array, end: Array
    ) -> PrefixRingState:
        new_k = put_tokens(state.k, k[..., : self.R], positions, end)
        new_v = put_tokens(state.v, v[..., : self.Z], positions, end)
        if not (self.sinks or self.window):
            return replace(state, k=new_k, v=new_v)
        sinks, window = state.near
        put = partial(put_ring, positions=positions, end=end, sinks=sinks, window=window)
        ring_k, ring_v = put(state.ring_k, x=k[..., self.R :]), put(state.ring_v, x=v[..., self.Z :])
        return PrefixRingState(new_k, new_v, ring_k, ring_v, state.near)

    def attend(
        self,
        state: PrefixRingState,
        q: Float[Array, "B T N Hq"],
        k: Float[Array, "B T K Hq"],
        v: Float[Array, "B T K Hv"],
        positions: Int[Array, "B T"],
        end: Int[Array, " B"],
        aux: object,
        call: Call,
    ) -> Attended:
        """`LayerCacheSpec.attend`; hands `aux` on."""
        sinks, window = state.near if self._sees_near(q, v) else (0, 0)
        chosen = self._implementation(state, q, v, call)
        attend = _on_xla if chosen == "xla" else _decode if q.shape[1] == 1 else _prefill
        written = self.write(state, k, v, positions, end)
        o, lse = attend(_Step(state, written, q, k, v, positions, end, call.scale, sinks, window))
        return Attended(written, o, lse, aux)

    def reads_pages(self, state: PrefixRingState, q: Array, v: Array, call: Call) -> bool:
        """`LayerCacheSpec.reads_pages`: on kernels."""
        return self._implementation(state, q, v, call) == "pallas"

    def seen(self, x: Shaped[Array, "*B C"]) -> Shaped[Array, "*B C"]:
        """Near keys or values as queries see them: as they are."""
        return x

    def held(self, state: PrefixRingState) -> PrefixRingState:
        """A state of whole near tokens as this cache keeps it."""
        return state

    def kernel_rings(self, state: PrefixRingState) -> tuple[Any, Any] | None:
        """What kernels write near tokens of R = Z = 0 to; None where they do not know its form."""
        return state.ring_k, state.ring_v

    def decodes_held(self, state: PrefixRingState, q: Array, v: Array, call: Call) -> bool:
        """Whether `decode_held` can run; raises as `attend` does."""
        return self._implementation(state, q, v, call) == "pallas"

    def decode_held(
        self, state: PrefixRingState, q: Float[Array, "B 1 N H"], positions: Int[Array, "B 1"], call: Call
    ) -> Parts:
        """`attend` of single tokens that the cache holds already, on kernels."""
        sinks, window = state.near
        given, options = _held(state, q, positions, sinks, window)
        return decode_parts(*given, scale=call.scale, **options)

    def _sees_near(self, q: Array, v: Array) -> bool:
        return q.shape[-1] > self.R or v.shape[-1] > self.Z

    def _implementation(self, state: PrefixRingState, q: Array, v: Array, call: Call) -> Implementation:
        """What attends to the cache; raises as `attend` does."""
        near, ((k, v_held), table) = self._sees_near(q, v), pools_of((state.k, state.v))
        sinks, window = state.near if near else (0, 0)
        rings = (state.ring_k, state.ring_v) if near else None
        refusal = partial(cache_refusal, sinks=sinks, window=window, table=table)
        refusals: dict[Implementation, Callable[[], str | None]] = {
            "pallas": lambda: refusal(q, k, v_held, rings),
            "cudnn": lambda: "it does not read this cache",
        }
        kind = "decode" if q.shape[1] == 1 else "prefill"
        return choose_implementation(kind, call.implementation, refusals)

    def attend_whole(
        self, q: Array, k: Array, v: Array, positions: Array, aux: object, call: Call
    ) -> Attended:
        """`LayerCacheSpec.attend_whole`, with no cache at all."""
        o, lse = self_attention(
            q,
            k,
            v,
            scale=call.scale,
            qk_rank=self.R,
            v_rank=self.Z,
            sinks=self.sinks,
            window=self.window,
            implementation=call.implementation,
        )
        return Attended(None, o, lse, aux)


def put_tokens(
    held: Array | Pages, x: Shaped[Array, "B T K C"], positions: Int[Array, "B T"], end: Int[Array, " B"]
) -> Array | Pages:
    """`held` [B, K, S, C], or pages of it, with those tokens x below `end`, each in its position's slot."""
    start = positions[:, 0]
    if not x.shape[-1]:
        return held
    if not isinstance(held, Pages):
        return put_rows(held, x, start, positions < end[:, None])
    if x.shape[1] == 1:
        return held.put_token(x[:, 0], jnp.where(start < end, start, held.slots))
    return held.put_chunk(x, start, end)


def ring_slots(sinks: int, window: int, capacity: int) -> int:
    """Slots of the ring of a cache of `capacity` tokens.

    The window's and, rounded up to the 8 rows that a GPU copies at a time, the sinks'.
    """
    return min(window, capacity) + -(-min(sinks, capacity) // 8) * 8


def put_ring(ring: Array, *, x: Array, positions: Array, end: Array, sinks: int, window: int) -> Array:
    """`ring` [B, K, M, C] with the tokens x [B, T, K, C] below `end` that are near, each in its slot."""
    if x.shape[1] == 1:
        slot, taken = slot_of_token(positions, end, sinks=sinks, window=window)
        rows = jnp.arange(x.shape[0])[:, None]
        return ring.at[rows, :, jnp.where(taken, slot, ring.shape[2])].set(x, mode="drop")
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
    """The ring of rows of `end` tokens: what x has of it, at `positions`, else what it held before."""
    wanted = ring_positions(ring.shape[2], end[:, None] - 1, sinks=sinks, window=window)
    start, T = positions[:, :1], x.shape[1]
    kept = (wanted >= start) & (wanted < start + T)
    source = jnp.clip(wanted - start, 0, T - 1)
    taken = jnp.take_along_axis(x, source[:, :, None, None], axis=1).swapaxes(1, 2)
    return jnp.where(kept[:, None, :, None], taken, ring)


def _read_recent(state: PrefixRingState, start: Array, sinks: int, window: int) -> NearKeys:
    """All coordinates of the `window` positions before `start` [B]; position -1 marks an absent one."""
    positions = start[:, None] - window + jnp.arange(window)  # [B, W]
    slots = ring_slot(positions, sinks=sinks, window=window)
    rows = jnp.arange(start.shape[0])[:, None]

    def gather(buffer, slot):
        return buffer[rows, :, slot].swapaxes(1, 2)

    prefix = jnp.maximum(positions, 0)
    return NearKeys(
        _joined(gather(state.k, prefix), gather(state.ring_k, slots)),
        _joined(gather(state.v, prefix), gather(state.ring_v, slots)),
        jnp.where(positions >= sinks, positions, -1),
    )


def _read_sinks(state: PrefixRingState, sinks: int, window: int) -> NearKeys:
    batch = state.k.shape[0]

    def join(prefix, ring):
        return _joined(prefix[:, :, :sinks], ring[:, :, window : window + sinks])

    return NearKeys(
        join(state.k, state.ring_k),
        join(state.v, state.ring_v),
        jnp.broadcast_to(jnp.arange(sinks), (batch, sinks)),
    )


def _joined(first: Array, trailing: Array) -> Array:
    """All coordinates; of no first ones there are no slots either."""
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
    """Trailing coordinates by position, row i for position first + i: the ring's up to `start`, then `new`.

    Sinks are in their rows where first lets them; other rows of positions before start - window, and those
    past the new tokens, are unspecified; start - first is at most `past`.
    """
    positions = first[:, None] + jnp.arange(past)
    slots = ring_slot(positions, sinks=sinks, window=window)
    old = jnp.take_along_axis(ring, slots[:, None, :, None], axis=2)
    both = jnp.concatenate([old, new.swapaxes(1, 2)], axis=2)
    T = new.shape[1]
    rows, held = jnp.arange(past + T), (start - first)[:, None]
    source = jnp.where(rows < held, rows, jnp.minimum(past + rows - held, past + T - 1))
    return jnp.take_along_axis(both, source[:, None, :, None], axis=2)


class _Step(NamedTuple):
    """New tokens, as `PrefixRing.attend` takes them, and the cache without them (`state`) and with them."""

    state: PrefixRingState
    written: PrefixRingState
    q: Array
    k: Array
    v: Array
    positions: Array
    end: Array
    scale: float
    sinks: int
    window: int


def _on_xla(step: _Step) -> tuple[Array, Array]:
    """On any device: near keys are gathered from the cache before and from the new tokens."""
    state, written, q, k, v, positions, _, scale, sinks, window = step
    near = None
    if sinks or window:
        recent = _read_recent(state, positions[:, 0], sinks, window) if window else None
        own = NearKeys(k.swapaxes(1, 2), v.swapaxes(1, 2), jnp.where(positions >= sinks, positions, -1))
        parts = [part for part in (_read_sinks(written, sinks, window), recent, own) if part is not None]
        near = NearKeys(
            *(jnp.concatenate([part[i] for part in parts], axis) for i, axis in enumerate((2, 2, 1)))
        )
    return xla_attention(
        q, written.k, written.v, positions, scale=scale, near=near, sinks=sinks, window=window
    )


def _decode(step: _Step) -> tuple[Array, Array]:
    """One token a row, on the kernel: it is in the cache already."""
    given, options = _held(step.written, step.q, step.positions, step.sinks, step.window)
    o, lse = decode_attention(*given, scale=step.scale, **options)
    return o[:, None], lse[..., None]


def _held(
    state: PrefixRingState, q: Array, positions: Array, sinks: int, window: int
) -> tuple[tuple[Array, ...], dict[str, Any]]:
    """What `decode_attention` takes of single tokens that a cache holds."""
    ring = Ring(state.ring_k, state.ring_v) if sinks or window else None
    (k, v), table = pools_of((state.k, state.v))
    options = {"ring": ring, "sinks": sinks, "window": window, "block_table": table}
    return (q[:, 0], k, v, positions[:, 0] + 1), options


def _prefill(step: _Step) -> tuple[Array, Array]:
    """A piece of each prompt on the kernel, with the ring as it was before the new tokens overwrote it."""
    state, written, q, k, v, positions, end, scale, sinks, window = step
    trailing, start = None, positions[:, 0]
    (held_k, held_v), table = pools_of((written.k, written.v))
    if window:
        R, Z = held_k.shape[-1], held_v.shape[-1]
        past = -(-window // TAIL_ALIGNMENT) * TAIL_ALIGNMENT + TAIL_ALIGNMENT
        first = jnp.maximum(start - window + 1, 0) // TAIL_ALIGNMENT * TAIL_ALIGNMENT
        rows = partial(recent_rows, start=start, first=first, sinks=sinks, window=window, past=past)
        tails = rows(state.ring_k, k[..., R:]), rows(state.ring_v, v[..., Z:])
        rings = written.ring_k, written.ring_v
        heads = (ring[:, :, window:] for ring in rings) if sinks else (None, None)
        trailing = Trailing(*tails, first, *heads)
    return prefill_attention(
        q,
        held_k,
        held_v,
        scale=scale,
        starts=start,
        lengths=end,
        trailing=trailing,
        sinks=sinks,
        window=window,
        block_table=table,
    )
