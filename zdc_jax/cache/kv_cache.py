"""The KV cache of a whole model: one state a layer, and what must fit in memory before it is made."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from zdc_jax.axes import Array
from zdc_jax.cache.spec import LayerCacheSpec, State
from zdc_jax.errors import CacheMemoryError

LENGTH_BYTES = 4
"""Every row of a cache stores its length as one int32."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "lengths", "table"],
    meta_fields=["specs", "capacity"],
)
@dataclass(frozen=True)
class KVCache:
    """Cache of a whole model, layer by layer; `lengths` [B] int32 tokens held per row.

    Row b holds positions 0 … lengths[b]-1, of at most `capacity`; slots past that are unspecified and never
    attended to. `specs` tell what `layers` hold. table: [B, n] int32, pages of each row, where tokens lie in
    pages (`zdc_jax.cache.paged`).
    """

    layers: tuple[State, ...]
    lengths: Int[Array, " B"]
    specs: tuple[LayerCacheSpec, ...]
    capacity: int
    table: Int[Array, "B n"] | None = None

    @classmethod
    def create(cls, specs: Sequence[LayerCacheSpec], *, batch: int, capacity: int) -> "KVCache":
        """An empty cache for `batch` rows of up to `capacity` tokens.

        Raises:
          CacheMemoryError: when it cannot fit in free device memory, before anything is allocated.
        """
        check_fits(specs, batch=batch, capacity=capacity, free=free_bytes())
        layers = tuple(spec.create(batch, capacity) for spec in specs)
        return cls(layers, jnp.zeros(batch, jnp.int32), tuple(specs), capacity)

    def release(self, rows: Bool[Array, " B"]) -> "KVCache":
        """The cache with `rows` empty, each to be filled by another request."""
        layers = tuple(spec.release(state, rows) for spec, state in zip(self.specs, self.layers, strict=True))
        return replace(self, layers=layers, lengths=jnp.where(rows, 0, self.lengths))

    @property
    def own(self) -> list[Array]:
        """Leaves of all layers that begin with the axis B: all but pools of pages."""
        return [leaf for leaf, pooled in self._leaves() if not pooled]

    def with_own(self, own: Sequence[Array]) -> "KVCache":
        """With other leaves in the place of `own`."""
        new, tree = iter(own), jax.tree.structure(self.layers)
        leaves = [leaf if pooled else next(new) for leaf, pooled in self._leaves()]
        return replace(self, layers=jax.tree.unflatten(tree, leaves))

    def row(self, index: Array) -> "KVCache":
        """The cache of one row, beside the pools of all."""
        take, rows = lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index, 1), index[None]
        table = None if self.table is None else take(self.table)
        layers = tuple(spec.of_rows(state, rows) for spec, state in zip(self.specs, self.layers, strict=True))
        return replace(self, layers=layers, lengths=take(self.lengths), table=table)

    def with_row(self, index: Array, one: "KVCache") -> "KVCache":
        """With one row, and all pools, as they are in `one`, a cache of `row`."""
        layers = zip(self.specs, self.layers, one.layers, strict=True)
        put = tuple(spec.with_rows(state, index[None], own) for spec, state, own in layers)
        lengths = jax.lax.dynamic_update_slice_in_dim(self.lengths, one.lengths, index, 0)
        return replace(self, layers=put, lengths=lengths)

    def _leaves(self) -> list[tuple[Array, bool]]:
        layers = zip(self.specs, self.layers, strict=True)
        pooled = [is_pool for spec, state in layers for is_pool in spec.pooled(state)]
        return list(zip(jax.tree.leaves(self.layers), pooled, strict=True))

    def bytes(self) -> int:
        """Bytes of all arrays, and `fixed_bytes` of its specs, whose `held_bytes` it equals."""
        arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(self))
        return arrays + sum(spec.fixed_bytes for spec in self.specs)


def cache_bytes(specs: Sequence[LayerCacheSpec], capacity: int, batch: int = 1) -> int:
    """Bytes of a cache for `batch` rows of `capacity` tokens, lengths and `fixed_bytes` included."""

    def held(spec):
        return spec.bytes(capacity, batch) + spec.fixed_bytes

    return batch * LENGTH_BYTES + sum(n * held(spec) for spec, n in Counter(specs).items())


def free_bytes() -> int | None:
    """Free memory of the first device (on CPU: of the host), None where it cannot be told."""
    free = free_device_bytes()
    return free_host_bytes() if free is None else free


def free_device_bytes() -> int | None:
    """Free memory of the first device, None where it does not tell, as on CPU."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None


def free_host_bytes() -> int | None:
    """Free memory of the host, None where it cannot be told."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def device_bytes(specs: Sequence[LayerCacheSpec], capacity: int, batch: int = 1) -> int:
    """Those of `held_bytes` that lie in the device's memory."""
    return cache_bytes(specs, capacity, batch) - host_bytes(specs, capacity, batch)


def host_bytes(specs: Sequence[LayerCacheSpec], capacity: int, batch: int = 1) -> int:
    """Those of `held_bytes` that lie in the host's memory beside a device."""
    return sum(n * spec.host_bytes(capacity, batch) for spec, n in Counter(specs).items())


def check_fits(specs: Sequence[LayerCacheSpec], *, batch: int, capacity: int, free: int | None) -> None:
    """Raises `CacheMemoryError` naming bytes needed, bytes free and the largest batch and length that fit.

    free: of the device. What lies in the host's memory is checked against that.
    """
    for held, limit, where in ((device_bytes, free, ""), (host_bytes, free_host_bytes(), " on the host")):
        needed = held(specs, capacity, batch)
        if limit is None or needed <= limit:
            continue
        largest_batch = limit // held(specs, capacity)
        low, high = 0, capacity
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if held(specs, middle, batch) <= limit else (low, middle - 1)
        raise CacheMemoryError(
            f"a KV cache of {batch=} x {capacity=} tokens needs {needed:,} bytes{where}, {limit:,} are free; "
            f"what fits: batch {largest_batch} at this length, or length {low} at this batch"
        )
