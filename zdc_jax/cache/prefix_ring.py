"""The KV cache: a prefix of the first coordinates of all tokens, a ring of the trailing ones of near tokens.

Because the basis is nested, a token leaves the window by being overwritten in the ring: its prefix
coordinates are already where far attention reads them. Nothing is copied, nothing is recomputed (ours).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from kernels_pallas import TAIL_ALIGNMENT, Ring, Trailing, decode_attention, prefill_attention
from zdc_jax.axes import Array
from zdc_jax.cache.classes import GroupState, Segment
from zdc_jax.errors import CacheMemoryError
from zdc_jax.ops.attention import Implementation, cache_refusal, choose_implementation
from zdc_jax.ops.xla import NearKeys, xla_attention
from zdc_jax.plan import CompressionPlan, LayerRanks


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "ring_k", "ring_v"], meta_fields=[])
@dataclass(frozen=True)
class LayerCache:
    """Cache of one layer, updated in place.

    k [B, K, S, R], v [B, K, S, Z]: first coordinates of all tokens; ring_k [B, K, M, H-R],
    ring_v [B, K, M, H-Z]: trailing coordinates of the last tokens, position p ≥ sinks in slot p mod
    window, and of the sinks, position p in slot window + p.
    """

    k: Array
    v: Array
    ring_k: Array
    ring_v: Array


@partial(jax.tree_util.register_dataclass, data_fields=["near", "important", "rest"], meta_fields=[])
@dataclass(frozen=True)
class ClassLayerCache:
    """Cache of one layer with two token classes.

    near: what a layer without far attention holds, all coordinates of the window and the sinks. important,
    rest: the first coordinates of all tokens, by class.
    """

    near: LayerCache
    important: Segment
    rest: Segment


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "lengths", "groups"],
    meta_fields=["sinks", "window"],
)
@dataclass(frozen=True)
class KVCache:
    """Cache of a whole model, layer by layer; `lengths` [B] int32 tokens held per row.

    Row b holds positions 0 … lengths[b]-1; slots past that are unspecified and never attended to.
    """

    layers: tuple[LayerCache | ClassLayerCache, ...]
    lengths: Int[Array, " B"]
    sinks: int
    window: int
    groups: tuple[GroupState, ...] = ()

    @classmethod
    def create(cls, plan: CompressionPlan, *, batch: int, capacity: int, dtype: jnp.dtype) -> "KVCache":
        """An empty cache for `batch` rows of up to `capacity` tokens.

        Raises:
          CacheMemoryError: when it cannot fit in free device memory, before anything is allocated.
        """
        check_fits(plan, batch=batch, capacity=capacity, dtype=dtype, free=free_bytes())
        ring, H = plan.ring_slots(capacity), plan.head_dim
        empty = lambda slots, width: jnp.zeros((batch, plan.num_kv_heads, slots, width), dtype)

        def alike(ranks: LayerRanks) -> LayerCache:
            rings = empty(ring, H - ranks.qk), empty(ring, H - ranks.v)
            return LayerCache(empty(capacity, ranks.qk), empty(capacity, ranks.v), *rings)

        def layer(index: int) -> LayerCache | ClassLayerCache:
            if plan.classes is None or not plan.has_classes(index):
                return alike(plan.layers[index])
            slots = plan.classes.segment_slots(plan.classes.group_of(index), capacity)
            ranks = plan.classes.important[index], plan.layers[index]
            segments = (Segment(empty(n, r.qk), empty(n, r.v)) for n, r in zip(slots, ranks, strict=True))
            return ClassLayerCache(alike(LayerRanks(0, 0)), *segments)

        layers = tuple(layer(index) for index in range(len(plan.layers)))
        lengths = jnp.zeros(batch, jnp.int32)
        groups: tuple[GroupState, ...] = ()
        if plan.classes is not None:
            create = partial(GroupState.create, plan.classes, batch=batch, capacity=capacity)
            groups = tuple(create(index) for index in range(len(plan.classes.leaders)))
        return cls(layers, lengths, min(plan.sinks, capacity), min(plan.window, capacity), groups)

    @property
    def capacity(self) -> int:
        """S, tokens a row can hold."""
        first = self.layers[0]
        assert isinstance(first, LayerCache)  # Groups begin with a leader, which treats all tokens alike.
        return first.k.shape[2]

    def bytes(self) -> int:
        """Bytes of all arrays; equals `plan.bytes(capacity, batch, itemsize)`."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def free_bytes() -> int | None:
    """Free memory of the first device (on CPU: of the host), None where it cannot be told."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def check_fits(
    plan: CompressionPlan, *, batch: int, capacity: int, dtype: jnp.dtype, free: int | None
) -> None:
    """Raises `CacheMemoryError` naming bytes needed, bytes free and the largest batch and length that fit."""
    itemsize = jnp.dtype(dtype).itemsize
    needed = plan.bytes(capacity, batch, itemsize)
    if free is None or needed <= free:
        return
    largest_batch = free // plan.bytes(capacity, 1, itemsize)
    low, high = 0, capacity
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plan.bytes(middle, batch, itemsize) <= free else (low, middle - 1)
    raise CacheMemoryError(
        f"a KV cache of {batch=} x {capacity=} tokens needs {needed:,} bytes, {free:,} are free; "
        f"what fits: batch {largest_batch} at this length, or length {low} at this batch"
    )


def append(
    cache: LayerCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    end: Int[Array, " B"],
    *,
    sinks: int,
    window: int,
) -> tuple[LayerCache, NearKeys | None]:
    """Stores tokens `positions < end` of one layer and gives the keys near to them.

    Without a ring (`sinks == window == 0`) k and v come already truncated and there are no near keys.
    """
    near_past = _read_recent(cache, positions[:, 0], sinks, window) if window else None
    cache = write(cache, k, v, positions, end, sinks=sinks, window=window)
    if not (sinks or window):
        return cache, None
    own = NearKeys(k.swapaxes(1, 2), v.swapaxes(1, 2), jnp.where(positions >= sinks, positions, -1))
    parts = [_read_sinks(cache, sinks, window), near_past, own]
    return cache, NearKeys(
        *(
            jnp.concatenate([part[i] for part in parts if part is not None], axis=axis)
            for i, axis in enumerate((2, 2, 1))
        )
    )


def write(
    cache: LayerCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    end: Int[Array, " B"],
    *,
    sinks: int,
    window: int,
) -> LayerCache:
    """Stores tokens `positions < end` of one layer; without a ring they come truncated.

    More than one token a row: all rows begin at the same position, and positions stay below the capacity, for
    padding is written as well, to slots past a row's end that nothing attends to.
    """
    R, Z = cache.k.shape[-1], cache.v.shape[-1]
    put = partial(_put_one, end=end) if k.shape[1] == 1 else _put_piece
    new_k = put(cache.k, k[..., :R], positions)
    new_v = put(cache.v, v[..., :Z], positions)
    if not (sinks or window):
        return replace(cache, k=new_k, v=new_v)
    put_ring = partial(_put_ring, positions=positions, end=end, sinks=sinks, window=window)
    return LayerCache(
        new_k, new_v, put_ring(cache.ring_k, x=k[..., R:]), put_ring(cache.ring_v, x=v[..., Z:])
    )


def _put_one(buffer: Array, x: Array, positions: Array, end: Array) -> Array:
    """One token a row; one that is not below `end` goes nowhere."""
    slot = jnp.where(positions < end[:, None], positions, buffer.shape[2])
    rows = jnp.arange(x.shape[0])[:, None]
    return buffer.at[rows, :, slot].set(x, mode="drop")


def _put_piece(buffer: Array, x: Array, positions: Array) -> Array:
    """A piece of every row in one contiguous copy (a scatter is several times slower), padding and all."""
    return jax.lax.dynamic_update_slice(buffer, x.swapaxes(1, 2), (0, 0, positions[0, 0], 0))


def _put_ring(ring: Array, *, x: Array, positions: Array, end: Array, sinks: int, window: int) -> Array:
    """The last `window` tokens and the sinks, each to its slot."""
    if x.shape[1] == 1:
        nowhere = ring.shape[2]
        slot = jnp.where(positions < sinks, window + positions, positions % window if window else nowhere)
        slot = jnp.where(positions < end[:, None], slot, nowhere)
        rows = jnp.arange(x.shape[0])[:, None]
        return ring.at[rows, :, slot].set(x, mode="drop")
    return ring_of_piece(ring, x, positions, end, sinks=sinks, window=window)


def ring_of_piece(
    ring: Float[Array, "B K M C"],
    x: Float[Array, "B T K C"],
    positions: Int[Array, "B T"],
    end: Int[Array, " B"],
    *,
    sinks: int,
    window: int,
) -> Float[Array, "B K M C"]:
    """The ring of rows of `end` tokens: what x has of it, at `positions`, else what it held before."""
    slots = jnp.arange(ring.shape[2])
    last = end[:, None] - 1
    recent = last - (last - slots) % max(window, 1)
    wanted = jnp.where(slots < window, recent, slots - window)
    start, T = positions[:, :1], x.shape[1]
    kept = (
        jnp.where(slots < window, wanted >= sinks, wanted < sinks)
        & (wanted >= start)
        & (wanted < jnp.minimum(end[:, None], start + T))
    )
    source = jnp.clip(wanted - start, 0, T - 1)
    taken = jnp.take_along_axis(x, source[:, :, None, None], axis=1).swapaxes(1, 2)
    return jnp.where(kept[:, None, :, None], taken, ring)


def _read_recent(cache: LayerCache, start: Array, sinks: int, window: int) -> NearKeys:
    """All coordinates of the `window` positions before `start` [B]; position -1 marks an absent one."""
    positions = start[:, None] - window + jnp.arange(window)  # [B, W]
    slots = positions % window
    rows = jnp.arange(start.shape[0])[:, None]
    gather = lambda buffer, slot: buffer[rows, :, slot].swapaxes(1, 2)
    prefix = jnp.maximum(positions, 0)
    return NearKeys(
        jnp.concatenate([gather(cache.k, prefix), gather(cache.ring_k, slots)], -1),
        jnp.concatenate([gather(cache.v, prefix), gather(cache.ring_v, slots)], -1),
        jnp.where(positions >= sinks, positions, -1),
    )


def _read_sinks(cache: LayerCache, sinks: int, window: int) -> NearKeys:
    batch = cache.k.shape[0]
    join = lambda prefix, ring: jnp.concatenate(
        [prefix[:, :, :sinks], ring[:, :, window : window + sinks]], -1
    )
    return NearKeys(
        join(cache.k, cache.ring_k),
        join(cache.v, cache.ring_v),
        jnp.broadcast_to(jnp.arange(sinks), (batch, sinks)),
    )


def recent_rows(
    ring: Float[Array, "B K M C"],
    new: Float[Array, "B T K C"],
    start: Int[Array, ""],
    first: Int[Array, ""],
    *,
    sinks: int,
    window: int,
    past: int,
) -> Float[Array, "B K past+T C"]:
    """Trailing coordinates by position, row i for position first + i: the ring's up to `start`, then `new`.

    Sinks are in their rows where first lets them; other rows of positions before start - window are
    unspecified; start - first is at most `past`.
    """
    positions = first + jnp.arange(past)
    old = ring[:, :, jnp.where(positions < sinks, window + positions, positions % window)]
    new = new.swapaxes(1, 2)
    rows = jnp.concatenate([old, jnp.zeros_like(new)], axis=2)
    return jax.lax.dynamic_update_slice_in_dim(rows, new, start - first, axis=2)


def cached_attention(
    q: Float[Array, "B T N Hq"],
    k: Float[Array, "B T K Hq"],
    v: Float[Array, "B T K Hv"],
    cache: LayerCache,
    positions: Int[Array, "B T"],
    end: Int[Array, " B"],
    *,
    scale: float,
    sinks: int,
    window: int,
    implementation: Implementation | None = None,
) -> tuple[LayerCache, Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Stores new tokens in the cache of one layer and lets them attend to all that it holds.

    Returns the cache, what attention gives, and the log-sum-exp of its scaled scores.

    Args:
      q, k, v: of the new tokens; at full rank where the cache has a ring, else truncated.
      positions: consecutive in each row; tokens at or past `end` [B] are padding, whose results are
        unspecified; what `cache.write` asks of pieces holds here.
      sinks, window: those of the cache. implementation: see the module; None chooses.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    R, Z = cache.k.shape[-1], cache.v.shape[-1]
    near = q.shape[-1] > R or v.shape[-1] > Z
    if not near:
        sinks = window = 0
    refusals: dict[Implementation, Callable[[], str | None]] = {
        "pallas": lambda: cache_refusal(
            q,
            cache.k,
            cache.v,
            (cache.ring_k, cache.ring_v) if near else None,
            sinks=sinks,
            window=window,
        ),
        "cudnn": lambda: "it does not read this cache",
    }
    kind = "decode" if q.shape[1] == 1 else "prefill"
    if choose_implementation(kind, implementation, refusals) == "xla":
        cache, keys = append(cache, k, v, positions, end, sinks=sinks, window=window)
        prefix = cache.k, cache.v
        o, lse = xla_attention(q, *prefix, positions, scale=scale, near=keys, sinks=sinks, window=window)
        return cache, o, lse
    if q.shape[1] == 1:
        cache = write(cache, k, v, positions, end, sinks=sinks, window=window)
        ring = Ring(cache.ring_k, cache.ring_v) if near else None
        lengths = positions[:, 0] + 1
        o, lse = decode_attention(
            q[:, 0],
            cache.k,
            cache.v,
            lengths,
            scale=scale,
            ring=ring,
            sinks=sinks,
            window=window,
        )
        return cache, o[:, None], lse[..., None]
    return _pallas_prefill(q, k, v, cache, positions, end, scale, sinks, window)


def _pallas_prefill(
    q: Array,
    k: Array,
    v: Array,
    cache: LayerCache,
    positions: Array,
    end: Array,
    scale: float,
    sinks: int,
    window: int,
) -> tuple[LayerCache, Array, Array]:
    """A piece of the prompt on what the cache holds: the ring is read before the new tokens overwrite it."""
    start, trailing = positions[0, 0], None  # All rows begin a piece at the same position.
    R, Z = cache.k.shape[-1], cache.v.shape[-1]
    if window:
        past = -(-window // TAIL_ALIGNMENT) * TAIL_ALIGNMENT + TAIL_ALIGNMENT
        first = jnp.maximum(start - window + 1, 0) // TAIL_ALIGNMENT * TAIL_ALIGNMENT
        rows = partial(recent_rows, start=start, first=first, sinks=sinks, window=window, past=past)
        tails = rows(cache.ring_k, k[..., R:]), rows(cache.ring_v, v[..., Z:])
    cache = write(cache, k, v, positions, end, sinks=sinks, window=window)
    if window:
        rings = cache.ring_k, cache.ring_v
        heads = (ring[:, :, window:] for ring in rings) if sinks else (None, None)
        trailing = Trailing(*tails, jnp.broadcast_to(first, end.shape), *heads)
    o, lse = prefill_attention(
        q,
        cache.k,
        cache.v,
        scale=scale,
        starts=positions[:, 0],
        lengths=end,
        trailing=trailing,
        sinks=sinks,
        window=window,
    )
    return cache, o, lse
