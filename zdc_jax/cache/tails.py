"""Snapshots of what sequences store outside pages, such as rings, at earlier lengths (ours).

A request whose prefix is cached continues from the snapshot at the end of that prefix.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int

from kernels_pallas.triton import count_addressable
from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache, group_equal
from zdc_jax.cache.specs.spec import LayerCacheSpec, Snapshots


@partial(jax.tree_util.register_dataclass, data_fields=["stacks"], meta_fields=["places", "slots"])
@dataclass(frozen=True)
class TailArrays:
    """Snapshots in numbered slots.

    Layers whose leaves have equal shapes share their arrays if kernels write them in place. Each array that a
    program takes and returns costs the host about as much as the start of a kernel. Where XLA writes a shared
    array, it changes its layout in between, and copies it.

    Attributes:
      stacks: for each group of layers and each of their leaves an array [layers * slots, …].
      places: index of each layer's group, and its number in that group.
      slots: number of slots.
    """

    stacks: tuple[list[Array], ...]
    places: tuple[tuple[int, int], ...]
    slots: int

    @classmethod
    def empty(cls, cache: KVCache, slots: int, *, in_place: bool) -> "TailArrays":
        """Create `slots` empty slots for snapshots of a cache's sequences.

        `in_place` is whether programs write them in `LayerCacheSpec.attend_in_place`.
        """

        def find_kind(layer: int, spec: LayerCacheSpec, own: Sequence[Array]) -> tuple[Any, ...]:
            alone = None if in_place and spec.stores_in_place else layer
            return alone, *((leaf.shape[1:], leaf.dtype) for leaf in own)

        def count_sharing(kind: tuple[Any, ...], layers: int) -> int:
            sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in kind[1:])
            return count_addressable(layers, [slots * size for size in sizes])

        def allocate(leaf: Array, layers: int) -> Array:
            return jnp.zeros((layers * slots, *leaf.shape[1:]), leaf.dtype, device=leaf.sharding)

        own = cache.own
        kinds = [find_kind(layer, cache.specs[layer], leaves) for layer, leaves in enumerate(own)]
        groups = group_equal(kinds, count_sharing)
        sharing = Counter(holder for holder, _ in groups)
        stacks = tuple([allocate(leaf, layers) for leaf in own[holder]] for holder, layers in sharing.items())
        holders = list(sharing)
        places = tuple((holders.index(holder), number) for holder, number in groups)
        return cls(stacks, places, slots)

    def of_layer(self, layer: int, marks: Int[Array, " P"], slots: Int[Array, " P"]) -> Snapshots:
        """Return where a layer stores snapshots of the lengths `marks`; those without a slot are dropped."""
        group, number = self.places[layer]
        kept = (slots >= 0) & (slots < self.slots)
        nowhere = len(self.places) * self.slots
        return Snapshots(self.stacks[group], marks, jnp.where(kept, slots + number * self.slots, nowhere))

    def with_layer(self, layer: int, leaves: list[Array]) -> "TailArrays":
        """Return the snapshots with the arrays of a layer's group replaced."""
        group, _ = self.places[layer]
        return replace(self, stacks=(*self.stacks[:group], leaves, *self.stacks[group + 1 :]))

    def put(self, own: Sequence[Sequence[Array]], slots: Int[Array, " P"]) -> "TailArrays":
        """Return the snapshots with new ones in `slots`; `own` has leaves [P, …], as `KVCache.own`."""
        tails = self
        for layer, leaves in enumerate(own):
            tails = tails.with_layer(layer, tails.of_layer(layer, slots, slots).put(leaves))
        return tails

    def take(self, slot: Int[Array, ""]) -> list[list[Array]]:
        """Return one snapshot, leaves [1, …] of each layer, as `KVCache.own`."""
        return [
            [jax.lax.dynamic_slice_in_dim(leaf, slot + number * self.slots, 1) for leaf in self.stacks[group]]
            for group, number in self.places
        ]
