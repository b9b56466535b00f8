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

from kernels_pallas import Segment, merge_partial
from zdc_jax.axes import Array
from zdc_jax.cache.classes import (
    Arrangement,
    ClassArrays,
    ClassBlocks,
    ClassLeader,
    ClassMember,
    GroupState,
    LeaderState,
    MemberState,
    arrange,
)
from zdc_jax.cache.prefix_ring import PrefixRingState
from zdc_jax.cache.spec import State
from zdc_jax.model.block import Block
from zdc_jax.ops.attention import Implementation, segment_attention
from zdc_jax.ops.importance import token_importance
from zdc_jax.ops.slots import EMPTY
from zdc_jax.parallel.attention import attend_near
from zdc_jax.parallel.exchange import gather_heads, gather_heads_and_lse, scatter_heads
from zdc_jax.parallel.far import FarKeys
from zdc_jax.parallel.mesh import (
    BY_TOKEN,
    DATA,
    MODEL,
    SEQUENCE,
    layout,
    on_mesh,
    positions_of,
    sum_over,
)
from zdc_jax.parallel.payload import Payload
from zdc_jax.parallel.prompt_cache import prompt_state, stored
from zdc_jax.parallel.weights import WeightPlacement, weight_specs, whole_weights

_TOKENS, _LSE = layout("B T"), PartitionSpec(DATA, MODEL, SEQUENCE)
_BY_TOKEN: Any = (_TOKENS, _TOKENS, (PartitionSpec(), PartitionSpec()))
_ARRANGEMENT = Arrangement(*_BY_TOKEN)
_ROWS: Any = layout("B")
"""How [B, T, ...], the log-sum-exp [B, N, T] and an arrangement of each device's tokens lie on a mesh."""


def check_classes(payload: Payload) -> None:
    """Raises `NotImplementedError` where tokens of two classes do not travel as this payload."""
    if payload != "native":
        raise NotImplementedError(f"{payload=} cannot do this call: token classes need 'native'")


def prompt_through_groups(
    layers: Sequence[Block],
    specs: Sequence[Any],
    leaders: Sequence[int],
    x: Float[Array, "B T D"],
    end: Int[Array, " B"],
    capacity: int | None,
    mesh: Mesh,
    implementation: Implementation | None,
    weights: WeightPlacement,
) -> tuple[Float[Array, "B T D"], list[State]]:
    """Whole prompts of `end` tokens through all layers, group by group, each behind its leader.

    Args:
      specs: how each layer keeps its tokens, `ClassLeader` those of `leaders`, `ClassMember` the others.
      x: embeddings, divided as tokens are; every device holds whole blocks.
      capacity: of the cache to be made, in tokens a row; None makes none.
      implementation: of attention.
      weights: how those of `layers` lie.

    Returns:
      hidden states, and what each layer caches, divided by head over `model` and `sequence`.
    """
    states: list[State] = []
    found, given = None, (capacity, mesh, implementation, weights)
    for index, (block, spec) in enumerate(zip(layers, specs, strict=True)):
        if index in leaders:
            x = x if found is None else _restored(x, found.arrangement, mesh)
            x, lse, state = _leader_layer(block, spec, x, end, *given)
            x, found, group = _classified(x, lse, end, spec.blocks, capacity, mesh)
            states.append(None if capacity is None else LeaderState(state, group))
        else:
            assert found is not None  # The first layer leads.
            x, state = _member_layer(block, spec, x, end, found, *given)
            states.append(state)
    return x if found is None else _restored(x, found.arrangement, mesh), states


class _Found(NamedTuple):
    """What a leader finds: the class order of each device's tokens, and the positions [B, T₁], [B, T₂] of all
    tokens, by class and in it by device; `EMPTY` stands for padding."""

    arrangement: Arrangement
    positions: tuple[Array, Array]


@partial(jax.jit, static_argnames=("spec", "capacity", "mesh", "implementation", "weights"))
def _leader_layer(
    block: Block,
    spec: ClassLeader,
    x: Array,
    end: Array,
    capacity: int | None,
    mesh: Mesh,
    implementation: Implementation | None,
    weights: WeightPlacement,
) -> tuple[Array, Array, PrefixRingState | None]:
    """One layer that treats all tokens alike, its log-sum-exp [B, N, T], and what it caches."""
    kept = spec.tokens

    def local(block: Block, x: Array, end: Array) -> tuple[Array, Array, PrefixRingState | None]:
        positions = positions_of(x)

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, PrefixRingState | None]]:
            exchanged, parts, state = None, [], None
            keys = FarKeys.of(q, v, kept, scale=block.attention.scale, implementation=implementation)
            if not keys.are_all:
                parts.append(attend_near(q, k, v, keys))
            if kept.R:
                cut = scatter_heads((q[..., : kept.R], k[..., : kept.R], v[..., : kept.Z]), SEQUENCE)
                exchanged = cut[1], cut[2]
                parts.append(gather_heads_and_lse(*keys.attend(*cut), SEQUENCE))
            if capacity is not None:
                state = prompt_state(kept, exchanged, k, v, positions, end, capacity)
            o, lse = _merged(parts)
            return o, (lse, state)

        block = whole_weights(block, weights)
        reduce = sum_over(mesh, BY_TOKEN)
        x, (lse, state) = block(x, positions, attend, implementation, reduce=reduce)
        return x, lse, state

    in_specs = (weight_specs(block, BY_TOKEN, weights), _TOKENS, layout("B"))
    return on_mesh(mesh, local, in_specs, (_TOKENS, _LSE, layout("B K S R")))(block, x, end)


@partial(jax.jit, static_argnames=("blocks", "capacity", "mesh"))
def _classified(
    x: Array, lse: Array, end: Array, blocks: ClassBlocks, capacity: int | None, mesh: Mesh
) -> tuple[Array, _Found, GroupState | None]:
    """Tokens of x [B, T, D] in the class order of each device, by their leader's log-sum-exp.

    Also, for a cache of so many tokens a row, the group.
    """

    def local(x: Array, lse: Array, end: Array) -> tuple[Array, _Found, GroupState | None]:
        B, t, _ = x.shape
        start = jax.lax.axis_index(SEQUENCE) * t
        # The sum over heads of all devices is that of their sums.
        lse = jax.lax.all_gather(token_importance(lse)[:, None], MODEL, axis=1, tiled=True)
        group = GroupState.create(blocks, batch=B, capacity=t)
        own = jnp.broadcast_to(jnp.arange(t), (B, t))
        group, arrangement = arrange(group, lse, own, end - start, blocks)
        # A group's slots may be more than there are tokens, for they are in whole rows of 8.
        count = blocks.important_in(t)
        held = jnp.concatenate([group.positions[0][:, :count], group.positions[1][:, : t - count]], 1)
        held = jax.lax.all_gather(jnp.where(held == EMPTY, EMPTY, start + held), SEQUENCE, axis=1)
        first, rest = jnp.split(held, [count], axis=2)
        found = _Found(arrangement, (first.reshape(B, -1), rest.reshape(B, -1)))
        if capacity is None:
            return arrangement.sorted(x), found, None
        newest = (start < end) & (end <= start + t)
        importance = jax.lax.psum(jnp.where(newest[:, None], group.importance, 0), SEQUENCE)
        sized = zip(found.positions, blocks.segment_slots(capacity), strict=True)
        first, rest = (_fitted(positions, slots) for positions, slots in sized)
        return arrangement.sorted(x), found, GroupState((first, rest), importance)

    out_specs = (_TOKENS, _Found(_ARRANGEMENT, _ROWS), layout("B"))
    return on_mesh(mesh, local, (_TOKENS, _LSE, layout("B")), out_specs)(x, lse, end)


def _fitted(positions: Int[Array, "B T"], slots: int) -> Int[Array, "B S"]:
    """Positions in so many slots; those that are left out stand for padding."""
    positions = positions[:, :slots]
    return jnp.pad(positions, ((0, 0), (0, slots - positions.shape[1])), constant_values=EMPTY)


@partial(jax.jit, static_argnames=("spec", "capacity", "mesh", "implementation", "weights"))
def _member_layer(
    block: Block,
    spec: ClassMember,
    x: Array,
    end: Array,
    found: _Found,
    capacity: int | None,
    mesh: Mesh,
    implementation: Implementation | None,
    weights: WeightPlacement,
) -> tuple[Array, MemberState | None]:
    """One layer behind a leader, on tokens in class order, and its cache for a given capacity."""

    def local(block: Block, x: Array, end: Array, found: _Found) -> tuple[Array, MemberState | None]:
        positions, order = positions_of(x), found.arrangement

        def attend(
            q: Array, k: tuple[Array, Array], v: tuple[Array, Array]
        ) -> tuple[Array, MemberState | None]:
            B, t = q.shape[:2]
            length = t * jax.lax.axis_size(SEQUENCE)
            keys = FarKeys(block.attention.scale, *spec.near.near(length), implementation)
            far, segments = _attend_segments(q, k, v, found.positions, spec, keys)
            if keys.are_all:
                o = gather_heads(far[0], SEQUENCE)
                own_k = own_v = jnp.zeros(
                    (B, t, k[0].shape[2], spec.head_dim), q.dtype
                )  # A ring of no slots.
            else:
                own_k, own_v = (order.restored(jnp.concatenate(each, 1)) for each in (k, v))
                o, lse = attend_near(order.restored(q), own_k, own_v, keys)
                lse = order.sorted(lse.swapaxes(1, 2)).swapaxes(1, 2)
                o, _ = _merged([(order.sorted(o), lse), gather_heads_and_lse(*far, SEQUENCE)])
            if capacity is None:
                return o, None
            ring = prompt_state(spec.near, None, own_k, own_v, positions, end, capacity)
            sized = zip(segments, spec.blocks.segment_slots(capacity), strict=True)
            return o, MemberState(ring, *(ClassArrays(stored(s.k, n), stored(s.v, n)) for s, n in sized))

        block = whole_weights(block, weights)
        reduce = sum_over(mesh, BY_TOKEN)
        return block(x, order.sorted(positions), attend, implementation, spec.project_ordered, reduce)

    in_specs = (
        weight_specs(block, BY_TOKEN, weights),
        _TOKENS,
        layout("B"),
        _Found(_ARRANGEMENT, _ROWS),
    )
    return on_mesh(mesh, local, in_specs, (_TOKENS, layout("B K S R")))(block, x, end, found)


def _attend_segments(
    q: Array,
    k: tuple[Array, Array],
    v: tuple[Array, Array],
    held: tuple[Array, Array],
    spec: ClassMember,
    keys: FarKeys,
) -> tuple[tuple[Array, Array], list[ClassArrays]]:
    """Far attention of all tokens for one device's heads, [B, T, N/U, Z], its log-sum-exp; and its keys.

    q, k, v: of one device's tokens in class order; held: positions of the tokens of all devices, by class.
    The result stands device by device, as tokens do.
    """
    (R1, Z1), (R2, Z2) = spec.important, spec.rest
    q, *kv = scatter_heads(
        (
            q[..., :R1],
            k[0][..., :R1],
            v[0][..., :Z1],
            k[1][..., :R2],
            v[1][..., :Z2],
        ),
        SEQUENCE,
    )
    kv = [x.swapaxes(1, 2) for x in kv]
    segments = [ClassArrays(*kv[:2]), ClassArrays(*kv[2:])]
    B, U = q.shape[0], jax.lax.axis_size(SEQUENCE)
    by_device = [positions.reshape(B, U, -1) for positions in held]
    far = segment_attention(
        q,
        jnp.concatenate(by_device, 2).reshape(B, -1),
        [Segment(s.k, s.v, at) for s, at in zip(segments, held, strict=True)],
        scale=keys.scale,
        sinks=keys.sinks,
        window=keys.window,
        implementation=keys.implementation,
    )
    return far, segments


@partial(jax.jit, static_argnames="mesh")
def _restored(x: Array, arrangement: Arrangement, mesh: Mesh) -> Array:
    """x [B, T, D], in class order on each device, by position again."""

    def restore(x, arrangement):
        return arrangement.restored(x)

    return on_mesh(mesh, restore, (_TOKENS, _ARRANGEMENT), _TOKENS)(x, arrangement)


def _merged(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """`merge_partial` of near attention and of what an exchange brings back, or of one of them alone."""
    if len(parts) == 1:
        return parts[0]
    # Wanted at once: else XLA's scheduler puts near attention behind the exchange instead of beside it.
    return merge_partial(jax.lax.optimization_barrier(parts))
