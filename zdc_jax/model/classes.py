"""Layers with two token classes (ZDC §5.2): a leader classifies, the other layers of its group use it.

A piece of a prompt is put into class order once a group: important tokens first, each class by position, so
that projections and cache writes are of contiguous rows, at the width of their class.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import Segment as Held
from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.cache.classes import (
    GroupState,
    Segment,
    class_order,
    first_slots,
    place_token,
    put_piece,
    put_token,
    write_piece,
)
from zdc_jax.cache.prefix_ring import ClassLayerCache, KVCache, LayerCache, cached_attention
from zdc_jax.model.block import Block, Project
from zdc_jax.model.layers import Reduce, whole
from zdc_jax.ops.attention import Implementation, segment_attention
from zdc_jax.ops.importance import token_importance
from zdc_jax.plan import LayerRanks, TokenClasses


class Arrangement(NamedTuple):
    """How the tokens of one call stand in class order, and where they go.

    order, inverse [B, T]: the tokens in class order, and back. slots: of the first token of each class in a
    piece; of a decoded token [B], past the end of the segment that is not of its class.
    """

    order: Array
    inverse: Array
    slots: tuple[Array, Array]

    def sorted(self, x: Array) -> Array:
        """x [B, T, ...] in class order."""
        return _take(x, self.order)

    def restored(self, x: Array) -> Array:
        """x [B, T, ...], in class order, by position again."""
        return _take(x, self.inverse)


def _take(x: Array, order: Array) -> Array:
    return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)


@partial(jax.jit, static_argnames=("classes", "index"))
def arrange(
    group: GroupState, lse: Array, positions: Array, end: Array, classes: TokenClasses, index: int
) -> tuple[GroupState, Arrangement]:
    """Classifies the tokens of a call by their leader's log-sum-exp [B, N, T].

    A piece of more than one token begins at a multiple of `classes.block`, at the same in all rows.
    """
    importance, valid = token_importance(lse), positions < end[:, None]
    if positions.shape[1] == 1:
        group, slots = place_token(group, importance[:, 0], positions[:, 0], valid[:, 0], classes, index)
        same = jnp.zeros_like(positions)
        return group, Arrangement(same, same, slots)
    both = class_order(importance, valid, classes, index)
    group = write_piece(group, both, positions, importance, valid, classes, index)
    order = jnp.concatenate(both, 1)
    slots = first_slots(positions[0, 0], classes, index)
    return group, Arrangement(order, jnp.argsort(order, axis=1), slots)


Lead = Callable[[int, Array, LayerCache], tuple[Array, LayerCache, Array]]
"""(layer, x [B, T, D], cache) → x, the longer cache, log-sum-exp [B, N, T]."""
Follow = Callable[[int, Array, ClassLayerCache, GroupState, Arrangement, int], tuple[Array, ClassLayerCache]]
"""(layer, x in class order, cache, group, arrangement, important tokens of x) → x, the longer cache."""


def extend_groups(
    classes: TokenClasses,
    cache: KVCache,
    x: Array,
    positions: Array,
    end: Array,
    lead: Lead,
    follow: Follow,
) -> tuple[Array, KVCache]:
    """`Transformer.extend` for embeddings x [B, T, D]: group by group, each behind its leader."""
    layers, groups = list(cache.layers), list(cache.groups)
    for index, leader in enumerate(classes.leaders):
        layer = layers[leader]
        assert isinstance(layer, LayerCache)
        x, layers[leader], lse = lead(leader, x, layer)
        groups[index], arrangement = arrange(groups[index], lse, positions, end, classes, index)
        first = classes.important_in(index, positions.shape[1])
        members = classes.members(index, len(layers))
        x = arrangement.sorted(x) if members else x
        for member in members:
            held = layers[member]
            assert isinstance(held, ClassLayerCache)
            x, layers[member] = follow(member, x, held, groups[index], arrangement, first)
        x = arrangement.restored(x) if members else x
    return x, replace(cache, layers=tuple(layers), lengths=end, groups=tuple(groups))


@partial(jax.jit, static_argnames=("first", "less", "near", "implementation", "reduce"))
def class_layer(
    block: Block,
    x: Array,
    cache: ClassLayerCache,
    group: GroupState,
    arrangement: Arrangement,
    positions: Array,
    end: Array,
    first: int,
    less: LayerRanks,
    near: tuple[int, int],
    implementation: Implementation | None,
    reduce: Reduce = whole,
) -> tuple[Array, ClassLayerCache]:
    """One layer on tokens in class order, and its cache with them.

    positions [B, T] and end [B] as in `Transformer.extend`; the `first` tokens of x are important, the others
    keep `less`; near: sinks and window, for which projections stay whole; implementation: of attention;
    reduce: as `Block` takes it.
    """
    longer, ordered = cache, arrangement.sorted(positions)
    options: dict[str, Any] = {"sinks": near[0], "window": near[1], "implementation": implementation}
    options["scale"] = block.attention.config.head_dim**-0.5

    def attend(q: Array, k: tuple[Array, Array], v: tuple[Array, Array]) -> Array:
        nonlocal longer
        segments = _put(cache, k, v, arrangement, positions.shape[1] == 1)
        longer = replace(cache, important=segments[0], rest=segments[1])
        held = [Held(s.k, s.v, at) for s, at in zip(segments, group.positions, strict=True)]
        far = segment_attention(q, ordered, held, **options)
        if near == (0, 0):
            return far[0]
        q, own_k, own_v = (arrangement.restored(x) for x in (q, *(jnp.concatenate(x, 1) for x in (k, v))))
        ring, o, lse = cached_attention(q, own_k, own_v, cache.near, positions, end, **options)
        longer = replace(longer, near=ring)
        lse = arrangement.sorted(lse.swapaxes(1, 2)).swapaxes(1, 2)
        return merge_partial([far, (arrangement.sorted(o), lse)])[0]

    project = projection(block, first, less, near)
    x = block(x, ordered, attend, project=project, reduce=reduce)
    return x, longer


def projection(block: Block, first: int, less: LayerRanks, near: tuple[int, int]) -> Project:
    """How a layer projects tokens in class order; the arguments are those of `class_layer`."""
    H = block.attention.config.head_dim
    kept = LayerRanks(H, H) if any(near) else less
    return partial(block.attention.project_classes, first=first, less=kept)


def _put(
    cache: ClassLayerCache,
    k: tuple[Array, Array],
    v: tuple[Array, Array],
    arrangement: Arrangement,
    decoded: bool,
) -> list[Segment]:
    """Both segments with new keys and values, each cut to the width of its class."""
    if decoded:  # Its slots tell its class: both segments are offered the token.
        k, v = (k[0], k[0]), (v[0], v[0])
    put = put_token if decoded else put_piece
    return [
        put(old, keys[..., : old.k.shape[-1]], values[..., : old.v.shape[-1]], slot)
        for old, keys, values, slot in zip(
            (cache.important, cache.rest), k, v, arrangement.slots, strict=True
        )
    ]
