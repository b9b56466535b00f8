"""Which blocks of keys a block of queries attends to, by KV head: lists for the prefill of long prompts.

Every list holds the first blocks (sinks) and the last ones (the window, with the diagonal). The others are
chosen by how much attention a few queries of the block would give them, in few coordinates. Query heads of a
KV head share a list. Choosing blocks of keys for blocks of queries by an estimate is that of MInference
(Jiang et al., 2024), to keep blocks until a share of the mass is there that of FlexPrefill (Lai et al.,
2025); that the estimate reads leading coordinates of a calibrated basis, for sampled queries, is ours.

Query block i of a row holds positions start + i·Q … start + (i+1)·Q - 1, key block j holds j·P … (j+1)·P - 1,
of blocks (Q, P). nq = ⌈T/Q⌉, nk = ⌈S/P⌉.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.ops.contract import einsum_f32

FILLER = -1
"""What stands in a list behind its blocks."""

Rule = Literal["mass", "share", "count"]
Estimate = Literal["keys", "means", "recent"]
RULES: tuple[Rule, ...] = ("mass", "share", "count")
ESTIMATES: tuple[Estimate, ...] = ("keys", "means", "recent")


class BlockLists(NamedTuple):
    """blocks [B, K, nq, nk] int32: of each query block the key blocks in ascending order, then `FILLER`.

    counts [B, K, nq] int32: how many they are; 0 of a query block that lies past the end of its row.
    """

    blocks: Array
    counts: Array


@dataclass(frozen=True)
class BlockChoice:
    """How blocks are chosen. Hashable, static under `jax.jit`.

    Attributes:
      rule, amount: `mass`: blocks are taken, largest first, until they hold this share of the estimated
        mass, in (0, 1]. `share`: of the blocks that the query block may see, in (0, 1], rounded up. `count`:
        so many blocks. Sinks and window count in all three, and are in even where they are more.
      coordinates: leading coordinates of q and k that the estimate reads.
      samples: queries of a block that the estimate reads, evenly spaced, its last query among them.
      estimate: `keys`: a softmax over all keys, summed by block. `means`: over the mean keys of blocks.
        `recent`: none, the last blocks are taken.
      worst: a block is worth what the sampled query that wants it most would give it, not the mean.
      blocks: (Q, P), queries and keys of a block.
      sinks: first blocks in every list. window: last ones, 1 for those that any query of the block stands in.

    Raises:
      ValueError: a value that is none of these.
    """

    rule: Rule
    amount: float
    coordinates: int = 16
    samples: int = 8
    estimate: Estimate = "keys"
    worst: bool = False
    blocks: tuple[int, int] = (128, 128)
    sinks: int = 1
    window: int = 2

    def __post_init__(self) -> None:
        for name, allowed in (("rule", RULES), ("estimate", ESTIMATES)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r} must be one of {allowed}")
        least = {"coordinates": 1, "samples": 1, "sinks": 0, "window": 1}
        for name, bound in least.items():
            if (value := getattr(self, name)) < bound:
                raise ValueError(f"{name}={value} must be >= {bound}")
        if min(self.blocks) < 1:
            raise ValueError(f"blocks={self.blocks} must be at least 1 query and 1 key")
        if self.rule == "count" and (self.amount < 1 or self.amount != int(self.amount)):
            raise ValueError(f"amount={self.amount} must be a whole number of blocks >= 1")
        if self.rule != "count" and not 0 < self.amount <= 1:
            raise ValueError(f"amount={self.amount} must lie in (0, 1], a share")


def block_lists(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    end: Int[Array, " B"],
    *,
    scale: float,
    choice: BlockChoice,
) -> BlockLists:
    """Lists of key blocks for queries at `start` … start + T - 1, of which those below `end` are real.

    Args:
      q, k: any float dtype, in coordinates whose first ones matter most; slot = position of k, which holds
        at least the positions below `end`; what later slots hold plays no part (with `means` it must be a
        number).
      scale: factor on the scores.
    """
    return as_lists(listed_blocks(q, k, start, end, scale=scale, choice=choice))


def listed_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    end: Int[Array, " B"],
    *,
    scale: float,
    choice: BlockChoice,
) -> Bool[Array, "B K nq nk"]:
    """`block_lists`, as which blocks are in."""
    T, S, K = q.shape[1], k.shape[2], k.shape[1]
    visible = visible_blocks(start, end, T, S, choice.blocks)
    always = visible & near_blocks(start, end, T, S, choice)
    visible, always = (jnp.repeat(x[:, None], K, axis=1) for x in (visible, always))
    if choice.estimate == "recent":
        mass = jnp.broadcast_to(jnp.arange(visible.shape[-1], dtype=jnp.float32), visible.shape)
    else:
        mass = estimated_mass(q, k, start, end, scale=scale, choice=choice)
    if choice.rule == "mass":
        return blocks_of_mass(mass, visible, always, choice.amount)
    if choice.rule == "count":
        return best_blocks(mass, visible, always, jnp.int32(choice.amount))
    seen = visible.sum(-1)
    # Of 25 blocks 0.2 are 5, though 0.2 · 25 lies above 5 in float32.
    return best_blocks(mass, visible, always, jnp.ceil(choice.amount * seen - 1e-4).astype(jnp.int32))


def visible_blocks(
    start: Int[Array, " B"], end: Int[Array, " B"], T: int, S: int, blocks: tuple[int, int]
) -> Bool[Array, "B nq nk"]:
    """Whether a real query of the block may see a key of the block."""
    first, last = _query_ends(start, end, T, blocks[0])
    begins = jnp.arange(-(-S // blocks[1])) * blocks[1]
    return (begins <= last[..., None]) & (first <= last)[..., None]


def near_blocks(
    start: Int[Array, " B"], end: Int[Array, " B"], T: int, S: int, choice: BlockChoice
) -> Bool[Array, "B nq nk"]:
    """Blocks of sinks, and from `window` - 1 blocks before that of the block's first query on."""
    first, _ = _query_ends(start, end, T, choice.blocks[0])
    j = jnp.arange(-(-S // choice.blocks[1]))
    return (j < choice.sinks) | (j > first[..., None] // choice.blocks[1] - choice.window)


def estimated_mass(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    end: Int[Array, " B"],
    *,
    scale: float,
    choice: BlockChoice,
) -> Float[Array, "B K nq nk"]:
    """Share of its attention that the sampled queries of a block would give each block of keys, float32.

    The mean (or, where `choice.worst`, the largest) over sampled queries and over the query heads of a KV
    head. Of all coordinates and all queries it is the mean share itself.
    """
    (B, T, N, _), (K, S) = q.shape, k.shape[1:3]
    Q, P = choice.blocks
    R, m = choice.coordinates, choice.samples
    first, last = _query_ends(start, end, T, Q)
    at = first[..., None] + (last - first + 1)[..., None] * jnp.arange(1, m + 1) // m - 1
    at = jnp.maximum(at, first[..., None])  # Fewer queries than samples: the first stands for the rest.
    k = jnp.pad(k[..., :R], ((0, 0), (0, 0), (0, -S % P), (0, 0)))
    keys = k.reshape(B, K, -1, P, R)
    if choice.estimate == "means":
        k, begins = keys.astype(jnp.float32).mean(3), jnp.arange(keys.shape[2]) * P
    else:
        begins = jnp.arange(k.shape[2])
    q = q[..., :R].reshape(B, T, K, N // K, R)

    def of_block(i: Array) -> Array:
        rows = jnp.clip(at[:, i] - start[:, None], 0, T - 1)
        sampled = jnp.take_along_axis(q, rows[:, :, None, None, None], axis=1)
        scores = scale * einsum_f32("BmKGR,BKSR->BKGmS", sampled, k)
        seen = begins <= at[:, i, None, None, :, None]
        shares = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=-1)
        mass = shares.reshape(*shares.shape[:4], keys.shape[2], -1).sum(-1)
        return mass.max((2, 3)) if choice.worst else mass.mean((2, 3))

    return jnp.moveaxis(jax.lax.map(of_block, jnp.arange(-(-T // Q))), 0, 2)


def best_blocks(
    mass: Float[Array, "B K nq nk"],
    visible: Bool[Array, "B K nq nk"],
    always: Bool[Array, "B K nq nk"],
    count: Int[Array, "*_"],
) -> Bool[Array, "B K nq nk"]:
    """Those `always` in, and of the other visible ones the best, until `count` are in; of equals the first.

    count: broadcasts to [B, K, nq].
    """
    rank, _ = _ranked(mass, visible, always)
    return visible & (always | (rank < jnp.broadcast_to(count, mass.shape[:-1])[..., None]))


def blocks_of_mass(
    mass: Float[Array, "B K nq nk"],
    visible: Bool[Array, "B K nq nk"],
    always: Bool[Array, "B K nq nk"],
    share: float,
) -> Bool[Array, "B K nq nk"]:
    """Those `always` in, and of the other visible ones the best, until they hold `share` of the mass."""
    mass = jnp.where(visible, mass, 0)
    rank, order = _ranked(mass, visible, always)
    ordered = jnp.take_along_axis(mass, order, axis=-1)
    before = jnp.take_along_axis(jnp.cumsum(ordered, axis=-1) - ordered, rank, axis=-1)
    return visible & (always | (before < share * mass.sum(-1, keepdims=True)))


def as_lists(listed: Bool[Array, "B K nq nk"]) -> BlockLists:
    """Which blocks are in, as lists."""
    counts = listed.sum(-1, dtype=jnp.int32)
    order = jnp.argsort(~listed, axis=-1, stable=True).astype(jnp.int32)
    inside = jnp.arange(listed.shape[-1]) < counts[..., None]
    return BlockLists(jnp.where(inside, order, FILLER), counts)


def _ranked(mass: Array, visible: Array, always: Array) -> tuple[Array, Array]:
    """Place of each block in the order in which they are taken, and that order."""
    first, then = ~always, jnp.where(visible, -mass, jnp.inf)
    order = jnp.lexsort((then, first), axis=-1)  # Stable, so that of equals the lower position is taken.
    return jnp.argsort(order, axis=-1), order


def _query_ends(start: Array, end: Array, T: int, Q: int) -> tuple[Array, Array]:
    """Positions of the first and last real query of each block [B, nq]; last < first of none."""
    first = start[:, None] + jnp.arange(-(-T // Q)) * Q
    return first, jnp.minimum(jnp.minimum(first + Q, (start + T)[:, None]), end[:, None]) - 1
