"""Snapshots of what sequences store outside pages, such as rings, at earlier lengths (ours).

A request whose prefix is cached continues from the snapshot at the end of that prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.specs.spec import Snapshots


@partial(jax.tree_util.register_dataclass, data_fields=["stacks"], meta_fields=["places", "slots"])
@dataclass(frozen=True)
class TailArrays:
    """Snapshots in numbered slots.

    Layers whose leaves have equal shapes share their arrays if kernels write them in place. Each array that a
    program takes and returns costs the host about as much as the start of a kernel. Where XLA writes a shared
    array, it changes its layout in between, and copies it.

    Attributes:
      stacks: for each kind of layer and each of its leaves an array [layers * slots, …].
      places: index of each layer's kind, and its number among the layers of that kind.
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
        shapes = [
            (
                None if in_place and spec.stores_in_place else layer,
                *((leaf.shape, leaf.dtype) for leaf in own),
            )
            for layer, (spec, own) in enumerate(zip(cache.specs, cache.own, strict=True))
        ]
        kinds = list(dict.fromkeys(shapes))
        places = tuple((kinds.index(each), shapes[:layer].count(each)) for layer, each in enumerate(shapes))

        def allocate(leaf: Array, layers: int) -> Array:
            return jnp.zeros((layers * slots, *leaf.shape[1:]), leaf.dtype, device=leaf.sharding)

        stacks = tuple(
            [allocate(leaf, shapes.count(kind)) for leaf in cache.own[shapes.index(kind)]] for kind in kinds
        )
        return cls(stacks, places, slots)

    def of_layer(self, layer: int, marks: Int[Array, " P"], slots: Int[Array, " P"]) -> Snapshots:
        """Return where a layer stores snapshots of the lengths `marks`; those without a slot are dropped."""
        kind, number = self.places[layer]
        kept = (slots >= 0) & (slots < self.slots)
        nowhere = len(self.places) * self.slots
        return Snapshots(self.stacks[kind], marks, jnp.where(kept, slots + number * self.slots, nowhere))

    def with_layer(self, layer: int, leaves: list[Array]) -> "TailArrays":
        """Return the snapshots with the arrays of a layer's kind replaced."""
        kind, _ = self.places[layer]
        return replace(self, stacks=(*self.stacks[:kind], leaves, *self.stacks[kind + 1 :]))

    def put(self, own: Sequence[Sequence[Array]], slots: Int[Array, " P"]) -> "TailArrays":
        """Return the snapshots with new ones in `slots`; `own` has leaves [P, …], as `KVCache.own`."""
        tails = self
        for layer, leaves in enumerate(own):
            tails = tails.with_layer(layer, tails.of_layer(layer, slots, slots).put(leaves))
        return tails

    def take(self, slot: Int[Array, ""]) -> list[list[Array]]:
        """Return one snapshot, leaves [1, …] of each layer, as `KVCache.own`."""
        return [
            [jax.lax.dynamic_slice_in_dim(leaf, slot + number * self.slots, 1) for leaf in self.stacks[kind]]
            for kind, number in self.places
        ]
