"""Two token classes (ZDC §5.2): one layer classifies tokens, and its group stores each class separately.

The leader, the first layer of a group, stores all tokens alike and ranks them by its softmax denominators.
The other layers, the members, store each class in arrays of its own width.

Slots are assigned block by block. Of every `block` positions, the first ceil(fraction · block) slots of the
important segment belong to the block, and the remaining slots come from the rest segment. Any token of the
block may occupy any of them. A slot stores one token or is empty, as its position tells. The leader stores
these positions once for all layers of its group.

In a chunk of a prompt, tokens are sorted into class order: important tokens first, and each class by
position. Projections and cache writes of a class thus work on contiguous rows of the class's width.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from kernels_pallas import Segment, merge_partial
from zdc_jax.axes import Array
from zdc_jax.cache.specs.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.specs.spec import Attended, Call, LayerCacheSpec, put_rows
from zdc_jax.ops.attention import Implementation, segment_attention
from zdc_jax.ops.importance import token_importance
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.ops.slots import EMPTY

NO_WRITE = "a layer with token classes stores tokens only in `attend`; call `attend` instead"
"""Message of `write`, which a layer with token classes does not support."""


@dataclass(frozen=True)
class ClassBlocks:
    """Division of positions into two classes.

    Attributes:
      block: positions per block.
      fraction: share of each block's positions that is important, in (0, 1).
    """

    block: int
    fraction: float

    def slots(self, tokens: int) -> int:
        """Return the number of important tokens among the first `tokens` tokens of a block."""
        return math.ceil(self.fraction * tokens - 1e-9)

    def segment_slots(self, capacity: int) -> tuple[int, int]:
        """Return the slots of the important segment and of the rest, for a cache of `capacity` tokens.

        Both numbers are rounded up to a multiple of 8, the rows that a GPU copies at a time.
        """
        blocks, slots = -(-capacity // self.block), self.slots(self.block)

        def round_up(rows: int) -> int:
            return -(-rows // 8) * 8

        return round_up(blocks * slots), round_up(blocks * (self.block - slots))

    def important_in(self, tokens: int) -> int:
        """Return the number of important tokens in a chunk of `tokens` that begins with a block.

        The result is 1 for a single decoded token, whatever its class.
        """
        if tokens == 1:
            return 1
        blocks, remainder = divmod(tokens, self.block)
        return blocks * self.slots(self.block) + self.slots(remainder)

    def first_slots(self, start: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """Return the first slot of the block of position `start` in both segments."""
        slots, block = self.slots(self.block), start // self.block
        return block * slots, block * (self.block - slots)


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclass(frozen=True)
class ClassArrays:
    """Keys and values of one class in one layer.

    Attributes:
      k: keys [B, K, S, R].
      v: values [B, K, S, Z].
    """

    k: Array
    v: Array


@partial(jax.tree_util.register_dataclass, data_fields=["positions", "importance"], meta_fields=[])
@dataclass(frozen=True)
class GroupState:
    """State that the layers of a group share.

    Attributes:
      positions: position of the token in each slot of both segments, int32 ([B, S1], [B, S2]).
      importance: importance of the tokens of the newest block of each sequence, [B, block] float32. Decoded
        tokens are classified by comparison with it.
    """

    positions: tuple[Array, Array]
    importance: Array

    @classmethod
    def create(cls, blocks: ClassBlocks, *, batch: int, capacity: int) -> "GroupState":
        """Create the state of empty sequences."""
        important, rest = blocks.segment_slots(capacity)

        def empty(slots: int) -> Array:
            return jnp.full((batch, slots), EMPTY, jnp.int32)

        importance = jnp.full((batch, blocks.block), -jnp.inf, jnp.float32)
        return cls((empty(important), empty(rest)), importance)


class Arrangement(NamedTuple):
    """Class order of the tokens of one call, and their slots.

    Attributes:
      order: indices [B, T] that sort tokens into class order.
      inverse: indices [B, T] that restore the order by position.
      slots: slot [B] of the first token of each class in a chunk. For a decoded token, the slot lies past the
        end of the segment of the other class.
    """

    order: Array
    inverse: Array
    slots: tuple[Array, Array]

    def sorted(self, x: Array) -> Array:
        """Return x [B, T, ...] in class order."""
        return _take(x, self.order)

    def restored(self, x: Array) -> Array:
        """Return x [B, T, ...], given in class order, in order of position."""
        return _take(x, self.inverse)


def _take(x: Array, order: Array) -> Array:
    return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)


class Classified(NamedTuple):
    """Values that a leader passes to the members of its group.

    Attributes:
      group: state shared by the group, including the new tokens.
      arrangement: class order and slots of the new tokens.
    """

    group: GroupState
    arrangement: Arrangement


@partial(jax.tree_util.register_dataclass, data_fields=["tokens", "group"], meta_fields=[])
@dataclass(frozen=True)
class LeaderState:
    """Cache of a leader.

    Attributes:
      tokens: keys and values of all tokens alike.
      group: state shared by the group.
    """

    tokens: PrefixRingState
    group: GroupState


@partial(jax.tree_util.register_dataclass, data_fields=["near", "important", "rest"], meta_fields=[])
@dataclass(frozen=True)
class MemberState:
    """Cache of a member.

    Attributes:
      near: all coordinates of the window and the sinks.
      important, rest: first coordinates of the tokens of each class.
    """

    near: PrefixRingState
    important: ClassArrays
    rest: ClassArrays


@dataclass(frozen=True, kw_only=True)
class ClassLeader(LayerCacheSpec):
    """First layer of a group, which stores all tokens alike and classifies them.

    Attributes:
      tokens: spec of the stored tokens.
      blocks: division into classes.
    """

    exchange = "classes"

    tokens: PrefixRing
    blocks: ClassBlocks

    @property
    def alignment(self) -> int:
        return self.blocks.block

    def create(self, batch: int, capacity: int) -> LeaderState:
        group = GroupState.create(self.blocks, batch=batch, capacity=capacity)
        return LeaderState(self.tokens.create(batch, capacity), group)

    def write(self, state: LeaderState, k: NewKeys, v: Array, positions: Array, end: Array) -> LeaderState:
        """Raise `NotImplementedError`: the class of a token follows from its attention."""
        raise NotImplementedError(NO_WRITE)

    def attend(
        self,
        state: LeaderState,
        q: Array,
        k: NewKeys,
        v: Array,
        positions: Array,
        end: Array,
        aux: object,
        call: Call,
    ) -> Attended:
        """Store the new tokens and attend to the cache; `Attended.aux` is a `Classified`."""
        own, o, lse, *_ = self.tokens.attend(state.tokens, q, k, v, positions, end, None, call)
        group, arrangement = arrange(state.group, call.all_heads(lse), positions, end, self.blocks)
        if positions.shape[1] > 1:
            start = positions[:, 0]
            aligned = (start % self.alignment == 0) | (start >= end)
            o = jnp.where(aligned[:, None, None, None], o, jnp.nan)
        return Attended(LeaderState(own, group), o, lse, Classified(group, arrangement))

    def release(self, state: LeaderState, rows: Array) -> LeaderState:
        """Empty the sequences `rows`: mark their slots as empty."""
        important, rest = (jnp.where(rows[:, None], EMPTY, slots) for slots in state.group.positions)
        importance = jnp.where(rows[:, None], -jnp.inf, state.group.importance)
        return replace(state, group=GroupState((important, rest), importance))

    def on_heads(self, num_kv_heads: int) -> "ClassLeader":
        tokens = replace(self.tokens, num_kv_heads=num_kv_heads)
        return replace(self, num_kv_heads=num_kv_heads, tokens=tokens)


@dataclass(frozen=True, kw_only=True)
class ClassMember(LayerCacheSpec):
    """Layer after the leader of its group, which stores the classes at different widths.

    Attributes:
      near: ring with all coordinates of the sinks and the window, without older tokens.
      blocks: division into classes.
      important: coordinates (R, Z) of keys and values of important tokens.
      rest: coordinates (R, Z) of all other tokens.
    """

    exchange = "classes"

    near: PrefixRing
    blocks: ClassBlocks
    important: tuple[int, int]
    rest: tuple[int, int]

    @property
    def alignment(self) -> int:
        return self.blocks.block

    @property
    def has_near(self) -> bool:
        """Whether some tokens keep all coordinates, so that projections have the full width."""
        return bool(self.near.sinks or self.near.window)

    def create(self, batch: int, capacity: int) -> MemberState:
        def empty(slots: int, width: int) -> Array:
            return jnp.zeros((batch, self.num_kv_heads, slots, width), self.dtype)

        sized = zip(self.blocks.segment_slots(capacity), (self.important, self.rest), strict=True)
        segments = (ClassArrays(empty(slots, R), empty(slots, Z)) for slots, (R, Z) in sized)
        return MemberState(self.near.create(batch, capacity), *segments)

    def project(
        self,
        attention: Any,
        x: Array,
        positions: Array,
        implementation: Implementation | None,
        aux: Classified,
    ) -> tuple[Array, NewKeys, tuple[Array, Array]]:
        """Compute q, k and v in class order, with k and v of each class in an array of its own."""
        x, positions = aux.arrangement.sorted(x), aux.arrangement.sorted(positions)
        return self.project_ordered(attention, x, positions)

    def project_ordered(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None = None
    ) -> tuple[Array, NewKeys, tuple[Array, Array]]:
        """Compute `project` for tokens that are in class order already."""
        rest = (self.head_dim, self.head_dim) if self.has_near else self.rest
        q, k, v = attention.project_classes(x, positions, self.blocks.important_in(x.shape[1]), rest)
        return q, NewKeys(k), v

    def write(self, state: MemberState, k: NewKeys, v: Array, positions: Array, end: Array) -> MemberState:
        """Raise `NotImplementedError`: the class of a token follows from its leader's attention."""
        raise NotImplementedError(NO_WRITE)

    def attend(
        self,
        state: MemberState,
        q: Float[Array, "B T N Hq"],
        k: NewKeys,
        v: tuple[Array, Array],
        positions: Array,
        end: Array,
        aux: Classified,
        call: Call,
    ) -> Attended:
        """Store the new tokens and attend to the cache; the results are in order of position."""
        group, order = aux
        segments = self._write_segments(state, k.keys, v, order, positions, end)
        o, lse = segment_attention(
            q,
            order.sorted(positions),
            [Segment(s.k, s.v, at) for s, at in zip(segments, group.positions, strict=True)],
            scale=call.scale,
            sinks=self.near.sinks,
            window=self.near.window,
            implementation=call.implementation,
        )
        far = order.restored(o), order.restored(lse.swapaxes(1, 2)).swapaxes(1, 2)
        written = MemberState(state.near, *segments)
        if not self.has_near:
            return Attended(written, *far, aux)
        q, own_k, own_v = (order.restored(x) for x in (q, *(jnp.concatenate(x, 1) for x in (k.keys, v))))
        near = self.near.attend(state.near, q, NewKeys(own_k), own_v, positions, end, None, call)
        o, lse = merge_partial([far, (near.o, near.lse)])
        return Attended(replace(written, near=near.state), o, lse, aux)

    def on_heads(self, num_kv_heads: int) -> "ClassMember":
        near = replace(self.near, num_kv_heads=num_kv_heads)
        return replace(self, num_kv_heads=num_kv_heads, near=near)

    def _write_segments(
        self,
        state: MemberState,
        k: tuple[Array, Array],
        v: tuple[Array, Array],
        order: Arrangement,
        positions: Array,
        end: Array,
    ) -> list[ClassArrays]:
        """Return both segments with the new keys and values, each cut to the width of its class."""
        if positions.shape[1] == 1:  # Both segments get the token; its slots say which one stores it.
            k, v, kept = (k[0], k[0]), (v[0], v[0]), [positions < end[:, None]] * 2
        else:
            kept = jnp.split(order.sorted(positions) < end[:, None], [k[0].shape[1]], axis=1)
        each = zip((state.important, state.rest), k, v, order.slots, kept, strict=True)
        widths = self.important, self.rest
        return [
            ClassArrays(put_rows(old.k, k[..., :R], slot, stored), put_rows(old.v, v[..., :Z], slot, stored))
            for (old, k, v, slot, stored), (R, Z) in zip(each, widths, strict=True)
        ]


def arrange(
    group: GroupState, lse: Array, positions: Array, end: Array, blocks: ClassBlocks
) -> tuple[GroupState, Arrangement]:
    """Assign a class to each token of a call, by the leader's log-sum-exp [B, N, T].

    A chunk of more than one token must begin at a multiple of `blocks.block` in every sequence that has
    tokens in the chunk.
    """
    importance, valid = token_importance(lse), positions < end[:, None]
    if positions.shape[1] == 1:
        group, slots = place_token(group, importance[:, 0], positions[:, 0], valid[:, 0], blocks)
        identity = jnp.zeros_like(positions)
        return group, Arrangement(identity, identity, slots)
    segments = class_order(importance, valid, blocks)
    group = write_chunk(group, segments, positions, importance, valid, blocks)
    order = jnp.concatenate(segments, 1)
    return group, Arrangement(order, jnp.argsort(order, axis=1), blocks.first_slots(positions[:, 0]))


def class_order(
    importance: Float[Array, "B T"], valid: Bool[Array, "B T"], blocks: ClassBlocks
) -> tuple[Int[Array, "B T1"], Int[Array, "B T2"]]:
    """Return the indices of a chunk's tokens for the slots of each segment, ascending except for padding.

    Of the n valid tokens of each block, the most important ceil(fraction · n) tokens are important. Padding
    fills the remaining important slots, and the number of slots depends on T alone.
    """
    complete = importance.shape[1] // blocks.block * blocks.block
    spans = [(0, complete, blocks.block), (complete, importance.shape[1], importance.shape[1] - complete)]
    orders = [
        _order_blocks(importance[:, start:end], valid[:, start:end], blocks, block, start)
        for start, end, block in spans
        if end > start
    ]
    important, rest = (jnp.concatenate(part, 1) for part in zip(*orders, strict=True))
    return important, rest


def _order_blocks(
    importance: Array, valid: Array, blocks: ClassBlocks, block: int, start: int
) -> tuple[Array, Array]:
    B, T = importance.shape
    importance, valid = (x.reshape(B, -1, block) for x in (importance, valid))
    by_importance = jnp.argsort(jnp.where(valid, -importance, jnp.inf), axis=-1, stable=True)
    rank = jnp.argsort(by_importance, axis=-1, stable=True)
    counts = jnp.array([blocks.slots(n) for n in range(block + 1)])
    important = (rank < counts[valid.sum(-1)][..., None]) & valid
    # Padding comes between the classes, so that no token of the rest takes an important slot.
    order = jnp.argsort(jnp.where(important, 0, jnp.where(valid, 2, 1)), axis=-1, stable=True)
    order += start + block * jnp.arange(T // block)[:, None]
    slots = blocks.slots(block)
    return order[..., :slots].reshape(B, -1), order[..., slots:].reshape(B, -1)


def write_chunk(
    group: GroupState,
    order: tuple[Array, Array],
    positions: Int[Array, "B T"],
    importance: Float[Array, "B T"],
    valid: Bool[Array, "B T"],
    blocks: ClassBlocks,
) -> GroupState:
    """Store the positions of a chunk's tokens in their slots, and the importance of the newest blocks."""
    start = positions[:, 0]
    placed = tuple(
        _put_positions(old, _take(positions, indices), slot, _take(valid, indices))
        for old, indices, slot in zip(group.positions, order, blocks.first_slots(start), strict=True)
    )
    # EMPTY, which is -1, marks a sequence without tokens in this chunk.
    last = jnp.where(valid, positions, EMPTY).max(1, keepdims=True)
    wanted = last // blocks.block * blocks.block + jnp.arange(blocks.block)
    source = jnp.clip(wanted - start[:, None], 0, positions.shape[1] - 1)
    new = jnp.take_along_axis(importance, source, 1)
    new = jnp.where((wanted >= start[:, None]) & (wanted <= last), new, -jnp.inf)
    return GroupState((placed[0], placed[1]), jnp.where(last >= 0, new, group.importance))


def _put_positions(old: Array, positions: Array, slot: Array, kept: Array) -> Array:
    return put_rows(old[:, None, :, None], positions[:, :, None, None], slot, kept)[:, 0, :, 0]


def place_token(
    group: GroupState,
    importance: Float[Array, " B"],
    position: Int[Array, " B"],
    active: Bool[Array, " B"],
    blocks: ClassBlocks,
) -> tuple[GroupState, tuple[Array, Array]]:
    """Assign a class and a slot to one new token per sequence, by its rank within its block so far.

    A token goes to the other segment if the block's slots of its class are full.

    Returns:
      The group's state with the new tokens, and a slot [B] in each segment. The slot is the size of the
        segment if the token belongs to the other class, or the sequence is not active.
    """
    block, rows = blocks.block, jnp.arange(position.shape[0])
    within = position % block
    earlier = jnp.arange(block) < within[:, None]
    scores = jnp.where(earlier, group.importance, -jnp.inf)
    rank = (scores >= importance[:, None]).sum(1)
    counts = jnp.array([blocks.slots(n) for n in range(block + 1)])
    ranks_important = rank < counts[within + 1]
    firsts = blocks.first_slots(position)
    sizes = blocks.slots(block), block - blocks.slots(block)
    has_room, free_slots = [], []
    for segment, first, size in zip(group.positions, firsts, sizes, strict=True):
        is_empty = jnp.take_along_axis(segment, first[:, None] + jnp.arange(size), 1) == EMPTY
        has_room.append(is_empty.any(1))
        free_slots.append(first + is_empty.argmax(1))
    important = jnp.where(ranks_important, has_room[0], ~has_room[1])
    slots = tuple(
        jnp.where(active & belongs, slot, segment.shape[1])
        for belongs, slot, segment in zip((important, ~important), free_slots, group.positions, strict=True)
    )
    placed = tuple(
        segment.at[rows, slot].set(position, mode="drop")
        for segment, slot in zip(group.positions, slots, strict=True)
    )
    new = scores.at[rows, within].set(importance)
    state = GroupState((placed[0], placed[1]), jnp.where(active[:, None], new, group.importance))
    return state, (slots[0], slots[1])
