"""Quantization of new keys and values into planes of integers, in one launch (ours).

    grid: (B, K, tiles of up to 32 tokens), Triton; 8 warps per program, 1 for single tokens
          no explicit barriers
    each array, each of its planes: load → lengthen → try scales → quantize → pack → store levels and scales

Per token and KV head a plane reads C coordinates and writes C·bits/8 + 1 bytes. A coordinate costs about
2 + bits operations per scale tried: of two scales with 4 or more bits, else of eight.

A program has some tokens of one KV head, and exits if all of them are padding. It finds the scale of each
token in each plane, packs the levels and writes both to the token's slot. Only the new tokens are read and
written. The code is that of `zdc_jax.cache.codes.fitted_integers.FittedIntegers`, which explains it.

JAX plans to drop Pallas' Triton back end. Without it `check_encode` raises, and XLA does the work.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import Shaped
from kernels_pallas.lowering import lower_once
from kernels_pallas.quantized.inputs import Plane, rows_of
from kernels_pallas.quantized.short_scales import E5M3_BIAS, E5M3_SHIFT, NAN_CODE, from_e5m3
from kernels_pallas.triton import byte_places, check_back_end, check_planes, in_pages, pieces, plt

SMALLEST = 2.0**-40
"""Divisor in place of a scale of 0: far below the next scale, and its square is representable."""
INTEGERS = 1.5 * 2**23
"""Constant that, added to a float32 below 2^22, leaves the nearest integer in the lowest bits."""
INFINITE = 0x7F800000
"""Bits of float32 infinity; larger bits are NaN."""
TOKENS = 32
"""Largest number of tokens per program."""
LONGER = {2: 1.0653, 3: 1.0193, 4: 1.0058}
"""Factor on vectors before they are rounded, by bits: (1 - D)^-½ with the distortion D of even levels.

With the scale of least error, rounded vectors have 1 - D of the squared length (docs/decisions/0044).
"""


def check_encode(
    x: Sequence[Shaped],
    planes: Sequence[Sequence[Plane]],
    starts: Shaped,
    ends: Shaped,
    *,
    block_table: Shaped | None = None,
) -> None:
    """Check the arguments of `encode`; errors are those it documents."""
    check_back_end()
    B, T, K, _ = x[0].shape
    lead, _, slots = planes[0][0].reach.shape
    if block_table is not None:
        common.check_table(block_table, B, planes[0][0].reach, 1)
    common.check_sizes(B=B, T=T, K=K, S=slots)
    tokens = max(B, lead) if block_table is None else lead, K, slots
    for i, (array, each) in enumerate(zip(x, planes, strict=True)):
        common.check_floats(f"x[{i}]", array, (B, T, K, sum(plane.width for plane in each)), "B, T, K, C")
        check_planes(f"planes[{i}]", each, tokens)
    common.check_rows(B, starts=starts, ends=ends)


@lower_once("interpret")
@common.checked_by(check_encode)
def encode(
    x: Sequence[Float[Array, "B T K _"]],
    planes: Sequence[Sequence[Plane]],
    starts: Int[Array, " B"],
    ends: Int[Array, " B"],
    *,
    block_table: Int[Array, "B pages"] | None = None,
    interpret: bool = False,
) -> list[list[Plane]]:
    """Quantize the tokens x into slots starts … starts + T - 1 below `ends`; other slots keep their contents.

    Args:
      x: float arrays of new tokens, such as keys and values.
      planes: for each array, the planes of its consecutive coordinates; together they cover the array. They
        may have more sequences than there are tokens, which are left as they are.
      starts: first slot of each sequence, int32.
      ends: end of the slots of each sequence, int32; nothing is written from S on.
      block_table: table of a pool of pages (`Plane`) of any size; tokens with an invalid entry are not
        written.
      interpret: whether to run on any device, slowly.

    Returns:
      The same planes, in the same memory if their arrays are donated.

    Raises:
      ValueError: a shape or dtype is not allowed. Raised before launch, with name and value.
      NotImplementedError: JAX has no Triton back end.
    """
    B, T, K, _ = x[0].shape
    # Interpreted stores write the old value where a mask is false, and padding may share slots with tokens.
    rows = 1 if interpret and block_table is not None else min(TOKENS, pl.next_power_of_2(T))
    before = 1 + len(x) + (block_table is not None)
    _, _, S = rows_of(planes[0][0].reach, block_table)
    span = jnp.stack([starts, jnp.minimum(ends, S)], 1).astype(jnp.int32)
    return pl.pallas_call(
        functools.partial(_kernel, rows=rows),
        out_shape=[jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), planes)],
        grid=(B, K, pl.cdiv(T, rows)),
        input_output_aliases={before + i: i for i in range(len(jax.tree.leaves(planes)))},
        compiler_params=plt.CompilerParams(num_warps=8 if rows > 1 else 1),
        interpret=interpret,
        name="zdc_encode",
    )(span, x, block_table, planes)[0]


def _kernel(span_ref: Any, x_refs: Any, table_ref: Any, _before: Any, out: Any, *, rows: int) -> None:
    # `_before` shares memory with `out`.
    b, kv, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * rows
    start, end = span_ref[b, 0], span_ref[b, 1]
    token = first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    kept = (token < x_refs[0].shape[1]) & (start + token < end)
    lead, slot = b, start + token
    if table_ref is not None:
        lead, slot, there = in_pages(table_ref, b, slot, out[0][0].reach.shape)
        kept &= there

    @pl.when(start + first < end)
    def _() -> None:
        for x_ref, each in zip(x_refs, out, strict=True):
            begin = 0
            for plane in each:
                C = plane.width
                at = [
                    (b, pl.ds(first, rows), kv, pl.ds(jnp.int32(begin + i), width)) for i, width in pieces(C)
                ]
                x = [plt.load(x_ref.at[place], mask=kept, other=0.0).astype(jnp.float32) for place in at]
                levels, reach = coded(x, plane.bits)
                for (i, _), level in zip(pieces(C), levels, strict=True):
                    for place, size, part in packed(level, C, i, plane.bits):
                        byte = place + lax.broadcasted_iota(jnp.int32, (1, size), 1)
                        plt.store(plane.levels.at[lead, kv, slot, byte], part, mask=kept)
                plt.store(plane.reach.at[lead, kv, slot], reach[:, None], mask=kept)
                begin += C


def reaches_tried(largest: Array, bits: int, C: int) -> list[Array]:
    """Return the codes of the scales to try for a token of C coordinates, int32, the largest first.

    These are two, one above and one below the most likely optimum. Below 4 bits, clipping the largest
    coordinates often pays, and eight are tried. With 4 or more bits further scales would lower the error by
    at most 5 % of itself (Gaussian and Student's t vectors).

    Args:
      largest: bits of the largest magnitude of each token as float32, int32.
      bits: bits per level.
      C: coordinates per token.
    """
    offset, count = reach_numbers(bits, C)
    widest = (largest + offset >> E5M3_SHIFT) - E5M3_BIAS
    return [jnp.clip(widest - i, 0, NAN_CODE - 1) for i in range(count)]


def reach_numbers(bits: int, C: int) -> tuple[int, int]:
    """Return what is added to the bits of the largest magnitude for the first scale, and how many are tried.

    Scales are 1/8 of a power of two apart, like codes in the bits of a float.
    """
    above, count = 0.5, 8
    if bits >= 4:
        above, count = min(0.9, 1.83 - math.log2(C) / 3 + 0.45 * (bits - 4)), 2
    return int((1 + above) * (1 << E5M3_SHIFT)), count


def lengthen(x: Array, bits: int) -> Array:
    """Scale vectors up before they are rounded, so that their dequantized values have their length."""
    return x * LONGER[bits] if bits in LONGER else x


def coded(x: Sequence[Array], bits: int) -> tuple[list[Array], Array]:
    """Quantize tokens given as parts [rows, ·] of their coordinates.

    Returns:
      Levels int32 [rows, ·] of each part, and scales uint8 [rows].
    """
    raw = [lax.bitcast_convert_type(lengthen(piece, bits), jnp.int32) for piece in x]
    positive = [piece & 0x7FFFFFFF for piece in raw]
    # Compare as integers: the floating-point maximum on a GPU ignores NaN.
    largest = functools.reduce(jnp.maximum, (piece.max(1, keepdims=True) for piece in positive))
    sizes = [lax.bitcast_convert_type(piece, jnp.float32) for piece in positive]
    half, C = 2 ** (bits - 1), sum(piece.shape[1] for piece in x)

    def tried(code: Array) -> tuple[Array, Array, Array]:
        step = _step(code, half)
        wrong = [_miss(size * (1 / step), half) for size in sizes]
        return sum((each * each).sum(1, keepdims=True) for each in wrong) * (step * step), code, step

    first, *others = map(tried, reaches_tried(largest, bits, C))
    error, code, step = first
    for other in others:
        better = other[0] < error
        error, code, step = (jnp.where(better, a, b) for a, b in zip(other, (error, code, step), strict=True))
    code = jnp.where(largest >= INFINITE, NAN_CODE, code)
    levels = [_levels(*pair, step, half) for pair in zip(raw, sizes, strict=True)]
    return levels, code.astype(jnp.uint8)[:, 0]


def coded_token(x: Array, C: int, bits: int) -> tuple[Array, Array]:
    """Quantize one token of C coordinates; all scales are tried at once, with little code.

    Args:
      x: float32 [width]; the width is a power of two, and from C on there are zeros.
      C: coordinates.
      bits: bits per level.

    Returns:
      Levels int32 [width], and the scale uint8.
    """
    raw, half = lax.bitcast_convert_type(lengthen(x, bits), jnp.int32), 2 ** (bits - 1)
    positive = raw & 0x7FFFFFFF
    largest, size = positive.max(0), lax.bitcast_convert_type(positive, jnp.float32)
    offset, count = reach_numbers(bits, C)
    widest = (largest + offset >> E5M3_SHIFT) - E5M3_BIAS
    step = _step(jnp.clip(widest - lax.iota(jnp.int32, count), 0, NAN_CODE - 1), half)
    wrong = _miss(size[None] * (1 / step)[:, None], half)
    wrong = jnp.where(lax.iota(jnp.int32, x.shape[0])[None] < C, wrong, 0.0)
    best = jnp.argmin((wrong * wrong).sum(1) * (step * step), 0)
    code = jnp.clip(widest - best, 0, NAN_CODE - 1)
    levels = _levels(raw, size, _step(code, half), half)
    return levels, jnp.where(largest >= INFINITE, NAN_CODE, code).astype(jnp.uint8)


def _step(code: Array, half: int) -> Array:
    """Return the difference of neighboring levels for the code of a scale."""
    return jnp.maximum(from_e5m3(code), SMALLEST) / half


def _miss(at: Array, half: int) -> Array:
    """Return the distances, of either sign, of magnitudes `at` in steps from the nearest level.

    Levels n + 1/2 below `half` mirror each other at half / 2. Each reflection there halves their number, and
    a magnitude after the last stays as far from it.
    """
    while half > 1:
        half //= 2
        at = jnp.abs(at - half)
    return at - 0.5


def _levels(raw: Array, size: Array, step: Array, half: int) -> Array:
    """Return levels 0 to 2·half - 1, int32, from the bits and magnitudes of values."""
    at = size * (1 / step)
    integer = jnp.minimum(at + INTEGERS, INTEGERS + (half - 1))
    level = lax.bitcast_convert_type(integer, jnp.int32) - np.float32(INTEGERS).view(np.int32)
    level -= (at < integer - INTEGERS).astype(jnp.int32)
    # Negative values have level -1 - n.
    return (level ^ (raw >> 31)) + half


def packed(level: Array, C: int, begin: int, bits: int) -> Iterator[tuple[int, int, Array]]:
    """Yield the packed bytes of levels […, width] of the coordinates from `begin` on, of C.

    Yields first byte, number of bytes and the bytes for each bit plane. Levels after the last coordinate give
    further bytes, which are padding.
    """
    for plane, place, size in byte_places(C, begin, min(level.shape[-1], C - begin), bits):
        bits -= plane
        part, each = level >> bits, 8 // plane
        level &= 2**bits - 1
        if each > 1:
            parts = part.reshape(*part.shape[:-1], -1, each)
            part = (parts << (plane * lax.broadcasted_iota(jnp.int32, parts.shape, part.ndim))).sum(-1)
        yield place, size, part.astype(jnp.uint8)
