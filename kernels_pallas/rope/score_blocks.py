"""Scores that each block of 64 positions gains because keys left out their mean, in one launch (ours).

    grid: (tiles of tokens · groups of steps, N, B), Triton; 4 warps per program, no explicit barriers
    program: queries of one block of positions and one head → products with the mean
             each step: load the turns of 16 or 32 blocks → matrix product → store

A program multiplies its queries with the mean m, as complex numbers: one for each pair of coordinates of the
rotary embedding. Products are turned from the center of the block to each position. A query head and block
then cost 2 H FLOP, three times over, and 4 bytes of the result. A program reads 4 H bytes per block, and each
query once. The last step has the block of the queries. Products cost as much as two or three steps, so
programs take all steps where there are enough programs. For a single token, programs have 64 blocks instead.

For several tokens both factors are sums of two float16 numbers, and three products of these parts are added.
That has 21 bits, nearly as with TensorFloat32, at half of the instructions and of the shared memory. The
products of a token are relative to their largest, so that none exceeds the range of float16.

Scores are relative to the block of the query's own position. So nearly all terms are small, although the mean
is large, and the products of slow coordinates lose no digits. `zdc_jax.ops.shift` explains the mathematics.

JAX plans to drop Pallas' Triton back end. Without it `check_score_blocks` raises, and XLA does the work.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import GAIN_BLOCK, Shaped
from kernels_pallas.lowering import lower_once
from kernels_pallas.triton import check_back_end, plt

BLOCKS = 32
"""Blocks of a step of a program with several tokens; half as many if there are at most 64 blocks."""
PAIRS = 64
"""Pairs of coordinates that such a program multiplies at a time."""
PROGRAMS = 528
"""Programs that occupy a GPU; with more, each takes several steps."""
WARPS = 4
"""Warps of a program."""
BLOCKS_OF_ONE = 64
"""Blocks of a program with a single token."""
SMALLEST = 1e-30
"""Divisor in place of products that are all 0."""
MOST_SCORES = 2**31
"""Largest number of scores, because Triton's offsets have 32 bits."""


class MeanTurns(NamedTuple):
    """Mean of the keys, and what turns its products with queries, as complex numbers in float32.

    Real parts of all pairs come first, then imaginary parts.

    Attributes:
      mean: mean m of the keys before the rotary embedding, [K, H].
      in_block: turns from the center of a block to each of its positions, [64, H].
      turns: factors for distances of 0, 1, … blocks, conjugated, [blocks, H]. Those of distance 0 are zeros.
    """

    mean: Any
    in_block: Any
    turns: Any


def check_score_blocks(
    q: Shaped,
    mean: Shaped,
    in_block: Shaped,
    turns: Shaped,
    starts: Shaped,
    *,
    ends: Shaped | None = None,
) -> None:
    """Check the arguments of `score_blocks`; errors are those it documents."""
    check_back_end()
    common.check_floats("q", q, (None,) * 4, "B, T, N, H")
    B, T, N, H = q.shape
    check_turns(MeanTurns(mean, in_block, turns), H)
    common.check_groups(N, mean.shape[0])
    common.check_rows(B, starts=starts, ends=ends)
    common.check_sizes(B=B, T=T, N=N)
    check_count(B * T * N, turns)


@lower_once("scale", "interpret")
@common.checked_by(check_score_blocks)
def score_blocks(
    q: Float[Array, "B T N H"],
    mean: Float[Array, "K H"],
    in_block: Float[Array, "64 H"],
    turns: Float[Array, "blocks H"],
    starts: Int[Array, " B"],
    *,
    scale: float,
    ends: Int[Array, " B"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B N blocks T"]:
    """Return the real part of scale · q·m̄ · in_block[t] · turns[d] for each block, d blocks from that of t.

    Args:
      q: queries before the rotary embedding, [B, T, N, H] in a float dtype.
      mean: as in `MeanTurns`, like `in_block` and `turns`.
      starts: position of the first query of each sequence, int32; others follow.
      scale: factor on the scores.
      ends: position at which padding begins, int32; default no padding. Padding may have any finite scores.
      interpret: whether to run on any device, slowly.

    Returns:
      The scores in float32. Blocks after the query's own, and all blocks of a single query that is padding,
      are not written and have any values.

    Raises:
      ValueError: a shape or dtype is not allowed. Raised before launch, with name and value.
      NotImplementedError: JAX has no Triton back end.
    """
    (B, T, N), blocks = q.shape[:3], turns.shape[0]
    # The first token may be the last of its block.
    tiles = 1 if T == 1 else 1 + pl.cdiv(T - 1, GAIN_BLOCK)
    across = pl.cdiv(blocks, BLOCKS_OF_ONE)
    kernel = functools.partial(_score_one, scale=scale)
    if T > 1:
        each = BLOCKS if blocks > 2 * BLOCKS else BLOCKS // 2
        steps = choose_steps(tiles * N * B, pl.cdiv(blocks, each))
        across = pl.cdiv(blocks, each * steps)
        kernel = functools.partial(_score_tokens, scale=scale, each=each, across=across, steps=steps)
    span = [x.astype(jnp.int32) for x in (starts, starts + T if ends is None else ends)]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((B, N, blocks, T), jnp.float32),
        grid=(tiles * across, N, B),
        compiler_params=plt.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="zdc_score_blocks",
    )(span, q, MeanTurns(mean, in_block, [turns] if T == 1 else split_in_two(turns)))


def choose_steps(queries: int, most: int) -> int:
    """Return how many steps of blocks a program takes, so that there are enough programs.

    Args:
      queries: programs if each took all steps.
      most: steps of all blocks.
    """
    return max(1, most // max(1, PROGRAMS // queries))


def split_in_two(x: Float[Array, "..."]) -> list[Array]:
    """Return two float16 arrays whose sum is x to 21 bits, for magnitudes from 2^-13 to 2^15.

    The first has the leading bits of x. XLA could leave out a conversion to float16 and back.
    """
    leading = lax.bitcast_convert_type(x, jnp.int32) & -(1 << 13)
    high = lax.bitcast_convert_type(leading, jnp.float32)
    return [high.astype(jnp.float16), (x - high).astype(jnp.float16)]


def check_turns(means: MeanTurns, H: int) -> None:
    """Raise `ValueError` unless kernels can turn products of H coordinates."""
    common.check_shape("mean", means.mean, (None, H), "K, H")
    common.check_shape("in_block", means.in_block, (GAIN_BLOCK, H), f"{GAIN_BLOCK}, H")
    common.check_shape("turns", means.turns, (None, H), "blocks, H")
    common.check_sizes(blocks=means.turns.shape[0])
    for name, x in means._asdict().items():
        if x.dtype != jnp.float32:
            raise ValueError(f"{name} has dtype {x.dtype}: must be float32")
    if H % 2 or H < 2:
        raise ValueError(f"{H=}: must be a multiple of 2")


def check_count(queries: int, turns: Shaped) -> None:
    """Raise `ValueError` for more scores than Triton can address."""
    if (count := queries * turns.shape[0]) > MOST_SCORES:
        raise ValueError(f"B·T·N·blocks = {count}: must be at most 2^31, because Triton has 32-bit offsets")


def load_pairs(ref: Any, rows: tuple[Any, ...], there: Any, pairs: Array) -> list[Array]:
    """Load the real and the imaginary parts of rows, [rows, pairs] each; zeros unless `there`."""
    half = ref.shape[-1] // 2
    mask = there & (pairs < half)
    return [plt.load(ref.at[*rows, pairs + i * half], mask=mask, other=0.0) for i in (0, 1)]


def multiply_mean(q: Sequence[Array], mean: Sequence[Array], turn: Sequence[Array]) -> list[Array]:
    """Return the products of queries with the mean, at their positions in the block, in float32."""
    (q1, q2), (m1, m2), (cos, sin) = (x.astype(jnp.float32) for x in q), mean, turn
    real, imaginary = q1 * m1 + q2 * m2, q2 * m1 - q1 * m2
    return [real * cos - imaginary * sin, imaginary * cos + real * sin]


def score_token(
    means: MeanTurns, q_ref: Any, head: tuple[Any, ...], kv: Any, start: Array, block: Array
) -> Array:
    """Return what the scores of a single query at position `start` gain in some blocks, without a scale.

    Args:
      means: references.
      q_ref: queries.
      head: place of the query in `q_ref`.
      kv: its KV head.
      start: its position.
      block: numbers of the blocks.
    """
    blocks, H = means.turns.shape
    pairs = lax.broadcasted_iota(jnp.int32, (1, max(16, pl.next_power_of_2(H // 2))), 1)
    distance = jnp.clip(lax.div(start, jnp.int32(GAIN_BLOCK)) - block, 0, blocks - 1)[:, None]
    turns = load_pairs(means.turns, (distance,), (block < blocks)[:, None], pairs)
    turn = load_pairs(means.in_block, (lax.rem(start, jnp.int32(GAIN_BLOCK)),), True, pairs)
    mean = load_pairs(means.mean, (kv,), True, pairs)
    products = multiply_mean(load_pairs(q_ref, head, True, pairs), mean, turn)
    return functools.reduce(jnp.add, ((x * y).sum(1) for x, y in zip(turns, products, strict=True)))


def _score_one(span_refs: Sequence[Any], q_ref: Any, means: MeanTurns, out_ref: Any, *, scale: float) -> None:
    """Score some blocks for the only query of a head and sequence."""
    N, blocks = q_ref.shape[2], means.turns[0].shape[0]
    n, b = pl.program_id(1), pl.program_id(2)
    first_block = pl.program_id(0) * BLOCKS_OF_ONE
    start, end = (ref[b] for ref in span_refs)

    @pl.when((first_block <= lax.div(start, jnp.int32(GAIN_BLOCK))) & (start < end))
    def _() -> None:
        one, kv = means._replace(turns=means.turns[0]), lax.div(n, jnp.int32(N // means.mean.shape[0]))
        block = first_block + lax.iota(jnp.int32, BLOCKS_OF_ONE)
        score = score_token(one, q_ref, (b, 0, n), kv, start, block)
        plt.store(out_ref.at[b, n, block, 0], scale * score, mask=block < blocks)


def _score_tokens(
    span_refs: Sequence[Any],
    q_ref: Any,
    means: MeanTurns,
    out_ref: Any,
    *,
    scale: float,
    each: int,
    across: int,
    steps: int,
) -> None:
    """Score some steps of `each` blocks for the queries of one block."""
    T, N, H = q_ref.shape[1:]
    blocks, half = means.turns[0].shape[0], H // 2
    n, b = pl.program_id(1), pl.program_id(2)
    kv = lax.div(n, jnp.int32(N // means.mean.shape[0]))
    tile, first_step = common.divide(pl.program_id(0), across)
    start, end = (ref[b] for ref in span_refs)
    own, first_step = lax.div(start, jnp.int32(GAIN_BLOCK)) + tile, first_step * steps
    token = own * GAIN_BLOCK - start + lax.iota(jnp.int32, GAIN_BLOCK)
    there = (token >= 0) & (token < T)

    def multiply(pairs: Array) -> list[Array]:
        offset = lax.rem(start + token, jnp.int32(GAIN_BLOCK))[:, None]
        turn = load_pairs(means.in_block, (offset,), there[:, None], pairs)
        q = load_pairs(q_ref, (b, token[:, None], n), there[:, None], pairs)
        return multiply_mean(q, load_pairs(means.mean, (kv,), True, pairs), turn)

    def each_step(score: Callable[[Array], Array]) -> None:
        """Store the scores of all blocks that tokens of this program need."""

        @pl.loop(first_step, jnp.minimum(first_step + steps, lax.div(own, jnp.int32(each)) + 1))
        def _step(step: Array) -> None:
            block = step * each + lax.iota(jnp.int32, each)
            needed = ((block <= own) & (block < blocks))[:, None] & there[None]
            plt.store(out_ref.at[b, n, block[:, None], token[None]], score(block), mask=needed)

    @pl.when(own * GAIN_BLOCK >= end)
    def _() -> None:
        each_step(lambda _: jnp.zeros((each, GAIN_BLOCK), jnp.float32))

    @pl.when((own * GAIN_BLOCK < end) & (first_step * each <= own))
    def _() -> None:
        slices = [first + lax.broadcasted_iota(jnp.int32, (1, PAIRS), 1) for first in range(0, half, PAIRS)]
        products = [multiply(pairs) for pairs in slices]
        sizes = [jnp.abs(x).max(1) for x in itertools.chain(*products)]
        largest = jnp.maximum(functools.reduce(jnp.maximum, sizes), SMALLEST)
        parts = [[split_in_two(x * (1 / largest)[:, None]) for x in both] for both in products]

        def score(block: Array) -> Array:
            distance = jnp.clip(own - block, 0, blocks - 1)[:, None]
            found = jnp.zeros((each, GAIN_BLOCK), jnp.float32)
            for pairs, both in zip(slices, parts, strict=True):
                highs, lows = (load_pairs(ref, (distance,), True, pairs) for ref in means.turns)
                for high, low, (first, second) in zip(highs, lows, both, strict=True):
                    for x, y in ((high, first), (high, second), (low, first)):
                        found += _multiply(x, y)
            return found * (scale * largest)[None]

        each_step(score)


def _multiply(x: Array, y: Array) -> Array:
    """Return x yᵀ in float32."""
    contracted = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, y, contracted, preferred_element_type=jnp.float32)
