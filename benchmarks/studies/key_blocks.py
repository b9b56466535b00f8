"""Choice of key blocks for each block of queries: lists for the prefill of long prompts, by KV head.

Every list has the first blocks (sinks) and the last ones (the window, with the diagonal). The other blocks
are chosen by an estimate of the attention that a few queries of the block give them, in few coordinates.
Query heads of a KV head share a list. MInference (Jiang et al., 2024) chooses key blocks for query blocks by
an estimate. FlexPrefill (Lai et al., 2025) keeps blocks until they hold a share of the mass. The estimate
from leading coordinates of a calibrated basis, for sampled queries, is ours.

Blocks are (Q, P). Query block i of a sequence has positions start + i·Q … start + (i+1)·Q - 1, and key block
j has j·P … (j+1)·P - 1. nq = ⌈T/Q⌉, nk = ⌈S/P⌉.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from kernels_pallas import BlockLists, block_mass, block_mass_refusal, device_refusal
from zdc_jax.axes import Array
from zdc_jax.ops.contract import einsum_f32

FILLER = -1
"""Value after the last block of a list."""

Rule = Literal["mass", "share", "count"]
Estimate = Literal["keys", "means", "recent"]
RULES: tuple[Rule, ...] = ("mass", "share", "count")
ESTIMATES: tuple[Estimate, ...] = ("keys", "means", "recent")


@dataclass(frozen=True)
class BlockChoice:
    """Rule for choosing blocks; hashable, static under `jax.jit`.

    Attributes:
      rule: `mass` chooses the largest blocks until they hold a share of the estimated mass. `share` chooses a
        share
        of the visible blocks, and `count` a number of blocks. Sinks and window count and are always chosen.
      amount: share in (0, 1], rounded up to blocks, or number of blocks.
      coordinates: leading coordinates of q and k that the estimate reads.
      samples: queries of a block that the estimate reads, evenly spaced, with the last query.
      estimate: `keys` is a softmax over all keys, summed by block. `means` uses the mean keys of blocks.
        `recent`
        chooses the last blocks without an estimate.
      worst: whether a block counts by the sampled query that wants it most, instead of the mean.
      blocks: (Q, P), queries and keys of a block.
      sinks: number of first blocks in every list.
      window: number of last blocks; 1 for the blocks that contain a query of the block.

    Raises:
      ValueError: an invalid value.
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
    """Return lists of key blocks for queries at `start` … start + T - 1, of which those below `end` are real.

    Args:
      q: queries of any float dtype, in coordinates ordered by importance.
      k: keys in the same coordinates; slot = position, at least up to `end`. Later slots play no part, but
        must be
        numbers for `means`.
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
    """Return which blocks `block_lists` chooses."""
    T, S, K = q.shape[1], k.shape[2], k.shape[1]
    visible = visible_blocks(start, end, T, S, choice.blocks)
    always = visible & near_blocks(start, end, T, S, choice)
    visible, always = (jnp.repeat(x[:, None], K, axis=1) for x in (visible, always))
    if choice.estimate == "recent":
        mass = jnp.broadcast_to(jnp.arange(visible.shape[-1], dtype=jnp.float32), visible.shape)
    else:
        mass = _mass(q, k, start, end, scale=scale, choice=choice)
    if choice.rule == "mass":
        return blocks_of_mass(mass, visible, always, choice.amount)
    if choice.rule == "count":
        return best_blocks(mass, visible, always, jnp.int32(choice.amount))
    seen = visible.sum(-1)
    # 0.2 · 25 is above 5 in float32, and must not round up to 6.
    return best_blocks(mass, visible, always, jnp.ceil(choice.amount * seen - 1e-4).astype(jnp.int32))


def visible_blocks(
    start: Int[Array, " B"], end: Int[Array, " B"], T: int, S: int, blocks: tuple[int, int]
) -> Bool[Array, "B nq nk"]:
    """Return whether a real query of the block may see a key of the block."""
    first, last = _query_ends(start, end, T, blocks[0])
    begins = jnp.arange(-(-S // blocks[1])) * blocks[1]
    return (begins <= last[..., None]) & (first <= last)[..., None]


def near_blocks(
    start: Int[Array, " B"], end: Int[Array, " B"], T: int, S: int, choice: BlockChoice
) -> Bool[Array, "B nq nk"]:
    """Return blocks of sinks, and blocks from `window` - 1 before that of the block's first query."""
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
    """Estimate the share of attention that the sampled queries of a block give each block of keys, float32.

    The result is the mean (the largest if `choice.worst`) over sampled queries and over the query heads of a
    KV head. With all coordinates and all queries it is exact.
    """
    (B, T, N, _), (K, S) = q.shape, k.shape[1:3]
    (Q, P), R, at = choice.blocks, choice.coordinates, _sampled(start, end, T, choice)
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


def kernel_mass(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    end: Int[Array, " B"],
    *,
    scale: float,
    choice: BlockChoice,
    interpret: bool = False,
) -> Float[Array, "B K nq nk"]:
    """Return `estimated_mass` of the estimate `keys`, not `worst`, by one kernel; raises as `block_mass`."""
    queries, at, keys = _kernel_inputs(q, k, start, end, choice)
    return block_mass(queries, at, keys, scale=scale, keys=choice.blocks[1], interpret=interpret)


def _kernel_inputs(
    q: Array, k: Array, start: Array, end: Array, choice: BlockChoice
) -> tuple[Array, Array, Array]:
    """Return sampled queries [B, K, nq, m·G, R], their positions, and keys."""
    (B, T, N, _), K, R = q.shape, k.shape[1], choice.coordinates
    at = _sampled(start, end, T, choice)
    _, nq, m = at.shape
    place = jnp.clip(at - start[:, None, None], 0, T - 1).reshape(B, -1, 1, 1)
    sampled = jnp.take_along_axis(q[..., :R], place, axis=1).reshape(B, nq, m, K, N // K, R)
    queries = sampled.transpose(0, 3, 1, 2, 4, 5).reshape(B, K, nq, -1, R)
    there = start[:, None, None] + jnp.arange(nq)[:, None] * choice.blocks[0] < end[:, None, None]
    return queries, jnp.repeat(jnp.where(there, at, -1), N // K, axis=-1), k[..., :R]


def _mass(
    q: Array, k: Array, start: Array, end: Array, *, scale: float, choice: BlockChoice
) -> Float[Array, "B K nq nk"]:
    """Return `kernel_mass` where the kernel runs, else `estimated_mass`."""
    arrays, options = (q, k, start, end), {"scale": scale, "choice": choice}
    if choice.estimate == "keys" and not choice.worst and device_refusal(q) is None:
        inputs = jax.eval_shape(lambda *arrays: _kernel_inputs(*arrays, choice), *arrays)
        if block_mass_refusal(*inputs, scale=scale, keys=choice.blocks[1]) is None:
            return kernel_mass(*arrays, **options)
    return estimated_mass(*arrays, **options)


def best_blocks(
    mass: Float[Array, "B K nq nk"],
    visible: Bool[Array, "B K nq nk"],
    always: Bool[Array, "B K nq nk"],
    count: Int[Array, "*_"],
) -> Bool[Array, "B K nq nk"]:
    """Choose the blocks in `always` and the best other visible ones, up to `count`; the first of equal ones.

    Args:
      count: number of blocks, broadcast to [B, K, nq].
    """
    count = jnp.broadcast_to(count, mass.shape[:-1])[..., None]

    def taken(above):
        return visible & (always | above)

    def many(above):
        return taken(above).sum(-1, keepdims=True)

    above, equal, _ = _at_threshold(mass, lambda above: many(above) >= count)
    return taken(above | _first(equal & visible & ~always, count - many(above)))


def blocks_of_mass(
    mass: Float[Array, "B K nq nk"],
    visible: Bool[Array, "B K nq nk"],
    always: Bool[Array, "B K nq nk"],
    share: float,
) -> Bool[Array, "B K nq nk"]:
    """Choose the blocks in `always` and the best other visible ones until they hold `share` of the mass."""
    mass = jnp.where(visible, mass, 0)
    wanted = share * mass.sum(-1, keepdims=True)

    def mass_of(above):
        return jnp.where(always | above, mass, 0).sum(-1, keepdims=True)

    above, equal, value = _at_threshold(mass, lambda above: mass_of(above) >= wanted)
    missing = jnp.where(value > 0, jnp.ceil((wanted - mass_of(above)) / value), 0)
    return visible & (always | above | _first(equal & visible & ~always, missing))


def as_lists(listed: Bool[Array, "B K nq nk"]) -> BlockLists:
    """Return chosen blocks as lists."""
    *lead, nk = listed.shape
    rows, j = listed.reshape(-1, nk), jnp.arange(nk, dtype=jnp.int32)
    # Blocks that are not chosen go to distinct places out of range, which are dropped.
    place = jnp.where(rows, jnp.cumsum(rows, axis=-1) - 1, nk + j)
    empty, row = jnp.full(rows.shape, FILLER, jnp.int32), jnp.arange(len(rows))[:, None]
    blocks = empty.at[row, place].set(jnp.broadcast_to(j, rows.shape), mode="drop", unique_indices=True)
    return BlockLists(blocks.reshape(*lead, nk), rows.sum(-1, dtype=jnp.int32).reshape(lead))


def _at_threshold(mass: Array, enough: Callable[[Array], Array]) -> tuple[Array, Array, Array]:
    """Return values above and at the largest threshold that keeps `enough`, and the threshold.

    Values must be ≥ 0. A bisection replaces sorting, because a long prompt has tens of thousands of rows.
    """
    bits = jax.lax.bitcast_convert_type(mass.astype(jnp.float32), jnp.int32)

    def lower(i: Array, threshold: Array) -> Array:
        higher = threshold | (1 << (30 - i))
        return jnp.where(enough(bits >= higher), higher, threshold)

    threshold = jax.lax.fori_loop(0, 31, lower, jnp.zeros((*mass.shape[:-1], 1), jnp.int32))
    value = jax.lax.bitcast_convert_type(threshold, jnp.float32)
    return bits > threshold, bits == threshold, value


def _first(candidates: Array, count: Array) -> Array:
    """Return the first `count` candidates of each row."""
    return candidates & (jnp.cumsum(candidates, axis=-1) <= count)


def _sampled(start: Array, end: Array, T: int, choice: BlockChoice) -> Int[Array, "B nq m"]:
    """Return positions of the sampled queries; the first repeats if queries are few."""
    m, (first, last) = choice.samples, _query_ends(start, end, T, choice.blocks[0])
    at = first[..., None] + (last - first + 1)[..., None] * jnp.arange(1, m + 1) // m - 1
    return jnp.maximum(at, first[..., None])


def _query_ends(start: Array, end: Array, T: int, Q: int) -> tuple[Array, Array]:
    """Return positions of the first and last real query of each block [B, nq]; last < first if none."""
    first = start[:, None] + jnp.arange(-(-T // Q)) * Q
    return first, jnp.minimum(jnp.minimum(first + Q, (start + T)[:, None]), end[:, None]) - 1
