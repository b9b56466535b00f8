"""Caches of two token classes (ZDC §5.2): one layer classifies tokens, and its group stores them apart.

The leader, the first layer of a group, stores all tokens alike and ranks them by its softmax denominators.
The other layers, the members, store each class in a segment: arrays of the width of the class.

Slots are assigned block by block. Of every `block` positions, the first ceil(share · block) slots of the
important segment belong to the block, and the remaining slots come from the rest segment. Any token of the
block may occupy any of them. A slot stores one token or is empty, as its position tells. The leader stores
these positions once for all layers of its group.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.cache.specs.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.specs.spec import Attended, Call, LayerCacheSpec, NewTokens, State
from zdc_jax.methods.token_classes.attention import Segment, segment_attention
from zdc_jax.ops.importance import token_importance
from zdc_jax.ops.slots import EMPTY

Pair = tuple[Array, Array]
"""Arrays of important tokens and of the others."""


@dataclass(frozen=True)
class ClassBlocks:
    """Division of positions into two classes.

    Attributes:
      block: positions per block.
      share: share of each block's positions that is important, in (0, 1).
    """

    block: int
    share: float

    def important(self, tokens: int) -> int:
        """Return the number of important tokens among the first `tokens` tokens of a block."""
        return math.ceil(self.share * tokens - 1e-9)

    @property
    def counts(self) -> Int[Array, " block+1"]:
        """Return `important` of 0 to `block` tokens."""
        return jnp.array([self.important(tokens) for tokens in range(self.block + 1)])

    @property
    def slots(self) -> tuple[int, int]:
        """Slots of one block in each segment."""
        important = self.important(self.block)
        return important, self.block - important

    def segment_slots(self, capacity: int) -> list[int]:
        """Return the slots of each segment, for a cache of `capacity` tokens."""
        blocks = -(-capacity // self.block)
        return [blocks * slots for slots in self.slots]


class GroupState(NamedTuple):
    """State that the layers of a group share.

    Attributes:
      positions: position of the token in each slot of both segments, int32 ([B, S1], [B, S2]).
      importance: importance of the tokens of the newest block of each sequence, [B, block] float32. Decoded
        tokens are classified by comparison with it.
    """

    positions: Pair
    importance: Array


class Classified(NamedTuple):
    """Values that a leader passes to the members of its group.

    Attributes:
      positions: `GroupState.positions`, including the new tokens.
      slots: slot of each new token in both segments, [B, T]. In the segment of the other class, the slot lies
        past the end.
    """

    positions: Pair
    slots: Pair


class LeaderState(NamedTuple):
    """Cache of a leader: keys and values of all tokens alike, and the state shared by the group."""

    tokens: PrefixRingState
    group: GroupState


class MemberState(NamedTuple):
    """Cache of a member.

    Attributes:
      near: all coordinates of the window and the sinks.
      k: first coordinates of the keys of each class, [B, K, S, R].
      v: first coordinates of the values of each class, [B, K, S, Z].
    """

    near: PrefixRingState
    k: Pair
    v: Pair


@dataclass(frozen=True, kw_only=True)
class _ClassLayer(LayerCacheSpec):
    """Layer of a group.

    Attributes:
      blocks: division into classes.
    """

    blocks: ClassBlocks

    @property
    def alignment(self) -> int:
        return self.blocks.block

    def write(self, state: State, new: NewTokens) -> State:
        """Raise `NotImplementedError`: the class of a token follows from its leader's attention."""
        raise NotImplementedError(
            "a layer with token classes stores tokens only in `attend`; call `attend` instead"
        )


@dataclass(frozen=True, kw_only=True)
class ClassLeader(_ClassLayer):
    """First layer of a group, which stores all tokens alike and classifies them.

    Attributes:
      tokens: spec of the stored tokens.
    """

    tokens: PrefixRing

    def create(self, batch: int, capacity: int) -> LeaderState:
        important, rest = (
            jnp.full((batch, slots), EMPTY, jnp.int32) for slots in self.blocks.segment_slots(capacity)
        )
        importance = jnp.full((batch, self.blocks.block), -jnp.inf, jnp.float32)
        return LeaderState(self.tokens.create(batch, capacity), GroupState((important, rest), importance))

    def attend(self, state: LeaderState, q: Array, new: NewTokens, aux: object, call: Call) -> Attended:
        """Store the new tokens and attend to the cache; `Attended.aux` is a `Classified`."""
        call = replace(call, needed_from=None)  # Importance comes from all queries.
        tokens, o, lse, *_ = self.tokens.attend(state.tokens, q, new, None, call)
        importance, start, end = token_importance(lse), new.start, new.end
        group, slots = classify(state.group, importance, new.positions, end, self.blocks)
        if q.shape[1] > 1:
            aligned = (start % self.alignment == 0) | (start >= end)
            o = jnp.where(aligned[:, None, None, None], o, jnp.nan)
        return Attended(LeaderState(tokens, group), o, lse, Classified(group.positions, slots))

    def release(self, state: LeaderState, rows: Array) -> LeaderState:
        """Empty the sequences `rows`: mark their slots as empty."""
        important, rest = (jnp.where(rows[:, None], EMPTY, held) for held in state.group.positions)
        importance = jnp.where(rows[:, None], -jnp.inf, state.group.importance)
        return state._replace(group=GroupState((important, rest), importance))


@dataclass(frozen=True, kw_only=True)
class ClassMember(_ClassLayer):
    """Layer after the leader of its group, which stores the classes at different widths.

    Attributes:
      near: ring with all coordinates of the sinks and the window, without older tokens.
      ranks: coordinates (R, Z) of keys and values of important tokens, and of all other tokens.
    """

    near: PrefixRing
    ranks: tuple[tuple[int, int], tuple[int, int]]

    def create(self, batch: int, capacity: int) -> MemberState:
        def empty(side: int) -> Pair:
            important, rest = (
                jnp.zeros((batch, self.num_kv_heads, slots, ranks[side]), self.dtype)
                for slots, ranks in zip(self.blocks.segment_slots(capacity), self.ranks, strict=True)
            )
            return important, rest

        return MemberState(self.near.create(batch, capacity), empty(0), empty(1))

    def attend(
        self, state: MemberState, q: Float[Array, "B T N Hq"], new: NewTokens, aux: Classified, call: Call
    ) -> Attended:
        """Store the new tokens and attend to the cache."""
        q, new = new.rotate(q, call)
        stored_k, stored_v = _store(state.k, new.k.keys, aux.slots), _store(state.v, new.v, aux.slots)
        o, lse = segment_attention(
            q,
            new.positions,
            list(map(Segment, stored_k, stored_v, aux.positions)),
            scale=call.scale,
            sinks=self.near.sinks,
            window=self.near.window,
            implementation=call.implementation,
        )
        if not (self.near.sinks or self.near.window):
            return Attended(MemberState(state.near, stored_k, stored_v), o, lse, aux)
        near = self.near.attend(state.near, q, new, None, call)
        o, lse = merge_partial([(o, lse), (near.o, near.lse)])
        return Attended(MemberState(near.state, stored_k, stored_v), o, lse, aux)


def _store(segments: Pair, new: Float[Array, "B T K C"], slots: Pair) -> Pair:
    """Return both segments with the leading coordinates of new keys or values in their slots."""
    rows = jnp.arange(len(new))[:, None]
    important, rest = (
        held.at[rows, :, slot].set(new[..., : held.shape[-1]], mode="drop")
        for held, slot in zip(segments, slots, strict=True)
    )
    return important, rest


def classify(
    group: GroupState,
    importance: Float[Array, "B T"],
    positions: Int[Array, "B T"],
    end: Int[Array, " B"],
    blocks: ClassBlocks,
) -> tuple[GroupState, Pair]:
    """Choose the class and the slot of each new token.

    A chunk of more than one token must begin at a multiple of `blocks.block` in every sequence that has
    tokens in the chunk.

    Returns:
      The group's state with the new tokens, and their slots as in `Classified`.
    """
    valid = positions < end[:, None]
    place = place_token if positions.shape[1] == 1 else place_chunk
    slots, newest = place(group, importance, positions, valid, blocks)
    rows = jnp.arange(len(positions))[:, None]
    important, rest = (
        held.at[rows, slot].set(positions, mode="drop")
        for held, slot in zip(group.positions, slots, strict=True)
    )
    newest = jnp.where(valid.any(1, keepdims=True), newest, group.importance)
    return GroupState((important, rest), newest), slots


def place_chunk(
    group: GroupState,
    importance: Float[Array, "B T"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    blocks: ClassBlocks,
) -> tuple[Pair, Float[Array, "B block"]]:
    """Return the slots of a chunk's tokens, and the importance of the newest block.

    Of the n valid tokens of each block, the most important ceil(share · n) tokens are important.
    """
    (B, T), block = positions.shape, blocks.block

    def by_block(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, -T % block))).reshape(B, -1, block)

    valid = by_block(valid)
    importance = jnp.where(valid, by_block(importance), -jnp.inf)
    counts = valid.sum(-1)
    rank = jnp.argsort(jnp.argsort(-importance, axis=-1, stable=True), axis=-1)
    is_important = valid & (rank < blocks.counts[counts][..., None])
    index = positions[:, :1] // block + jnp.arange(valid.shape[1])

    def place(belongs: Array, held: Array, size: int) -> Array:
        slots = index[..., None] * size + belongs.cumsum(-1) - 1
        return jnp.where(belongs, slots, held.shape[1]).reshape(B, -1)[:, :T]

    segments = zip((is_important, valid & ~is_important), group.positions, blocks.slots, strict=True)
    important, rest = (place(*segment) for segment in segments)
    last = jnp.maximum((counts > 0).sum(1) - 1, 0)
    return (important, rest), importance[jnp.arange(B), last]


def place_token(
    group: GroupState,
    importance: Float[Array, "B 1"],
    positions: Int[Array, "B 1"],
    valid: Bool[Array, "B 1"],
    blocks: ClassBlocks,
) -> tuple[Pair, Float[Array, "B block"]]:
    """Return the slot of one new token per sequence, and the importance of the newest block.

    The token is important by its rank within its block so far. It goes to the other segment if the block's
    slots of its class are full.
    """
    within = positions % blocks.block
    offsets = jnp.arange(blocks.block)
    scores = jnp.where(offsets < within, group.importance, -jnp.inf)
    rank = (scores >= importance).sum(1, keepdims=True)
    firsts = [positions // blocks.block * size for size in blocks.slots]
    used = [
        (jnp.take_along_axis(held, first + jnp.arange(size), 1) != EMPTY).sum(1, keepdims=True)
        for held, first, size in zip(group.positions, firsts, blocks.slots, strict=True)
    ]
    has_room = [count < size for count, size in zip(used, blocks.slots, strict=True)]
    is_important = jnp.where(rank < blocks.counts[within + 1], has_room[0], ~has_room[1])
    important, rest = (
        jnp.where(valid & belongs, first + count, held.shape[1])
        for belongs, first, count, held in zip(
            (is_important, ~is_important), firsts, used, group.positions, strict=True
        )
    )
    return (important, rest), jnp.where(offsets == within, importance, scores)
