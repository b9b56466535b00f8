"""The KV cache of a whole model, and memory checks before it is allocated."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from zdc_jax.axes import Array
from zdc_jax.cache.specs.spec import LayerCacheSpec, State
from zdc_jax.errors import CacheMemoryError

LENGTH_BYTES = 4
"""Bytes of the int32 length of each sequence."""
LAYERS_AT_ONCE = 8
"""Least number of layers whose arrays one compiled program creates.

Arrays that were created alone took the host of an H100 about 0.5 ms each, 0.14 s for the 280 arrays of 28
quantized layers. For few layers the compilation would take longer.
"""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "lengths", "table"],
    meta_fields=["specs", "capacity"],
)
@dataclass(frozen=True)
class KVCache:
    """KV cache of a whole model.

    Sequence b holds positions 0 … lengths[b]-1. Later slots are unspecified, and attention never reads them.

    Attributes:
      layers: state of each layer.
      lengths: tokens stored per sequence, [B] int32.
      specs: spec of each layer, which defines the contents of its state.
      capacity: largest length of a sequence.
      table: page table [B, n] int32 if the tokens lie in pages (`zdc_jax.cache.paging.paged`), else None.
    """

    layers: tuple[State, ...]
    lengths: Int[Array, " B"]
    specs: tuple[LayerCacheSpec, ...]
    capacity: int
    table: Int[Array, "B n"] | None = None

    @classmethod
    def create(cls, specs: Sequence[LayerCacheSpec], *, batch: int, capacity: int) -> "KVCache":
        """Create an empty cache for `batch` sequences of up to `capacity` tokens.

        Raises:
          CacheMemoryError: the cache does not fit in free device memory; raised before anything is allocated.
        """
        check_fits_now(specs, batch=batch, capacity=capacity)
        eager = len(specs) < LAYERS_AT_ONCE or not fits_program(specs, batch=batch, capacity=capacity)
        create = _create_layers if eager else _create_layers_at_once
        layers, lengths = create(tuple(specs), batch, capacity)
        return cls(layers, lengths, tuple(specs), capacity)

    @classmethod
    def trace(cls, specs: Sequence[LayerCacheSpec], *, batch: int, capacity: int) -> "KVCache":
        """Create an empty cache within a program that is being traced, without a check of memory."""
        layers, lengths = _create_layers(tuple(specs), batch, capacity)
        return cls(layers, lengths, tuple(specs), capacity)

    def release(self, rows: Bool[Array, " B"]) -> "KVCache":
        """Return the cache with the sequences `rows` empty, so that other requests can fill them."""
        layers = tuple(spec.release(state, rows) for spec, state in zip(self.specs, self.layers, strict=True))
        return replace(self, layers=layers, lengths=jnp.where(rows, 0, self.lengths))

    @property
    def own(self) -> list[list[Array]]:
        """Leaves of each layer that begin with the axis B: all but page pools."""
        return [[leaf for leaf, pooled in layer if not pooled] for layer in self._list_leaves()]

    @property
    def pools(self) -> list[Array]:
        """Page pools of all layers."""
        return [leaf for layer in self._list_leaves() for leaf, pooled in layer if pooled]

    def with_own(self, own: Sequence[Sequence[Array]]) -> "KVCache":
        """Return the cache with the leaves of `own` replaced."""
        return self._with_leaves(itertools.chain.from_iterable(own), pooled=False)

    def with_pools(self, pools: Sequence[Array]) -> "KVCache":
        """Return the cache with its page pools replaced."""
        return self._with_leaves(pools, pooled=True)

    def _with_leaves(self, leaves: Iterable[Array], *, pooled: bool) -> "KVCache":
        new, tree = iter(leaves), jax.tree.structure(self.layers)
        old = itertools.chain.from_iterable(self._list_leaves())
        all_leaves = [next(new) if is_pool == pooled else leaf for leaf, is_pool in old]
        return replace(self, layers=jax.tree.unflatten(tree, all_leaves))

    def row(self, index: Array) -> "KVCache":
        """Return the cache of one sequence, together with the page pools of all sequences."""
        take = partial(jax.lax.dynamic_slice_in_dim, start_index=index, slice_size=1)
        table = None if self.table is None else take(self.table)
        layers = tuple(
            spec.of_rows(state, index[None]) for spec, state in zip(self.specs, self.layers, strict=True)
        )
        return replace(self, layers=layers, lengths=take(self.lengths), table=table)

    def with_row(self, index: Array, one: "KVCache") -> "KVCache":
        """Return the cache with one sequence and the page pools taken from `one`, a cache from `row`."""
        layers = zip(self.specs, self.layers, one.layers, strict=True)
        states = tuple(spec.with_rows(state, index[None], own) for spec, state, own in layers)
        lengths = jax.lax.dynamic_update_slice_in_dim(self.lengths, one.lengths, index, 0)
        return replace(self, layers=states, lengths=lengths)

    def first(self, count: int) -> "KVCache":
        """Return the cache of the first `count` sequences, together with the page pools of all."""
        table = None if self.table is None else self.table[:count]
        layers = tuple(
            spec.first_rows(state, count) for spec, state in zip(self.specs, self.layers, strict=True)
        )
        return replace(self, layers=layers, lengths=self.lengths[:count], table=table)

    def with_first(self, some: "KVCache") -> "KVCache":
        """Return the cache with its first sequences and the page pools taken from `some`, a `first` cache."""
        layers = zip(self.specs, self.layers, some.layers, strict=True)
        states = tuple(spec.with_first_rows(state, own) for spec, state, own in layers)
        lengths = jnp.concatenate([some.lengths, self.lengths[len(some.lengths) :]])
        return replace(self, layers=states, lengths=lengths)

    def _list_leaves(self) -> list[list[tuple[Array, bool]]]:
        """Return the leaves of each layer, and which are page pools."""
        layers = zip(self.specs, self.layers, strict=True)
        return [list(zip(jax.tree.leaves(state), spec.pooled(state), strict=True)) for spec, state in layers]

    def bytes(self) -> int:
        """Return the bytes of all arrays and the `fixed_bytes` of the specs; equals `cache_bytes`."""
        arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(self))
        return arrays + sum(spec.fixed_bytes for spec in self.specs)


def _create_layers(
    specs: tuple[LayerCacheSpec, ...], batch: int, capacity: int
) -> tuple[tuple[State, ...], Int[Array, " B"]]:
    """Return the states of empty layers, and the lengths of their sequences."""
    return tuple(spec.create(batch, capacity) for spec in specs), jnp.zeros(batch, jnp.int32)


_create_layers_at_once = jax.jit(_create_layers, static_argnums=(0, 1, 2))


def fits_program(specs: Sequence[LayerCacheSpec], *, batch: int, capacity: int) -> bool:
    """Return whether a compiled program can create a cache on every device.

    A program that moves arrays to the host compiles on some devices only.
    """
    return not any(spec.host_bytes(capacity, batch) for spec in specs)


def cache_bytes(specs: Sequence[LayerCacheSpec], capacity: int, batch: int = 1) -> int:
    """Return the bytes of a cache for `batch` sequences of `capacity` tokens.

    Lengths and `fixed_bytes` are included.
    """
    layers = sum(n * (spec.bytes(capacity, batch) + spec.fixed_bytes) for spec, n in Counter(specs).items())
    return batch * LENGTH_BYTES + layers


def free_bytes() -> int | None:
    """Return the free memory of the first device, or of the host on CPU; None if it is unknown."""
    free = free_device_bytes()
    return free_host_bytes() if free is None else free


def free_device_bytes() -> int | None:
    """Return the free memory of the first device; None if the device does not report it, as on CPU."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None


def free_host_bytes() -> int | None:
    """Return the free memory of the host; None if it is unknown."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def device_bytes(specs: Sequence[LayerCacheSpec], capacity: int, batch: int = 1) -> int:
    """Return the part of `cache_bytes` that lies in device memory."""
    return cache_bytes(specs, capacity, batch) - host_bytes(specs, capacity, batch)


def host_bytes(specs: Sequence[LayerCacheSpec], capacity: int, batch: int = 1) -> int:
    """Return the part of `cache_bytes` that lies in host memory next to a device."""
    return sum(n * spec.host_bytes(capacity, batch) for spec, n in Counter(specs).items())


def check_fits_now(specs: Sequence[LayerCacheSpec], *, batch: int, capacity: int) -> None:
    """Raise `CacheMemoryError` if a cache does not fit in the memory that is free now."""
    check_fits(specs, batch=batch, capacity=capacity, free=free_bytes())


def check_fits(specs: Sequence[LayerCacheSpec], *, batch: int, capacity: int, free: int | None) -> None:
    """Raise `CacheMemoryError` if a cache does not fit in memory.

    The message states the bytes needed, the bytes free, and the largest batch and capacity that fit.

    Args:
      specs: spec of each layer.
      batch: number of sequences.
      capacity: tokens per sequence.
      free: free bytes of the device; None skips its check. The part in host memory is compared with the
        host's own free memory.
    """
    memories = (device_bytes, free, ""), (host_bytes, free_host_bytes(), " on the host")
    for count_bytes, limit, where in memories:
        needed = count_bytes(specs, capacity, batch)
        if limit is None or needed <= limit:
            continue
        largest_batch = limit // count_bytes(specs, capacity)
        low, high = 0, capacity
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if count_bytes(specs, middle, batch) <= limit else (low, middle - 1)
        largest = [f"batch={largest_batch} at this capacity"] if largest_batch else []
        largest += [f"capacity={low} at this batch"] if low else []
        advice = f"the largest are {' and '.join(largest)}" if largest else "use a plan with fewer bytes"
        raise CacheMemoryError(
            f"{batch=}, {capacity=}: the KV cache needs {needed:,} bytes{where}, {limit:,} are free; {advice}"
        )
