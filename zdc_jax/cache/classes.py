"""Two token classes (ZDC §5.2): a leading layer classifies, the layers of its group keep classes apart.

The leader treats all tokens alike, and ranks them by its softmax denominators. In the other layers of its
group each class has arrays of its own width. Slots go block by block: of every `block` positions, the first
ceil(fraction · block) slots of the important segment and the others of the rest are theirs, whichever tokens
they turn out to be. A slot holds a token or is empty; its position says so. Positions are those of all layers
of a group: the leader keeps them.

In a piece of a prompt the tokens are put into class order, important ones first, each class by position, so
that projections and cache writes are of contiguous rows, at the width of their class.
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
from zdc_jax.cache.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.spec import Attended, Call, LayerCacheSpec, put_rows
from zdc_jax.ops.attention import Implementation, segment_attention
from zdc_jax.ops.importance import token_importance
from zdc_jax.ops.slots import EMPTY

NO_WRITE = "a layer with token classes stores tokens as it attends to them, not before"


@dataclass(frozen=True)
class ClassBlocks:
    """Of every `block` positions the most important share, `fraction` in (0, 1), is one class."""

    block: int
    fraction: float

    def slots(self, tokens: int) -> int:
        """Important tokens among `tokens` of one block."""
        return math.ceil(self.fraction * tokens - 1e-9)

    def segment_slots(self, capacity: int) -> tuple[int, int]:
        """Slots of the important segment and of the rest, for a cache of `capacity` tokens.

        Both are rounded up to the 8 rows that a GPU copies at a time.
        """
        blocks, slots = -(-capacity // self.block), self.slots(self.block)

        def rounded(rows):
            return -(-rows // 8) * 8

        return rounded(blocks * slots), rounded(blocks * (self.block - slots))

    def important_in(self, tokens: int) -> int:
        """Important tokens of a piece that begins with a block; 1 for a decoded token, of whichever class."""
        if tokens == 1:
            return 1
        whole, more = divmod(tokens, self.block)
        return whole * self.slots(self.block) + self.slots(more)

    def first_slots(self, start: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """Slots of both segments at which the block of position `start` begins."""
        slots, block = self.slots(self.block), start // self.block
        return block * slots, block * (self.block - slots)


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclass(frozen=True)
class ClassArrays:
    """Keys and values of one class in one layer: k [B, K, S, R], v [B, K, S, Z]."""

    k: Array
    v: Array


@partial(jax.tree_util.register_dataclass, data_fields=["positions", "importance"], meta_fields=[])
@dataclass(frozen=True)
class GroupState:
    """What the layers of a group share.

    positions: of the slots of both segments, int32 ([B, S1], [B, S2]); importance [B, block] float32, of the
    tokens of each row's newest block, by which decoded tokens are classified.
    """

    positions: tuple[Array, Array]
    importance: Array

    @classmethod
    def create(cls, blocks: ClassBlocks, *, batch: int, capacity: int) -> "GroupState":
        """Nothing held yet."""
        important, rest = blocks.segment_slots(capacity)

        def empty(slots):
            return jnp.full((batch, slots), EMPTY, jnp.int32)

        importance = jnp.full((batch, blocks.block), -jnp.inf, jnp.float32)
        return cls((empty(important), empty(rest)), importance)


class Arrangement(NamedTuple):
    """How the tokens of one call stand in class order, and where they go.

    order, inverse [B, T]: the tokens in class order, and back. slots [B]: of the first token of each class in
    a piece; of a decoded token, past the end of the segment that is not of its class.
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


class Classified(NamedTuple):
    """What a leader hands on to the layers of its group."""

    group: GroupState
    arrangement: Arrangement


@partial(jax.tree_util.register_dataclass, data_fields=["tokens", "group"], meta_fields=[])
@dataclass(frozen=True)
class LeaderState:
    """Cache of a leader, of tokens all alike, and what its group shares."""

    tokens: PrefixRingState
    group: GroupState


@partial(jax.tree_util.register_dataclass, data_fields=["near", "important", "rest"], meta_fields=[])
@dataclass(frozen=True)
class MemberState:
    """Cache of a layer behind a leader.

    near: all coordinates of the window and the sinks. important, rest: the first coordinates of all tokens,
    by class.
    """

    near: PrefixRingState
    important: ClassArrays
    rest: ClassArrays


@dataclass(frozen=True, kw_only=True)
class ClassLeader(LayerCacheSpec):
    """The first layer of a group: all tokens alike, as `tokens` keeps them; classifies them by `blocks`."""

    tokens: PrefixRing
    blocks: ClassBlocks

    @property
    def alignment(self) -> int:
        """`LayerCacheSpec.alignment`: pieces begin with a block."""
        return self.blocks.block

    def create(self, batch: int, capacity: int) -> LeaderState:
        group = GroupState.create(self.blocks, batch=batch, capacity=capacity)
        return LeaderState(self.tokens.create(batch, capacity), group)

    def write(self, state: LeaderState, k: Array, v: Array, positions: Array, end: Array) -> LeaderState:
        """Refused, as in `ClassMember`: tokens get their class as they are attended to."""
        raise NotImplementedError(NO_WRITE)

    def attend(
        self,
        state: LeaderState,
        q: Array,
        k: Array,
        v: Array,
        positions: Array,
        end: Array,
        aux: object,
        call: Call,
    ) -> Attended:
        """`LayerCacheSpec.attend`; hands a `Classified` on."""
        own, o, lse, _ = self.tokens.attend(state.tokens, q, k, v, positions, end, None, call)
        group, arrangement = arrange(state.group, call.all_heads(lse), positions, end, self.blocks)
        if positions.shape[1] > 1:
            start = positions[:, 0]
            aligned = (start % self.alignment == 0) | (start >= end)
            o = jnp.where(aligned[:, None, None, None], o, jnp.nan)
        return Attended(LeaderState(own, group), o, lse, Classified(group, arrangement))

    def release(self, state: LeaderState, rows: Array) -> LeaderState:
        """`LayerCacheSpec.release`: what slots hold is told by their positions."""
        important, rest = (jnp.where(rows[:, None], EMPTY, held) for held in state.group.positions)
        importance = jnp.where(rows[:, None], -jnp.inf, state.group.importance)
        return replace(state, group=GroupState((important, rest), importance))

    def on_heads(self, num_kv_heads: int) -> "ClassLeader":
        tokens = replace(self.tokens, num_kv_heads=num_kv_heads)
        return replace(self, num_kv_heads=num_kv_heads, tokens=tokens)


@dataclass(frozen=True, kw_only=True)
class ClassMember(LayerCacheSpec):
    """A layer behind a leader: `important` tokens keep (R, Z) of their own, `rest` those of the others.

    near: keeps all coordinates of the sinks and the window, without far attention.
    """

    near: PrefixRing
    blocks: ClassBlocks
    important: tuple[int, int]
    rest: tuple[int, int]

    @property
    def alignment(self) -> int:
        """`LayerCacheSpec.alignment`: pieces begin with a block."""
        return self.blocks.block

    @property
    def has_near(self) -> bool:
        """Whether some tokens keep all coordinates, so that projections stay whole."""
        return bool(self.near.sinks or self.near.window)

    def create(self, batch: int, capacity: int) -> MemberState:

        def empty(slots, width):
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
    ) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:
        """`LayerCacheSpec.project`: in class order, k and v of each class apart."""
        x, positions = aux.arrangement.sorted(x), aux.arrangement.sorted(positions)
        return self.project_ordered(attention, x, positions)

    def project_ordered(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None = None
    ) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:
        """`project` of tokens that stand in class order already."""
        less = (self.head_dim, self.head_dim) if self.has_near else self.rest
        return attention.project_classes(x, positions, self.blocks.important_in(x.shape[1]), less)

    def write(self, state: MemberState, k: Array, v: Array, positions: Array, end: Array) -> MemberState:
        """Refused: which class a token is of comes from its leader's attention."""
        raise NotImplementedError(NO_WRITE)

    def attend(
        self,
        state: MemberState,
        q: Float[Array, "B T N Hq"],
        k: tuple[Array, Array],
        v: tuple[Array, Array],
        positions: Array,
        end: Array,
        aux: Classified,
        call: Call,
    ) -> Attended:
        """`LayerCacheSpec.attend` of what `project` gave; the result stands by position again."""
        group, order = aux
        segments = self._written(state, k, v, order, positions, end)
        held = [Segment(s.k, s.v, at) for s, at in zip(segments, group.positions, strict=True)]
        o, lse = segment_attention(
            q,
            order.sorted(positions),
            held,
            scale=call.scale,
            sinks=self.near.sinks,
            window=self.near.window,
            implementation=call.implementation,
        )
        far = order.restored(o), order.restored(lse.swapaxes(1, 2)).swapaxes(1, 2)
        longer = MemberState(state.near, *segments)
        if not self.has_near:
            return Attended(longer, *far, aux)
        q, own_k, own_v = (order.restored(x) for x in (q, *(jnp.concatenate(x, 1) for x in (k, v))))
        near = self.near.attend(state.near, q, own_k, own_v, positions, end, None, call)
        o, lse = merge_partial([far, (near.o, near.lse)])
        return Attended(replace(longer, near=near.state), o, lse, aux)

    def on_heads(self, num_kv_heads: int) -> "ClassMember":
        near = replace(self.near, num_kv_heads=num_kv_heads)
        return replace(self, num_kv_heads=num_kv_heads, near=near)

    def _written(
        self,
        state: MemberState,
        k: tuple[Array, Array],
        v: tuple[Array, Array],
        order: Arrangement,
        positions: Array,
        end: Array,
    ) -> list[ClassArrays]:
        """Both segments with new keys and values, each cut to the width of its class."""
        if positions.shape[1] == 1:  # Its slots tell its class: both segments are offered the token.
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
    """Classifies the tokens of a call by their leader's log-sum-exp [B, N, T].

    A piece of more than one token begins at a multiple of `blocks.block` in each row that has tokens in it.
    """
    importance, valid = token_importance(lse), positions < end[:, None]
    if positions.shape[1] == 1:
        group, slots = place_token(group, importance[:, 0], positions[:, 0], valid[:, 0], blocks)
        same = jnp.zeros_like(positions)
        return group, Arrangement(same, same, slots)
    both = class_order(importance, valid, blocks)
    group = write_piece(group, both, positions, importance, valid, blocks)
    order = jnp.concatenate(both, 1)
    return group, Arrangement(order, jnp.argsort(order, axis=1), blocks.first_slots(positions[:, 0]))


def class_order(
    importance: Float[Array, "B T"], valid: Bool[Array, "B T"], blocks: ClassBlocks
) -> tuple[Int[Array, "B T1"], Int[Array, "B T2"]]:
    """Indices of the tokens of a piece for the slots of each segment, ascending but for padding.

    The most important ceil(fraction · n) of the n valid tokens of each block are important; padding takes
    the important slots that are left, and their number depends on T alone.
    """
    whole = importance.shape[1] // blocks.block * blocks.block
    pieces = [(0, whole, blocks.block), (whole, importance.shape[1], importance.shape[1] - whole)]
    found = [
        _order_blocks(importance[:, start:end], valid[:, start:end], blocks, block, start)
        for start, end, block in pieces
        if end > start
    ]
    first, second = (jnp.concatenate(part, 1) for part in zip(*found, strict=True))
    return first, second


def _order_blocks(
    importance: Array, valid: Array, blocks: ClassBlocks, block: int, start: int
) -> tuple[Array, Array]:
    B, T = importance.shape
    importance, valid = (x.reshape(B, -1, block) for x in (importance, valid))
    by_importance = jnp.argsort(jnp.where(valid, -importance, jnp.inf), axis=-1, stable=True)
    rank = jnp.argsort(by_importance, axis=-1, stable=True)
    counts = jnp.array([blocks.slots(n) for n in range(block + 1)])
    chosen = (rank < counts[valid.sum(-1)][..., None]) & valid
    # Important, then padding, then the rest: so the rest always begins where its slots do, or later.
    order = jnp.argsort(jnp.where(chosen, 0, jnp.where(valid, 2, 1)), axis=-1, stable=True)
    order += start + block * jnp.arange(T // block)[:, None]
    slots = blocks.slots(block)
    return order[..., :slots].reshape(B, -1), order[..., slots:].reshape(B, -1)


def write_piece(
    group: GroupState,
    order: tuple[Array, Array],
    positions: Int[Array, "B T"],
    importance: Float[Array, "B T"],
    valid: Bool[Array, "B T"],
    blocks: ClassBlocks,
) -> GroupState:
    """Positions of a piece's tokens in their slots, and the importance of each row's newest block."""
    start = positions[:, 0]
    placed = tuple(
        _put_positions(old, _take(positions, which), slot, _take(valid, which))
        for old, which, slot in zip(group.positions, order, blocks.first_slots(start), strict=True)
    )
    last = jnp.where(valid, positions, EMPTY).max(1, keepdims=True)  # -1 where the row has nothing here.
    wanted = last // blocks.block * blocks.block + jnp.arange(blocks.block)
    source = jnp.clip(wanted - start[:, None], 0, positions.shape[1] - 1)
    new = jnp.take_along_axis(importance, source, 1)
    new = jnp.where((wanted >= start[:, None]) & (wanted <= last), new, -jnp.inf)
    return GroupState((placed[0], placed[1]), jnp.where(last >= 0, new, group.importance))


def _put_positions(held: Array, positions: Array, slot: Array, kept: Array) -> Array:
    return put_rows(held[:, None, :, None], positions[:, :, None, None], slot, kept)[:, 0, :, 0]


def place_token(
    group: GroupState,
    importance: Float[Array, " B"],
    position: Int[Array, " B"],
    active: Bool[Array, " B"],
    blocks: ClassBlocks,
) -> tuple[GroupState, tuple[Array, Array]]:
    """Classifies one new token a row by its rank among its block so far, and gives its slot.

    Returns the group's state with it, and the slot [B] in each segment, that segment's size where the token
    is not of its class (or the row not active). A full segment sends it to the other one.
    """
    block, rows = blocks.block, jnp.arange(position.shape[0])
    within = position % block
    past = jnp.arange(block) < within[:, None]
    known = jnp.where(past, group.importance, -jnp.inf)
    stronger = (known >= importance[:, None]).sum(1)
    counts = jnp.array([blocks.slots(n) for n in range(block + 1)])
    wanted = stronger < counts[within + 1]
    firsts = blocks.first_slots(position)
    sizes = blocks.slots(block), block - blocks.slots(block)
    empty, slots = [], []
    for held, first, size in zip(group.positions, firsts, sizes, strict=True):
        region = jnp.take_along_axis(held, first[:, None] + jnp.arange(size), 1) == EMPTY
        empty.append(region.any(1))
        slots.append(first + region.argmax(1))
    important = jnp.where(wanted, empty[0], ~empty[1])
    chosen = tuple(
        jnp.where(active & mine, slot, held.shape[1])
        for mine, slot, held in zip((important, ~important), slots, group.positions, strict=True)
    )
    placed = tuple(
        held.at[rows, slot].set(position, mode="drop")
        for held, slot in zip(group.positions, chosen, strict=True)
    )
    new = known.at[rows, within].set(importance)
    state = GroupState((placed[0], placed[1]), jnp.where(active[:, None], new, group.importance))
    return state, (chosen[0], chosen[1])
