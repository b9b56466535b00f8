"""Scores that each block of 64 positions gains because keys left out their mean, in one launch (ours).

    grid: (tiles of tokens · tiles of blocks, N, B); one program has the tokens of one block of positions, one
          query head, and some blocks. No explicit barriers.

A program multiplies its queries with the mean m, as complex numbers: one for each pair of coordinates of the
rotary embedding. Products are turned from the center of the block to each position. A query head and block
then cost 2 H FLOP, three times over, and 4 bytes of the result. A program reads 4 H bytes per block, and each
query once. A program exits if its blocks all come after its tokens, or if a single token is padding.

For several tokens both factors are sums of two float16 numbers, and three products of these parts are added.
That has 21 bits, nearly as with TensorFloat32, at half of the instructions and of the shared memory. The
products of a token are relative to their largest, so that none exceeds the range of float16.

Scores are relative to the block of the query's own position. So nearly all terms are small, although the mean
is large, and the products of slow coordinates lose no digits. `zdc_jax.ops.shift` explains the mathematics.

JAX plans to drop Pallas' Triton back end. Without it `check_score_blocks` raises, and XLA does the work.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import LOG2_E, Shaped
from kernels_pallas.lowering import lower_once
from kernels_pallas.prefill.inputs import GAIN_BLOCK
from kernels_pallas.quantized.queries import columns_of
from kernels_pallas.triton import check_back_end, plt

BLOCKS = 128
"""Blocks of a program with several tokens."""
PAIRS = 64
"""Pairs of coordinates that such a program multiplies at a time."""
WARPS = 8
"""Warps of such a program."""
BLOCKS_OF_ONE = 64
"""Blocks of a program with a single token."""
SMALLEST = 1e-30
"""Divisor in place of products that are all 0."""
MOST_SCORES = 2**31
"""Largest number of scores, because Triton's offsets have 32 bits."""


@lower_once("scale", "num_heads", "arranged", "interpret")
def score_blocks(
    q: Float[Array, "B T _ H"],
    mean: Float[Array, "K H"],
    in_block: Float[Array, "64 H"],
    turns: Float[Array, "blocks H"],
    starts: Int[Array, " B"],
    *,
    scale: float,
    ends: Int[Array, " B"] | None = None,
    num_heads: int | None = None,
    arranged: bool = False,
    interpret: bool = False,
) -> Float[Array, "B N blocks T"] | Float[Array, "B K blocks columns"]:
    """Return scale · q·m̄ · in_block[t] · turns[d] for each block, d blocks away from that of t.

    Factors are complex: real parts of all pairs come first, then imaginary parts. The real part is returned.

    Args:
      q: queries before the rotary embedding, [B, T, N, H] in a float dtype.
      mean: mean m of the keys before the rotary embedding, float32.
      in_block: turns from the center of a block to each of its positions, float32.
      turns: factors for distances of 0, 1, … blocks, conjugated, float32. Those of distance 0 are zeros.
      starts: position of the first query of each sequence, int32; others follow.
      scale: factor on the scores.
      ends: position at which padding begins, int32; default no padding. Padding may have any finite scores.
      num_heads: number of query heads N, if further heads follow them in `q`.
      arranged: whether to write scores of single queries as gains of the kernel for quantized keys
        (`arrange_gains`).
      interpret: whether to run on any device, slowly.

    Returns:
      The scores in float32. Blocks after the query's own, and all blocks of a single query that is padding,
      are not written and have any values.

    Raises:
      ValueError: a shape or dtype is not allowed. Raised before launch, with name and value.
      NotImplementedError: JAX has no Triton back end.
    """
    check_score_blocks(q, mean, in_block, turns, starts, ends=ends, num_heads=num_heads, arranged=arranged)
    (B, T), N = q.shape[:2], num_heads or q.shape[2]
    K, blocks = mean.shape[0], turns.shape[0]
    shape = (B, K, blocks, columns_of(N // K)) if arranged else (B, N, blocks, T)
    # The first token may be the last of its block.
    tiles = 1 if T == 1 else 1 + pl.cdiv(T - 1, GAIN_BLOCK)
    each = BLOCKS_OF_ONE if T == 1 else BLOCKS
    span = [x.astype(jnp.int32) for x in (starts, starts + T if ends is None else ends)]
    return pl.pallas_call(
        functools.partial(_kernel, N=N, scale=scale, arranged=arranged, each=each),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(tiles * pl.cdiv(blocks, each), N, B),
        compiler_params=plt.CompilerParams(num_warps=4 if T == 1 else WARPS),
        interpret=interpret,
        name="zdc_score_blocks",
    )(span, q, mean, in_block, [turns] if T == 1 else split_in_two(turns))


def split_in_two(x: Float[Array, "..."]) -> list[Array]:
    """Return two float16 arrays whose sum is x to 21 bits, for magnitudes from 2^-13 to 2^15.

    The first has the leading bits of x. XLA could leave out a conversion to float16 and back.
    """
    leading = lax.bitcast_convert_type(x, jnp.int32) & -(1 << 13)
    high = lax.bitcast_convert_type(leading, jnp.float32)
    return [high.astype(jnp.float16), (x - high).astype(jnp.float16)]


def check_score_blocks(
    q: Shaped,
    mean: Shaped,
    in_block: Shaped,
    turns: Shaped,
    starts: Shaped,
    *,
    ends: Shaped | None = None,
    num_heads: int | None = None,
    arranged: bool = False,
) -> None:
    """Check the arguments of `score_blocks`; errors are those it documents."""
    common.check_device()
    check_back_end()
    common.check_shape("q", q, (None,) * 4, "B, T, N, H")
    B, T, heads, H = q.shape
    N = heads if num_heads is None else num_heads
    if not 0 < N <= heads:
        raise ValueError(f"num_heads={num_heads}: must be from 1 to {heads}, the heads of q")
    common.check_shape("mean", mean, (None, H), "K, H")
    common.check_groups(N, mean.shape[0])
    common.check_shape("in_block", in_block, (GAIN_BLOCK, H), f"{GAIN_BLOCK}, H")
    common.check_shape("turns", turns, (None, H), "blocks, H")
    common.check_integers("starts", starts, (B,), "B")
    if ends is not None:
        common.check_integers("ends", ends, (B,), "B")
    common.check_sizes(B=B, T=T, N=N, blocks=turns.shape[0])
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q has dtype {q.dtype}: must be a float dtype")
    for name, x in (("mean", mean), ("in_block", in_block), ("turns", turns)):
        if x.dtype != jnp.float32:
            raise ValueError(f"{name} has dtype {x.dtype}: must be float32")
    if H % 2 or H < 2:
        raise ValueError(f"{H=}: must be a multiple of 2")
    if arranged and T > 1:
        raise ValueError(f"arranged={arranged} with {T} tokens per sequence: must be False")
    K = mean.shape[0]
    columns = K * columns_of(N // K) if arranged else N
    if (count := math.prod((B, T, columns, turns.shape[0]))) > MOST_SCORES:
        raise ValueError(f"B·T·N·blocks = {count}: must be at most 2^31, because Triton has 32-bit offsets")


def _kernel(
    span_refs: Sequence[Any],
    q_ref: Any,
    mean_ref: Any,
    in_block_ref: Any,
    turns_refs: Sequence[Any],
    out_ref: Any,
    *,
    N: int,
    scale: float,
    arranged: bool,
    each: int,
) -> None:
    T = q_ref.shape[1]
    blocks, H = turns_refs[0].shape
    half, groups = H // 2, N // mean_ref.shape[0]
    n, b = pl.program_id(1), pl.program_id(2)
    kv, across = lax.div(n, jnp.int32(groups)), jnp.int32(pl.cdiv(blocks, each))
    tile, first_block = lax.div(pl.program_id(0), across), lax.rem(pl.program_id(0), across) * each
    start, end = (ref[b] for ref in span_refs)
    own = lax.div(start, jnp.int32(GAIN_BLOCK)) + tile
    block = first_block + lax.iota(jnp.int32, each)
    distance = jnp.clip(own - block, 0, blocks - 1)[:, None]

    def load_pairs(ref: Any, rows: tuple[Any, ...], there: Any, pairs: Array) -> list[Array]:
        """Load the real and the imaginary parts of rows, [rows, pairs] each."""
        mask = there & (pairs < half)
        return [plt.load(ref.at[*rows, pairs + i * half], mask=mask, other=0.0) for i in (0, 1)]

    def load_turns(ref: Any, pairs: Array) -> list[Array]:
        return load_pairs(ref, (distance,), (block < blocks)[:, None], pairs)

    def multiply(token: Array, there: Any, pairs: Array) -> list[Array]:
        """Return the products of queries with the mean, at their positions in the block, in float32."""
        offset = lax.rem(start + token, jnp.int32(GAIN_BLOCK))
        (cos, sin), (m1, m2) = (
            load_pairs(in_block_ref, (offset,), there, pairs),
            load_pairs(mean_ref, (kv,), True, pairs),
        )
        q1, q2 = (x.astype(jnp.float32) for x in load_pairs(q_ref, (b, token, n), there, pairs))
        real, imaginary = q1 * m1 + q2 * m2, q2 * m1 - q1 * m2
        return [real * cos - imaginary * sin, imaginary * cos + real * sin]

    if T == 1:
        member, count = lax.rem(n, jnp.int32(groups)), out_ref.shape[-1]

        def store(score: Array) -> None:
            if not arranged:
                plt.store(out_ref.at[b, n, block, 0], score, mask=block < blocks)
                return
            plt.store(out_ref.at[b, kv, block, member], score * LOG2_E, mask=block < blocks)
            for column in range(groups, count, groups):  # Missing heads get zeros.
                mask = (block < blocks) & (member + column < count)
                plt.store(out_ref.at[b, kv, block, member + column], jnp.zeros_like(score), mask=mask)

        @pl.when((first_block <= own) & (start < end))
        def _() -> None:
            pairs = lax.broadcasted_iota(jnp.int32, (1, max(16, pl.next_power_of_2(half))), 1)
            products = multiply(jnp.zeros((1, 1), jnp.int32), True, pairs)
            of_blocks = load_turns(turns_refs[0], pairs)
            parts = ((x * y).sum(1) for x, y in zip(of_blocks, products, strict=True))
            store(scale * functools.reduce(jnp.add, parts))

        return
    token = own * GAIN_BLOCK - start + lax.iota(jnp.int32, GAIN_BLOCK)
    there = (token >= 0) & (token < T)

    def store_all(scores: Array) -> None:
        needed = ((block <= own) & (block < blocks))[:, None] & there[None]
        plt.store(out_ref.at[b, n, block[:, None], token[None]], scores, mask=needed)

    @pl.when((first_block <= own) & (own * GAIN_BLOCK >= end))
    def _() -> None:
        store_all(jnp.zeros((each, GAIN_BLOCK), jnp.float32))

    @pl.when((first_block <= own) & (own * GAIN_BLOCK < end))
    def _() -> None:
        slices = [first + lax.broadcasted_iota(jnp.int32, (1, PAIRS), 1) for first in range(0, half, PAIRS)]
        products = [multiply(token[:, None], there[:, None], pairs) for pairs in slices]
        sizes = [jnp.abs(x).max(1) for x in itertools.chain(*products)]
        largest = jnp.maximum(functools.reduce(jnp.maximum, sizes), SMALLEST)
        score = jnp.zeros((each, GAIN_BLOCK), jnp.float32)
        for pairs, both in zip(slices, products, strict=True):
            highs, lows = (load_turns(ref, pairs) for ref in turns_refs)
            for high, low, product in zip(highs, lows, both, strict=True):
                first, second = split_in_two(product * (1 / largest)[:, None])
                for x, y in ((high, first), (high, second), (low, first)):
                    score += _multiply(x, y)
        store_all(score * (scale * largest)[None])


def _multiply(x: Array, y: Array) -> Array:
    """Return x yᵀ in float32."""
    contracted = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, y, contracted, preferred_element_type=jnp.float32)
