"""Scores that each block of 64 positions gains because keys left out their mean, in one launch (ours).

    grid: (tiles of tokens · tiles of blocks, N, B); one program has the tokens of one block of positions

A query head and block cost 2 H FLOP, as products of three TensorFloat32 parts, and 4 bytes of the result. A
program whose blocks all come after its tokens exits.

Scores are relative to the block of the query's own position. So nearly all terms are small, although the mean
is large, and the products of slow coordinates lose no digits. `zdc_jax.ops.shift` explains the mathematics.

JAX plans to drop Pallas' Triton back end. Without it `check_score_blocks` raises, and XLA does the work.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import Shaped
from kernels_pallas.prefill_inputs import GAIN_BLOCK
from kernels_pallas.triton import check_back_end, plt

BLOCKS = 64
"""Blocks of a program."""
MOST_SCORES = 2**31
"""Largest number of scores, because Triton's offsets have 32 bits."""
EXACT = lax.DotAlgorithmPreset.TF32_TF32_F32_X3


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def score_blocks(
    products: Float[Array, "B T N H"],
    turns: Float[Array, "blocks H"],
    starts: Int[Array, " B"],
    *,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "B N blocks T"]:
    """Return scale · products[t] · turns[d] for each block, where d is its distance from the block of t.

    Args:
      products: for each pair of coordinates the real parts, then the imaginary parts, float32.
      turns: factors of the products for distances of 0, 1, … blocks, float32. Those of distance 0 are zeros.
      starts: position of the first query of each sequence, int32; others follow.
      scale: factor on the scores.
      interpret: whether to run on any device, slowly.

    Returns:
      The scores in float32. For single queries, blocks after the query's own have zeros; else, they have any
      values.

    Raises:
      ValueError: a shape or dtype is not allowed. Raised before launch, with name and value.
      NotImplementedError: JAX has no Triton back end.
    """
    check_score_blocks(products, turns, starts)
    B, T, N, _ = products.shape
    blocks = turns.shape[0]
    # The first token may be the last of its block.
    tiles = 1 if T == 1 else 1 + pl.cdiv(T - 1, GAIN_BLOCK)
    precision = lax.Precision.HIGHEST if interpret else EXACT
    return pl.pallas_call(
        functools.partial(_kernel, scale=scale, T=T, precision=precision),
        out_shape=jax.ShapeDtypeStruct((B, N, blocks, T), jnp.float32),
        grid=(tiles * pl.cdiv(blocks, BLOCKS), N, B),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="zdc_score_blocks",
    )(starts.astype(jnp.int32), products, turns)


def check_score_blocks(products: Shaped, turns: Shaped, starts: Shaped) -> None:
    """Check the arguments of `score_blocks`; errors are those it documents."""
    common.check_device()
    check_back_end()
    common.check_shape("products", products, (None,) * 4, "B, T, N, H")
    B, T, N, H = products.shape
    common.check_shape("turns", turns, (None, H), "blocks, H")
    common.check_integers("starts", starts, (B,), "B")
    common.check_sizes(B=B, T=T, N=N, blocks=turns.shape[0])
    for name, x in (("products", products), ("turns", turns)):
        if x.dtype != jnp.float32:
            raise ValueError(f"{name} has dtype {x.dtype}: must be float32")
    if H % 2 or H < 2:
        raise ValueError(f"{H=}: must be a multiple of 2")
    if (count := math.prod((B, T, N, turns.shape[0]))) > MOST_SCORES:
        raise ValueError(f"B·T·N·blocks = {count}: must be at most 2^31, because Triton has 32-bit offsets")


def _kernel(
    starts_ref: Any, products_ref: Any, turns_ref: Any, out_ref: Any, *, scale: float, T: int, precision: Any
) -> None:
    blocks, H = turns_ref.shape
    half, padded = H // 2, max(16, pl.next_power_of_2(H // 2))
    n, b = pl.program_id(1), pl.program_id(2)
    across = jnp.int32(pl.cdiv(blocks, BLOCKS))
    tile, first_block = lax.div(pl.program_id(0), across), lax.rem(pl.program_id(0), across) * BLOCKS
    start = starts_ref[b]
    own = lax.div(start, jnp.int32(GAIN_BLOCK)) + tile
    block = first_block + lax.iota(jnp.int32, BLOCKS)
    distance = jnp.clip(own - block, 0, blocks - 1)
    columns = lax.broadcasted_iota(jnp.int32, (1, padded), 1)

    def load_pair(ref: Any, rows: tuple[Any, ...], there: Array) -> list[Array]:
        """Load the real and the imaginary parts of rows, [rows, padded] each."""
        mask = there & (columns < half)
        return [plt.load(ref.at[*rows, columns + i * half], mask=mask, other=0.0) for i in (0, 1)]

    def turns() -> list[Array]:
        return load_pair(turns_ref, (distance[:, None],), (block < blocks)[:, None])

    if T == 1:
        parts = zip(turns(), load_pair(products_ref, (b, 0, n), columns >= 0), strict=True)
        score = functools.reduce(jnp.add, ((turn * product).sum(1) for turn, product in parts))
        plt.store(out_ref.at[b, n, block, 0], scale * score, mask=block < blocks)
        return
    token = own * GAIN_BLOCK - start + lax.iota(jnp.int32, GAIN_BLOCK)
    there = (token >= 0) & (token < T)

    @pl.when(first_block <= own)
    def _() -> None:
        parts = zip(turns(), load_pair(products_ref, (b, token[:, None], n), there[:, None]), strict=True)
        score = functools.reduce(
            jnp.add,
            (
                lax.dot_general(turn, product, (((1,), (1,)), ((), ())), precision=precision)
                for turn, product in parts
            ),
        )
        mask = (block < blocks)[:, None] & there[None]
        plt.store(out_ref.at[b, n, block[:, None], token[None]], scale * score, mask=mask)
