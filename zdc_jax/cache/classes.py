"""Cache of layers with two token classes (ZDC §5.2): each class has arrays of its own width.

Slots go block by block: of every `block` positions, the first ceil(fraction · block) slots of the important
segment and the others of the rest are theirs, whichever tokens they turn out to be. A slot holds a token or
is empty; its position says so. Positions are those of all layers of a group, so that they are stored once.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.plan import TokenClasses

EMPTY = -1
"""Position of a slot that holds no token."""


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclass(frozen=True)
class Segment:
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
    def create(cls, classes: TokenClasses, group: int, *, batch: int, capacity: int) -> "GroupState":
        """Nothing held yet."""
        important, rest = classes.segment_slots(group, capacity)
        empty = lambda slots: jnp.full((batch, slots), EMPTY, jnp.int32)
        importance = jnp.full((batch, classes.block), -jnp.inf, jnp.float32)
        return cls((empty(important), empty(rest)), importance)


def class_order(
    importance: Float[Array, "B T"], valid: Bool[Array, "B T"], classes: TokenClasses, group: int
) -> tuple[Int[Array, "B T1"], Int[Array, "B T2"]]:
    """Indices of the tokens of a piece for the slots of each segment, ascending but for padding.

    The most important ceil(fraction · n) of the n valid tokens of each block are important; padding takes
    the important slots that are left, and their number depends on T alone.
    """
    whole = importance.shape[1] // classes.block * classes.block
    pieces = [(0, whole, classes.block), (whole, importance.shape[1], importance.shape[1] - whole)]
    found = [
        _order_blocks(importance[:, start:end], valid[:, start:end], classes, group, block, start)
        for start, end, block in pieces
        if end > start
    ]
    first, second = (jnp.concatenate(part, 1) for part in zip(*found, strict=True))
    return first, second


def _order_blocks(
    importance: Array, valid: Array, classes: TokenClasses, group: int, block: int, start: int
) -> tuple[Array, Array]:
    B, T = importance.shape
    importance, valid = (x.reshape(B, -1, block) for x in (importance, valid))
    by_importance = jnp.argsort(jnp.where(valid, -importance, jnp.inf), axis=-1, stable=True)
    rank = jnp.argsort(by_importance, axis=-1, stable=True)
    counts = jnp.array([classes.slots(group, n) for n in range(block + 1)])
    chosen = (rank < counts[valid.sum(-1)][..., None]) & valid
    # Important, then padding, then the rest: so the rest always begins where its slots do, or later.
    order = jnp.argsort(jnp.where(chosen, 0, jnp.where(valid, 2, 1)), axis=-1, stable=True)
    order += start + block * jnp.arange(T // block)[:, None]
    slots = classes.slots(group, block)
    return order[..., :slots].reshape(B, -1), order[..., slots:].reshape(B, -1)


def write_piece(
    group: GroupState,
    order: tuple[Array, Array],
    positions: Int[Array, "B T"],
    importance: Float[Array, "B T"],
    valid: Bool[Array, "B T"],
    classes: TokenClasses,
    index: int,
) -> GroupState:
    """Positions of a piece's tokens in their slots, and the importance of each row's newest block."""
    held = jnp.where(valid, positions, EMPTY)
    start = positions[0, 0]
    placed = tuple(
        jax.lax.dynamic_update_slice(old, jnp.take_along_axis(held, which, 1), (0, slot))
        for old, which, slot in zip(group.positions, order, first_slots(start, classes, index), strict=True)
    )
    last = held.max(1, keepdims=True)  # -1 where the row has nothing in this piece.
    wanted = last // classes.block * classes.block + jnp.arange(classes.block)
    new = jnp.take_along_axis(importance, jnp.clip(wanted - start, 0, positions.shape[1] - 1), 1)
    new = jnp.where((wanted >= start) & (wanted <= last), new, -jnp.inf)
    return GroupState((placed[0], placed[1]), jnp.where(last >= 0, new, group.importance))


def first_slots(start: Array, classes: TokenClasses, group: int) -> tuple[Array, Array]:
    """Slots of both segments at which the block that begins at position `start` begins."""
    slots, block = classes.slots(group, classes.block), start // classes.block
    return block * slots, block * (classes.block - slots)


def place_token(
    group: GroupState,
    importance: Float[Array, " B"],
    position: Int[Array, " B"],
    active: Bool[Array, " B"],
    classes: TokenClasses,
    index: int,
) -> tuple[GroupState, tuple[Array, Array]]:
    """Classifies one new token a row by its rank among its block so far, and gives its slot.

    Returns the group's state with it, and the slot [B] in each segment, that segment's size where the token
    is not of its class (or the row not active). A full segment sends it to the other one.
    """
    block, rows = classes.block, jnp.arange(position.shape[0])
    within = position % block
    past = jnp.arange(block) < within[:, None]
    known = jnp.where(past, group.importance, -jnp.inf)
    stronger = (known >= importance[:, None]).sum(1)
    counts = jnp.array([classes.slots(index, n) for n in range(block + 1)])
    wanted = stronger < counts[within + 1]
    firsts = first_slots(position, classes, index)
    sizes = classes.slots(index, block), block - classes.slots(index, block)
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


def put_piece(
    segment: Segment, k: Float[Array, "B T K R"], v: Float[Array, "B T K Z"], slot: Int[Array, ""]
) -> Segment:
    """Consecutive slots from `slot` on take these keys and values."""
    put = lambda buffer, x: jax.lax.dynamic_update_slice(buffer, x.swapaxes(1, 2), (0, 0, slot, 0))
    return Segment(put(segment.k, k), put(segment.v, v))


def put_token(
    segment: Segment, k: Float[Array, "B 1 K R"], v: Float[Array, "B 1 K Z"], slot: Int[Array, " B"]
) -> Segment:
    """One slot a row takes these; slots past the end take nothing."""
    rows = jnp.arange(slot.shape[0])
    put = lambda buffer, x: buffer.at[rows, :, slot].set(x[:, 0], mode="drop")
    return replace(segment, k=put(segment.k, k), v=put(segment.v, v))
