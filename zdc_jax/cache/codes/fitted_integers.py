"""Integers with a scale fitted to each token, which the method `coded` stores (ours)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import Plane
from kernels_pallas.quantized.encode import SMALLEST, lengthen, reaches_tried
from kernels_pallas.quantized.short_scales import NAN_CODE, from_e5m3
from zdc_jax.axes import Array
from zdc_jax.cache.codes.code import Code, Coded, CodedParts, PackedCode, Split, pack, unpack
from zdc_jax.cache.paging.pages import in_pages, pools_of
from zdc_jax.ops.new_tokens import encode_with_kernel


@dataclass(frozen=True)
class FittedIntegers(PackedCode):
    """Odd multiples of scale/2^bits, from -scale to scale, with the scale of least error for each token.

    The scale is the best of the candidates from `reaches_tried`. Coded: levels uint8 [*batch, 1, C·bits/8],
    where level l stands for (2l + 1 - 2^bits)·scale/2^bits; scale uint8 [*batch, 1, 1], in the 8 bits of
    `from_e5m3`. Zeros decode to zeros, and a token with a non-finite coordinate decodes to NaN.

    The scale of least error shortens vectors, which would make scores and outputs of attention too small. So
    vectors are lengthened first (`lengthen`).

    Fitting the scale compensates for evenly spaced levels, which integer arithmetic needs to compute scores.
    The table shows the mean square error of rotated vectors at 2 to 5 bits without `lengthen`, relative to
    the optimal levels for a Gaussian.

    | coordinates | relative error |
    |---|---|
    | 16 | 0.66 to 0.92 |
    | 64 | 0.97 to 1.00 |
    | 128 | 1.01 to 1.10 |
    """

    bits: int

    def encode(self, x: Array) -> Coded:
        x, half = lengthen(x.astype(jnp.float32), self.bits), 2 ** (self.bits - 1)
        largest = jnp.abs(x).max(-1, keepdims=True)

        def round_to(code: Array) -> tuple[Array, Array]:
            """Return levels and errors; several scales are a leading axis."""
            step = jnp.maximum(from_e5m3(code), SMALLEST) / half
            # Errors are measured in steps, because squares of the coordinates themselves could overflow.
            exact = jnp.abs(x) / step - 0.5
            level = jnp.minimum(jnp.round(exact), half - 1)
            return level, jnp.square(level - exact).sum(-1, keepdims=True) * jnp.square(step)

        bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
        tried = jnp.stack(reaches_tried(bits, self.bits, x.shape[-1]))
        best = jnp.argmin(round_to(tried)[1], axis=0)
        code = jnp.take_along_axis(tried, best[None], axis=0)[0]
        level, _ = round_to(code)
        level = jnp.nan_to_num(level).astype(jnp.int32)
        level = half + jnp.where(x < 0, -1 - level, level)
        code = jnp.where(jnp.isfinite(largest), code, NAN_CODE)
        return pack(level.astype(jnp.uint8), self.bits), code.astype(jnp.uint8)

    def decode(self, coded: Coded, C: int) -> Array:
        levels, scale = coded
        odd = 2 * unpack(levels, self.bits).astype(jnp.float32) + (1 - 2**self.bits)
        return odd * (from_e5m3(scale) / 2**self.bits)


def kernel_planes(stored: Iterable[tuple[Code, Coded]]) -> list[Plane]:
    """Return codes and their arrays [B, K, S, …] of single tokens as planes that kernels read.

    A `Split` is two planes. The result is empty if any code is not supported by kernels.
    """
    planes: list[Plane] = []
    for code, coded in stored:
        if isinstance(code, Split):
            own_planes = kernel_planes(zip((code.first, code.rest), coded, strict=True))
        elif isinstance(code, FittedIntegers):
            levels, scale = coded
            tokens = scale.shape[:3]
            own_planes = [Plane(levels.reshape(*tokens, -1), scale.reshape(tokens), code.bits)]
        else:
            own_planes = []
        if not own_planes:
            return []
        planes += own_planes
    return planes


def put_by_kernel(
    groups: Sequence[tuple[Array, CodedParts]], positions: Array, end: Array
) -> list[list[Coded]] | None:
    """Quantize new tokens and write them into the coded arrays [B, K, S, …], with one kernel.

    Args:
      groups: pairs of tokens [B, T, K, C] and the parts that store their coordinates. The arrays of the parts
        may all be `Pages`.
      positions: positions of the tokens.
      end: position at which padding begins.

    Returns:
      The new arrays of each group, or None if no kernel supports the codes.
    """
    arrays, table = pools_of([[coded for _, coded in stored] for _, stored in groups])
    codes = [[code for code, _ in stored] for _, stored in groups]
    planes = [kernel_planes(zip(*pair, strict=True)) for pair in zip(codes, arrays, strict=True)]
    written = encode_with_kernel([x for x, _ in groups], planes, positions, end, table)
    if written is None:
        return None
    return in_pages([restore_tree(*pair) for pair in zip(arrays, written, strict=True)], table)


def restore_tree(tree: Any, written: Iterable[Plane | Array]) -> Any:
    """Return a tree of the shapes of `tree` with the planes or arrays that kernels wrote."""
    leaves = iter(jax.tree.leaves(list(written)))
    return jax.tree.map(lambda leaf: next(leaves).reshape(leaf.shape), tree)
