"""Token classes (ZDC §5.2) on a mesh: prompts by token, then decoded tokens by head (§5.3).

A device holds whole blocks of a prompt, so that it classifies its tokens alone and has as many important
ones as every other: in a group of layers they stand in class order on each device, and keys and values of
both classes travel at their own widths in one dense exchange. Queries, and what attention gives, keep the
width of important tokens, since queries of both classes meet important keys.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from kernels_pallas import Segment as Held
from zdc_jax.axes import Array
from zdc_jax.cache.classes import EMPTY, GroupState, Segment
from zdc_jax.cache.prefix_ring import ClassLayerCache, KVCache, LayerCache
from zdc_jax.model.block import Block
from zdc_jax.model.classes import Arrangement, arrange, class_layer, projection
from zdc_jax.ops.attention import Implementation, segment_attention
from zdc_jax.ops.importance import token_importance
from zdc_jax.parallel.attention import attend_near, merged
from zdc_jax.parallel.exchange import gather_heads, gather_heads_and_lse, scatter_heads
from zdc_jax.parallel.far import FarKeys
from zdc_jax.parallel.mesh import (
    BY_HEAD,
    BY_TOKEN,
    DATA,
    MODEL,
    SEQUENCE,
    on_mesh,
    positions_of,
    spec,
    sum_over,
)
from zdc_jax.parallel.payload import Payload
from zdc_jax.parallel.prompt_cache import Slots, layer_cache, stored, with_new_empties
from zdc_jax.parallel.weights import WeightPlacement, weight_specs, whole_weights
from zdc_jax.plan import CompressionPlan, LayerRanks, TokenClasses

Near = tuple[int, int]
"""Sinks and window, in tokens."""
_TOKENS, _LSE = spec("B T"), PartitionSpec(DATA, MODEL, SEQUENCE)
_BY_TOKEN: Any = (_TOKENS, _TOKENS, (PartitionSpec(), PartitionSpec()))
_ARRANGEMENT = Arrangement(*_BY_TOKEN)
"""How [B, T, ...], the log-sum-exp [B, N, T] and an arrangement of each device's tokens lie on a mesh."""


def check_classes(payload: Payload) -> None:
    """Raises `NotImplementedError` where tokens of two classes do not travel as this payload."""
    if payload != "native":
        raise NotImplementedError(f"{payload=} cannot do this call: token classes need 'native'")


class Widths(NamedTuple):
    """What a layer keeps of each class: the `first` tokens of a device are important and keep `more`.

    slots: of both segments of its cache, in tokens a row; None without one.
    """

    first: int
    more: LayerRanks
    less: LayerRanks
    slots: tuple[int, int] | None


def prompt_through_groups(
    layers: Sequence[Block],
    plan: CompressionPlan,
    x: Float[Array, "B T D"],
    end: Int[Array, " B"],
    slots: Slots | None,
    mesh: Mesh,
    implementation: Implementation | None,
    weights: WeightPlacement,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Whole prompts of `end` tokens through all layers, group by group, each behind its leader.

    Args:
      x: embeddings, divided as tokens are; every device holds whole blocks.
      slots: of the cache to be made; None makes none.
      implementation: of attention.
      weights: how those of `layers` lie.

    Returns:
      hidden states, and the cache, divided by head over `model` and `sequence`.
    """
    classes, near = plan.classes, (plan.sinks, plan.window)
    assert classes is not None
    tokens = x.shape[1] // mesh.shape[SEQUENCE]
    caches: list[LayerCache | ClassLayerCache] = []
    groups: list[GroupState] = []
    for index, leader in enumerate(classes.leaders):
        x, lse, cache = _leader_layer(
            layers[leader], x, end, plan.layers[leader], near, slots, mesh, implementation, weights
        )
        caches.append(cache)
        sizes = None if slots is None else classes.segment_slots(index, slots.capacity)
        x, arrangement, positions, group = _classified(x, lse, end, classes, index, sizes, mesh)
        for member in classes.members(index, len(layers)):
            ranks = classes.important[member], plan.layers[member]
            widths = Widths(classes.important_in(index, tokens), *ranks, sizes)
            given = (positions, arrangement, widths, near, slots, mesh, implementation, weights)
            x, cache = _member_layer(layers[member], x, end, *given)
            caches.append(cache)
        x = _restored(x, arrangement, mesh)
        groups.append(group)
    if slots is None:
        return x, None
    return x, KVCache(tuple(caches), end, slots.sinks, slots.window, tuple(groups))


@partial(jax.jit, static_argnames=("ranks", "near", "slots", "mesh", "implementation", "weights"))
def _leader_layer(
    block: Block,
    x: Array,
    end: Array,
    ranks: LayerRanks,
    near: Near,
    slots: Slots | None,
    mesh: Mesh,
    implementation: Implementation | None,
    weights: WeightPlacement,
) -> tuple[Array, Array, LayerCache | None]:
    """One layer that treats all tokens alike, its log-sum-exp [B, N, T], and its cache for given `slots`."""

    def local(block: Block, x: Array, end: Array) -> tuple[Array, Array, LayerCache | None]:
        positions, seen, cache = positions_of(x), jnp.zeros(()), None

        def attend(q: Array, k: Array, v: Array) -> Array:
            nonlocal seen, cache
            exchanged, parts = None, []
            whole = q.shape[-1] > ranks.qk or v.shape[-1] > ranks.v
            keys = _keys(block, x, near if whole else (0, 0), implementation)
            if not keys.are_all:
                parts.append(attend_near(q, k, v, keys))
            if ranks.qk:
                cut = scatter_heads((q[..., : ranks.qk], k[..., : ranks.qk], v[..., : ranks.v]), SEQUENCE)
                exchanged = cut[1], cut[2]
                parts.append(gather_heads_and_lse(*keys.attend(*cut), SEQUENCE))
            if slots is not None:
                cache = layer_cache(k, v, exchanged, positions, end, ranks, slots)
            o, seen = merged(parts)
            return o

        block = whole_weights(block, weights)
        x = block(x, positions, attend, implementation, reduce=sum_over(mesh, BY_TOKEN))
        return x, seen, cache

    in_specs = (weight_specs(block, BY_TOKEN, weights), _TOKENS, spec("B"))
    return on_mesh(mesh, local, in_specs, (_TOKENS, _LSE, spec("B K S R")))(block, x, end)


@partial(jax.jit, static_argnames=("classes", "index", "sizes", "mesh"))
def _classified(
    x: Array,
    lse: Array,
    end: Array,
    classes: TokenClasses,
    index: int,
    sizes: tuple[int, int] | None,
    mesh: Mesh,
) -> tuple[Array, Arrangement, tuple[Array, Array], GroupState | None]:
    """Tokens of x [B, T, D] in the class order of each device, by their leader's log-sum-exp.

    Also positions of all tokens [B, T₁], [B, T₂], by class and in it by device; `EMPTY` stands for padding.
    And, for a cache whose segments have `sizes` slots, the group.
    """

    def local(
        x: Array, lse: Array, end: Array
    ) -> tuple[Array, Arrangement, tuple[Array, Array], GroupState | None]:
        B, t, _ = x.shape
        start = jax.lax.axis_index(SEQUENCE) * t
        # The sum over heads of all devices is that of their sums.
        lse = jax.lax.all_gather(token_importance(lse)[:, None], MODEL, axis=1, tiled=True)
        group = GroupState.create(classes, index, batch=B, capacity=t)
        own = jnp.broadcast_to(jnp.arange(t), (B, t))
        group, arrangement = arrange(group, lse, own, end - start, classes, index)
        count = classes.important_in(
            index, t
        )  # A group's slots may be more, for they are in whole rows of 8.
        held = jnp.concatenate([group.positions[0][:, :count], group.positions[1][:, : t - count]], 1)
        held = jax.lax.all_gather(jnp.where(held == EMPTY, EMPTY, start + held), SEQUENCE, axis=1)
        first, rest = jnp.split(held, [count], axis=2)
        positions = first.reshape(B, -1), rest.reshape(B, -1)
        if sizes is None:
            return arrangement.sorted(x), arrangement, positions, None
        newest = (start < end) & (end <= start + t)
        importance = jax.lax.psum(jnp.where(newest[:, None], group.importance, 0), SEQUENCE)
        slots = _fitted(positions[0], sizes[0]), _fitted(positions[1], sizes[1])
        return arrangement.sorted(x), arrangement, positions, GroupState(slots, importance)

    in_specs = (_TOKENS, _LSE, spec("B"))
    return on_mesh(mesh, local, in_specs, (_TOKENS, _ARRANGEMENT, spec("B"), spec("B")))(x, lse, end)


def _fitted(positions: Int[Array, "B T"], slots: int) -> Int[Array, "B S"]:
    """Positions in so many slots; those that are left out stand for padding."""
    positions = positions[:, :slots]
    return jnp.pad(positions, ((0, 0), (0, slots - positions.shape[1])), constant_values=EMPTY)


@partial(jax.jit, static_argnames=("widths", "near", "slots", "mesh", "implementation", "weights"))
def _member_layer(
    block: Block,
    x: Array,
    end: Array,
    held: tuple[Array, Array],
    arrangement: Arrangement,
    widths: Widths,
    near: Near,
    slots: Slots | None,
    mesh: Mesh,
    implementation: Implementation | None,
    weights: WeightPlacement,
) -> tuple[Array, ClassLayerCache | None]:
    """One layer behind a leader, on tokens in class order, and its cache for given `slots`.

    held [B, T₁], [B, T₂]: positions of the tokens of all devices, by class.
    """

    def local(
        block: Block, x: Array, end: Array, held: tuple[Array, Array], arrangement: Arrangement
    ) -> tuple[Array, ClassLayerCache | None]:
        positions, cache = positions_of(x), None
        keys, H = _keys(block, x, near, implementation), block.attention.config.head_dim

        def attend(q: Array, k: tuple[Array, Array], v: tuple[Array, Array]) -> Array:
            nonlocal cache
            far, segments = _attend_segments(q, k, v, held, widths, keys)
            if keys.are_all:
                o = gather_heads(far[0], SEQUENCE)
                own_k = own_v = jnp.zeros((*q.shape[:2], k[0].shape[2], H), q.dtype)  # A ring of no slots.
            else:
                own_k, own_v = (arrangement.restored(jnp.concatenate(each, 1)) for each in (k, v))
                o, lse = attend_near(arrangement.restored(q), own_k, own_v, keys)
                lse = arrangement.sorted(lse.swapaxes(1, 2)).swapaxes(1, 2)
                parts = [(arrangement.sorted(o), lse), gather_heads_and_lse(*far, SEQUENCE)]
                o, _ = merged(parts)
            if slots is not None:
                ring = layer_cache(own_k, own_v, None, positions, end, LayerRanks(0, 0), slots)
                assert widths.slots is not None
                sized = zip(segments, widths.slots, strict=True)
                cache = ClassLayerCache(ring, *(Segment(stored(s.k, n), stored(s.v, n)) for s, n in sized))
            return o

        block = whole_weights(block, weights)
        project = projection(block, widths.first, widths.less, near)
        ordered = arrangement.sorted(positions)
        x = block(x, ordered, attend, implementation, project, sum_over(mesh, BY_TOKEN))
        return x, cache

    in_specs = (weight_specs(block, BY_TOKEN, weights), _TOKENS, spec("B"), spec("B"), _ARRANGEMENT)
    layer = on_mesh(mesh, local, in_specs, (_TOKENS, spec("B K S R")))
    return layer(block, x, end, held, arrangement)


def _keys(block: Block, x: Array, near: Near, implementation: Implementation | None) -> FarKeys:
    length = x.shape[1] * jax.lax.axis_size(SEQUENCE)
    sinks, window = (min(count, length) for count in near)
    return FarKeys(block.attention.config.head_dim**-0.5, sinks, window, implementation)


def _attend_segments(
    q: Array,
    k: tuple[Array, Array],
    v: tuple[Array, Array],
    held: tuple[Array, Array],
    widths: Widths,
    keys: FarKeys,
) -> tuple[tuple[Array, Array], list[Segment]]:
    """Far attention of all tokens for one device's heads, [B, T, N/U, Z], its log-sum-exp; and its keys.

    q, k, v: of one device's tokens in class order; held: positions of the tokens of all devices, by class.
    The result stands device by device, as tokens do.
    """
    more, less = widths.more, widths.less
    q, *kv = scatter_heads(
        (
            q[..., : more.qk],
            k[0][..., : more.qk],
            v[0][..., : more.v],
            k[1][..., : less.qk],
            v[1][..., : less.v],
        ),
        SEQUENCE,
    )
    kv = [x.swapaxes(1, 2) for x in kv]
    segments = [Segment(*kv[:2]), Segment(*kv[2:])]
    B, U = q.shape[0], jax.lax.axis_size(SEQUENCE)
    by_device = [positions.reshape(B, U, -1) for positions in held]
    far = segment_attention(
        q,
        jnp.concatenate(by_device, 2).reshape(B, -1),
        [Held(s.k, s.v, at) for s, at in zip(segments, held, strict=True)],
        scale=keys.scale,
        sinks=keys.sinks,
        window=keys.window,
        implementation=keys.implementation,
    )
    return far, segments


@partial(jax.jit, static_argnames="mesh")
def _restored(x: Array, arrangement: Arrangement, mesh: Mesh) -> Array:
    """x [B, T, D], in class order on each device, by position again."""
    restore = lambda x, arrangement: arrangement.restored(x)
    return on_mesh(mesh, restore, (_TOKENS, _ARRANGEMENT), _TOKENS)(x, arrangement)


@partial(jax.jit, static_argnames=("less", "near", "mesh", "implementation"))
def class_token_layer(
    block: Block,
    x: Float[Array, "B 1 D"],
    cache: ClassLayerCache,
    group: GroupState,
    arrangement: Arrangement,
    positions: Int[Array, "B 1"],
    end: Int[Array, " B"],
    less: LayerRanks,
    near: Near,
    mesh: Mesh,
    implementation: Implementation | None,
) -> tuple[Float[Array, "B 1 D"], ClassLayerCache]:
    """`class_layer` on one token a row, its heads and cache divided over `model` and `sequence`."""

    def local(
        block: Block,
        x: Array,
        cache: ClassLayerCache,
        group: GroupState,
        arrangement: Arrangement,
        positions: Array,
        end: Array,
    ) -> tuple[Array, ClassLayerCache]:
        given = (with_new_empties(cache), group, arrangement, positions, end)
        x, longer = class_layer(block, x, *given, 1, less, near, implementation, sum_over(mesh, BY_HEAD))
        return x, with_new_empties(longer)

    rows, token, held = spec("B"), spec("B 1 D"), spec("B K S R")
    in_specs = (weight_specs(block, BY_HEAD), token, held, rows, rows, rows, rows)
    layer = on_mesh(mesh, local, in_specs, (token, held))
    return layer(block, x, cache, group, arrangement, positions, end)
