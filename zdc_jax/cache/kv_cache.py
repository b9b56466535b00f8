"""The KV cache of a whole model, and memory checks before it is allocated."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int, Shaped

from zdc_jax.axes import Array
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.specs.spec import LayerCacheSpec, State
from zdc_jax.errors import CacheMemoryError

LENGTH_BYTES = 4
"""Bytes of the int32 length of each sequence."""
LAYERS_AT_ONCE = 8
"""Least number of layers whose arrays one compiled program creates.

Arrays that were created alone took the host of an H100 about 0.5 ms each, 0.14 s for the 280 arrays of 28
quantized layers. For few layers the compilation would take longer.
"""


class LayerPlace(NamedTuple):
    """Place of a layer in arrays that several layers share.

    Attributes:
      holder: index of the layer whose state has the arrays.
      page: index of this layer's first page in page pools.
      row: index of its first sequence in other arrays.
    """

    holder: int
    page: int
    row: int


class LayerView(NamedTuple):
    """State of one layer as `LayerCacheSpec.attend` takes it.

    Attributes:
      state: arrays of the layer, and maybe of others.
      table: page table of this layer.
      first: index of this layer's first sequence in arrays outside pages; None if they have no other layers.
    """

    state: State
    table: Int[Array, "B n"] | None
    first: Int[Array, ""] | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "lengths", "table"],
    meta_fields=["specs", "capacity", "places"],
)
@dataclass(frozen=True)
class KVCache:
    """KV cache of a whole model.

    Sequence b holds positions 0 … lengths[b]-1. Later slots are unspecified, and attention never reads them.

    Attributes:
      layers: state of each layer. Where layers share arrays, one holds these, and others have empty ones.
      lengths: tokens stored per sequence, [B] int32.
      specs: spec of each layer, which defines the contents of its state.
      capacity: largest length of a sequence.
      table: page table [B, n] int32 if the tokens lie in pages (`zdc_jax.cache.paging.paged`), else None.
      places: place of each layer in shared arrays; empty if each layer has its own.
    """

    layers: tuple[State, ...]
    lengths: Int[Array, " B"]
    specs: tuple[LayerCacheSpec, ...]
    capacity: int
    table: Int[Array, "B n"] | None = None
    places: tuple[LayerPlace, ...] = ()

    @classmethod
    def create(
        cls, specs: Sequence[LayerCacheSpec], *, batch: int, capacity: int, join: bool = False
    ) -> "KVCache":
        """Create an empty cache for `batch` sequences of up to `capacity` tokens.

        With `join`, equal layers share arrays where kernels write them (`place_layers`). Each array that a
        program takes and returns costs the host about as much as the start of a kernel.

        Raises:
          CacheMemoryError: the cache does not fit in free device memory; raised before anything is allocated.
        """
        check_fits_now(specs, batch=batch, capacity=capacity)
        eager = len(specs) < LAYERS_AT_ONCE or not fits_program(specs, batch=batch, capacity=capacity)
        create = _create_layers if eager else _create_layers_at_once
        places = place_layers(specs, batch, capacity) if join else ()
        layers, lengths = create(tuple(specs), batch, capacity, places)
        return cls(layers, lengths, tuple(specs), capacity, places=places)

    @classmethod
    def trace(cls, specs: Sequence[LayerCacheSpec], *, batch: int, capacity: int) -> "KVCache":
        """Create an empty cache within a program that is being traced, without a check of memory."""
        layers, lengths = _create_layers(tuple(specs), batch, capacity, ())
        return cls(layers, lengths, tuple(specs), capacity)

    def of_layer(self, index: int) -> LayerView:
        """Return what a layer stores."""
        if not self.places:
            return LayerView(self.layers[index], self.table, None)
        holder, page, row = self.places[index]
        if sum(place.holder == holder for place in self.places) == 1:
            return LayerView(self.layers[holder], self.table, None)
        table = None if self.table is None else self.table + page
        return LayerView(self.layers[holder], table, jnp.int32(row))

    def with_layer(self, index: int, state: State) -> "KVCache":
        """Return the cache with the state of `of_layer` replaced."""
        holder = self.places[index].holder if self.places else index
        return replace(self, layers=(*self.layers[:holder], state, *self.layers[holder + 1 :]))

    def clear(self, row: Int[Array, ""], pages: Int[Array, " n"]) -> "KVCache":
        """Return the cache with zeros in pages, and in what a sequence stores outside pages.

        Page indices that are out of range are dropped.
        """

        def clear_leaf(layers: int, is_pool: bool, leaf: Array) -> Array:
            each = leaf.reshape(layers, len(leaf) // layers, *leaf.shape[1:])
            return each.at[:, pages if is_pool else row].set(0).reshape(leaf.shape)

        sharing = Counter(place.holder for place in self.places)
        layers = list(self.layers)
        for holder, spec in enumerate(self.specs):
            if count := sharing[holder] if self.places else 1:
                layers[holder] = spec.map_leaves(partial(clear_leaf, count), layers[holder])
        return replace(self, layers=tuple(layers))

    def with_copies(
        self, index: int, row: Int[Array, ""], copies: Sequence[Shaped[Array, "1 ..."]]
    ) -> "KVCache":
        """Return the cache with what a layer stores outside pages for sequence `row` replaced by `copies`."""
        view, new = self.of_layer(index), iter(copies)
        row = row if view.first is None else row + view.first

        def put(is_pool: bool, leaf: Array) -> Array:
            return leaf if is_pool else leaf.at[row].set(next(new)[0])

        return self.with_layer(index, self.specs[index].map_leaves(put, view.state))

    def release(self, rows: Bool[Array, " B"]) -> "KVCache":
        """Return the cache with the sequences `rows` empty, so that other requests can fill them."""
        layers = tuple(spec.release(state, rows) for spec, state in self._pair_layers())
        return replace(self, layers=layers, lengths=jnp.where(rows, 0, self.lengths))

    @property
    def own(self) -> list[list[Array]]:
        """Leaves of each layer that begin with the axis B, or with rows of several layers: all but pools."""
        pairs = (
            zip(jax.tree.leaves(state), spec.pooled(state), strict=True)
            for spec, state in self._pair_layers()
        )
        return [[leaf for leaf, is_pool in layer if not is_pool] for layer in pairs]

    def row(self, index: Array) -> "KVCache":
        """Return the cache of one sequence, together with the page pools of all sequences.

        Layers must not share arrays.
        """
        assert not self.places
        take = partial(jax.lax.dynamic_slice_in_dim, start_index=index, slice_size=1)
        table = None if self.table is None else take(self.table)
        layers = tuple(spec.of_rows(state, index[None]) for spec, state in self._pair_layers())
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
        layers = tuple(spec.first_rows(state, count) for spec, state in self._pair_layers())
        return replace(self, layers=layers, lengths=self.lengths[:count], table=table)

    def with_first(self, some: "KVCache") -> "KVCache":
        """Return the cache with its first sequences and the page pools taken from `some`, a `first` cache."""
        layers = zip(self.specs, self.layers, some.layers, strict=True)
        states = tuple(spec.with_first_rows(state, own) for spec, state, own in layers)
        lengths = jnp.concatenate([some.lengths, self.lengths[len(some.lengths) :]])
        return replace(self, layers=states, lengths=lengths)

    def _pair_layers(self) -> Iterator[tuple[LayerCacheSpec, State]]:
        """Return the spec and the state of each layer."""
        return zip(self.specs, self.layers, strict=True)

    def bytes(self) -> int:
        """Return the bytes of all arrays and the `fixed_bytes` of the specs; equals `cache_bytes`."""
        arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(self))
        return arrays + sum(spec.fixed_bytes for spec in self.specs)


def place_layers(specs: Sequence[LayerCacheSpec], batch: int, capacity: int) -> tuple[LayerPlace, ...]:
    """Return places of layers in the arrays of a cache, or nothing if no layers can share theirs."""
    paged = [spec for spec in specs if isinstance(spec, Paged)]
    if len(paged) < len(specs):
        return ()

    @cache  # It traces a cache, which takes milliseconds.
    def count_sharing(spec: Paged, layers: int) -> int:
        return spec.count_sharing(layers, batch, capacity)

    groups = group_equal(paged, count_sharing)
    places = tuple(
        LayerPlace(holder, number * spec.pages, number * batch)
        for spec, (holder, number) in zip(paged, groups, strict=True)
    )
    return places if any(number for _, number in groups) else ()


def group_equal[Kind](
    kinds: Sequence[Kind], count_sharing: Callable[[Kind, int], int]
) -> list[tuple[int, int]]:
    """Group layers of the same kind.

    Args:
      kinds: kind of each layer.
      count_sharing: function from a kind and a number of layers to the most of them in a group, at least 1.

    Returns:
      The first layer of each layer's group, and the layer's number in its group.
    """
    groups: list[tuple[int, int]] = []
    for index, kind in enumerate(kinds):
        latest = (group for group in reversed(groups) if kinds[group[0]] == kind)
        holder, number = next(latest, (index, -1))
        if number + 1 == count_sharing(kind, kinds[holder:].count(kind)):
            holder, number = index, -1
        groups.append((holder, number + 1))
    return groups


def _create_layers(
    specs: tuple[LayerCacheSpec, ...], batch: int, capacity: int, places: tuple[LayerPlace, ...]
) -> tuple[tuple[State, ...], Int[Array, " B"]]:
    """Return the states of empty layers, and the lengths of their sequences."""
    sharing = Counter(place.holder for place in places)

    def create(index: int, spec: LayerCacheSpec) -> State:
        if not places or not isinstance(spec, Paged):
            return spec.create(batch, capacity)
        layers = sharing[index]
        return replace(spec, pages=layers * spec.pages).create(layers * batch, capacity)

    return tuple(itertools.starmap(create, enumerate(specs))), jnp.zeros(batch, jnp.int32)


_create_layers_at_once = jax.jit(_create_layers, static_argnums=(0, 1, 2, 3))


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
