"""Token classes (ZDC §5.2) on a mesh: prompts divided by token, decoded tokens by head (§5.3).

Each device holds whole blocks of a prompt, so it classifies its own tokens and has as many important ones as
every other device. Within a group of layers, tokens are in class order on each device. Keys and values of
both classes travel at their own ranks in one dense exchange. Queries and outputs keep the rank of important
tokens, because queries of both classes attend to important keys.
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
from zdc_jax.cache.specs.classes import (
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
from zdc_jax.cache.specs.prefix_ring import PrefixRingState
from zdc_jax.cache.specs.spec import State
from zdc_jax.model.block import Block
from zdc_jax.ops.attention import Implementation, segment_attention
from zdc_jax.ops.importance import token_importance
from zdc_jax.ops.new_keys import NewKeys
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
from zdc_jax.parallel.prompt_cache import fit_slots, prompt_state
from zdc_jax.parallel.weights import WeightPlacement, weight_specs, whole_weights

_TOKENS, _LSE = layout("B T"), PartitionSpec(DATA, MODEL, SEQUENCE)
"""Partitions of arrays [B, T, ...] and of the log-sum-exp [B, N, T]."""
_BY_TOKEN: Any = (_TOKENS, _TOKENS, (PartitionSpec(), PartitionSpec()))
_ARRANGEMENT = Arrangement(*_BY_TOKEN)
"""Partition of the arrangement of each device's tokens."""
_ROWS: Any = layout("B")
"""Partition of arrays that are divided by sequence only."""


def check_classes(payload: Payload) -> None:
    """Raise `NotImplementedError` if tokens of two classes cannot travel in this payload."""
    if payload != "native":
        raise NotImplementedError(f"{payload=}: not supported with token classes; they need 'native'")


def run_groups(
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
    """Run whole prompts through all layers, group by group, each group after its leader.

    Args:
      layers: layers of the model.
      specs: cache of each layer: `ClassLeader` for `leaders`, `ClassMember` for the others.
      leaders: index of each group's first layer.
      x: embeddings, divided by token; every device holds whole blocks.
      end: length of each prompt.
      capacity: tokens per sequence of the caches to create; None creates none.
      mesh: device mesh.
      implementation: of attention; None chooses.
      weights: placement of the weights of `layers`.

    Returns:
      Hidden states, and the cache of each layer, divided by head over `model` and `sequence`.
    """
    states: list[State] = []
    order = None
    for index, (block, spec) in enumerate(zip(layers, specs, strict=True)):
        if index in leaders:
            x = x if order is None else _restore_order(x, order.arrangement, mesh)
            x, lse, state = _leader_layer(block, spec, x, end, capacity, mesh, implementation, weights)
            x, order, group = _classify(x, lse, end, spec.blocks, capacity, mesh)
            states.append(None if capacity is None else LeaderState(state, group))
        else:
            assert order is not None  # The first layer is a leader.
            x, state = _member_layer(block, spec, x, end, order, capacity, mesh, implementation, weights)
            states.append(state)
    return x if order is None else _restore_order(x, order.arrangement, mesh), states


class _ClassOrder(NamedTuple):
    """Class order of a group of layers, from its leader.

    Attributes:
      arrangement: class order of each device's tokens.
      positions: positions of all tokens by class, [B, T₁] and [B, T₂], within a class by device; `EMPTY` is
        padding.
    """

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
    """Run a layer that treats all tokens alike; return its output, log-sum-exp [B, N, T] and cache."""
    cache = spec.tokens

    def local(block: Block, x: Array, end: Array) -> tuple[Array, Array, PrefixRingState | None]:
        positions = positions_of(x)

        def attend(q: Array, new: NewKeys, v: Array) -> tuple[Array, tuple[Array, PrefixRingState | None]]:
            k = new.keys
            exchanged, parts, state = None, [], None
            keys = FarKeys.of(q, v, cache, scale=block.attention.scale, implementation=implementation)
            if not keys.are_all:
                parts.append(attend_near(q, k, v, keys))
            if cache.R:
                truncated = q[..., : cache.R], k[..., : cache.R], v[..., : cache.Z]
                far_q, far_k, far_v = scatter_heads(truncated, SEQUENCE)
                exchanged = far_k, far_v
                parts.append(gather_heads_and_lse(*keys.attend(far_q, far_k, far_v), SEQUENCE))
            if capacity is not None:
                state = prompt_state(cache, exchanged, k, v, positions, end, capacity)
            o, lse = _merge(parts)
            return o, (lse, state)

        block = whole_weights(block, weights)
        reduce = sum_over(mesh, BY_TOKEN)
        x, (lse, state) = block(x, positions, attend, implementation, reduce=reduce)
        return x, lse, state

    in_specs = (weight_specs(block, BY_TOKEN, weights), _TOKENS, layout("B"))
    return on_mesh(mesh, local, in_specs, (_TOKENS, _LSE, layout("B K S R")))(block, x, end)


@partial(jax.jit, static_argnames=("blocks", "capacity", "mesh"))
def _classify(
    x: Array, lse: Array, end: Array, blocks: ClassBlocks, capacity: int | None, mesh: Mesh
) -> tuple[Array, _ClassOrder, GroupState | None]:
    """Bring each device's tokens x [B, T, D] into class order by the leader's log-sum-exp.

    Returns:
      The tokens, their order, and the group's state for a cache of `capacity` tokens (None without a cache).
    """

    def local(x: Array, lse: Array, end: Array) -> tuple[Array, _ClassOrder, GroupState | None]:
        B, t, _ = x.shape
        start = jax.lax.axis_index(SEQUENCE) * t
        # The log-sum-exp over all heads is that of the devices' partial sums.
        lse = jax.lax.all_gather(token_importance(lse)[:, None], MODEL, axis=1, tiled=True)
        group = GroupState.create(blocks, batch=B, capacity=t)
        own = jnp.broadcast_to(jnp.arange(t), (B, t))
        group, arrangement = arrange(group, lse, own, end - start, blocks)
        # A group may have more slots than tokens: slots come in multiples of 8.
        count = blocks.important_in(t)
        local_positions = jnp.concatenate(
            [group.positions[0][:, :count], group.positions[1][:, : t - count]], 1
        )
        by_device = jax.lax.all_gather(
            jnp.where(local_positions == EMPTY, EMPTY, start + local_positions), SEQUENCE, axis=1
        )
        first, rest = jnp.split(by_device, [count], axis=2)
        order = _ClassOrder(arrangement, (first.reshape(B, -1), rest.reshape(B, -1)))
        if capacity is None:
            return arrangement.sorted(x), order, None
        newest = (start < end) & (end <= start + t)
        importance = jax.lax.psum(jnp.where(newest[:, None], group.importance, 0), SEQUENCE)
        sized = zip(order.positions, blocks.segment_slots(capacity), strict=True)
        first, rest = (_fit_slots(positions, slots) for positions, slots in sized)
        return arrangement.sorted(x), order, GroupState((first, rest), importance)

    out_specs = (_TOKENS, _ClassOrder(_ARRANGEMENT, _ROWS), layout("B"))
    return on_mesh(mesh, local, (_TOKENS, _LSE, layout("B")), out_specs)(x, lse, end)


def _fit_slots(positions: Int[Array, "B T"], slots: int) -> Int[Array, "B S"]:
    """Pad positions with `EMPTY`, or cut padding off, to fill `slots` slots."""
    positions = positions[:, :slots]
    return jnp.pad(positions, ((0, 0), (0, slots - positions.shape[1])), constant_values=EMPTY)


@partial(jax.jit, static_argnames=("spec", "capacity", "mesh", "implementation", "weights"))
def _member_layer(
    block: Block,
    spec: ClassMember,
    x: Array,
    end: Array,
    order: _ClassOrder,
    capacity: int | None,
    mesh: Mesh,
    implementation: Implementation | None,
    weights: WeightPlacement,
) -> tuple[Array, MemberState | None]:
    """Run a layer after a leader on tokens in class order; return its output and cache."""

    def local(block: Block, x: Array, end: Array, order: _ClassOrder) -> tuple[Array, MemberState | None]:
        positions, arrangement = positions_of(x), order.arrangement

        def attend(q: Array, new: NewKeys, v: tuple[Array, Array]) -> tuple[Array, MemberState | None]:
            k = new.keys
            B, t = q.shape[:2]
            length = t * jax.lax.axis_size(SEQUENCE)
            keys = FarKeys(block.attention.scale, *spec.near.near(length), implementation)
            far, segments = _attend_segments(q, k, v, order.positions, spec, keys)
            if keys.are_all:
                o = gather_heads(far[0], SEQUENCE)
                # The ring has no slots, so these are never stored.
                own_k = own_v = jnp.zeros((B, t, k[0].shape[2], spec.head_dim), q.dtype)
            else:
                own_k, own_v = (arrangement.restored(jnp.concatenate(each, 1)) for each in (k, v))
                o, lse = attend_near(arrangement.restored(q), own_k, own_v, keys)
                lse = arrangement.sorted(lse.swapaxes(1, 2)).swapaxes(1, 2)
                o, _ = _merge([(arrangement.sorted(o), lse), gather_heads_and_lse(*far, SEQUENCE)])
            if capacity is None:
                return o, None
            ring = prompt_state(spec.near, None, own_k, own_v, positions, end, capacity)
            sized = zip(segments, spec.blocks.segment_slots(capacity), strict=True)
            stored = (ClassArrays(fit_slots(s.k, slots), fit_slots(s.v, slots)) for s, slots in sized)
            return o, MemberState(ring, *stored)

        block = whole_weights(block, weights)
        reduce = sum_over(mesh, BY_TOKEN)
        return block(x, arrangement.sorted(positions), attend, implementation, spec.project_ordered, reduce)

    in_specs = (
        weight_specs(block, BY_TOKEN, weights),
        _TOKENS,
        layout("B"),
        _ClassOrder(_ARRANGEMENT, _ROWS),
    )
    return on_mesh(mesh, local, in_specs, (_TOKENS, layout("B K S R")))(block, x, end, order)


def _attend_segments(
    q: Array,
    k: tuple[Array, Array],
    v: tuple[Array, Array],
    key_positions: tuple[Array, Array],
    spec: ClassMember,
    keys: FarKeys,
) -> tuple[tuple[Array, Array], list[ClassArrays]]:
    """Compute far attention of all tokens for one device's heads.

    Args:
      q: queries of one device's tokens in class order.
      k: keys of important tokens and of the others.
      v: values of important tokens and of the others.
      key_positions: positions of the tokens of all devices, by class.
      spec: ranks of both classes.
      keys: far keys.

    Returns:
      The output [B, T, N/U, Z] and its log-sum-exp, tokens device by device, and the keys and values of all
      tokens by class.
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
    by_device = [positions.reshape(B, U, -1) for positions in key_positions]
    far = segment_attention(
        q,
        jnp.concatenate(by_device, 2).reshape(B, -1),
        [Segment(s.k, s.v, positions) for s, positions in zip(segments, key_positions, strict=True)],
        scale=keys.scale,
        sinks=keys.sinks,
        window=keys.window,
        implementation=keys.implementation,
    )
    return far, segments


@partial(jax.jit, static_argnames="mesh")
def _restore_order(x: Array, arrangement: Arrangement, mesh: Mesh) -> Array:
    """Bring x [B, T, D] from each device's class order back to the order of positions."""

    def restore(x: Array, arrangement: Arrangement) -> Array:
        return arrangement.restored(x)

    return on_mesh(mesh, restore, (_TOKENS, _ARRANGEMENT), _TOKENS)(x, arrangement)


def _merge(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Merge near attention with what the exchange returns, or return the only part."""
    if len(parts) == 1:
        return parts[0]
    # Without the barrier XLA schedules near attention after the exchange instead of concurrently.
    return merge_partial(jax.lax.optimization_barrier(parts))
