"""Dequantization of keys and values from planes of integers, for other kernels, in one launch (ours).

    grid: (B, K, tiles of up to 64 tokens), Triton; 4 warps per program, no explicit barriers
    each array, each of its planes: load scales; each part of the coordinates: load levels → unpack → store

A program unpacks the levels of some tokens of one KV head, multiplies them by their scales and writes the
result. Programs without requested tokens exit. Per token and array the kernel reads C·bits/8 + 1 bytes per
plane and writes 2 C or 4 C. A coordinate costs three FLOP, so memory traffic bounds the time. Results are
bitwise those of `FittedIntegers`.

JAX plans to drop Pallas' Triton back end. Without it `check_dequantise` raises, and XLA does the work.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import Shaped
from kernels_pallas.lowering import lower_once
from kernels_pallas.prefill.inputs import LARGEST_BLOCK
from kernels_pallas.quantized.inputs import Arrays, Bits, Plane, check_plane, rows_of
from kernels_pallas.quantized.short_scales import from_e5m3
from kernels_pallas.triton import byte_places, check_back_end, check_offsets, in_pages, pieces, plt

TOKENS = 64
"""Largest number of tokens per program; it divides `LARGEST_BLOCK`."""
DTYPES = (*common.DTYPES, jnp.float32)


def dequantise(
    planes: Sequence[Sequence[Plane]],
    ends: Int[Array, " B"],
    *,
    dtype: DTypeLike = jnp.bfloat16,
    block_table: Int[Array, "B pages"] | None = None,
    interpret: bool = False,
) -> list[Float[Array, "B K S _"]]:
    """Dequantize the tokens in slots below `ends`, followed by zeros as far as prefill reads.

    The zeros end at a multiple of `LARGEST_BLOCK`, or at S. Later slots are not written and have arbitrary
    values.

    Args:
      planes: for each array, such as keys and values, the planes of its consecutive coordinates.
      ends: number of slots of each sequence, int32.
      dtype: dtype of the arrays: bfloat16, float16 or float32.
      block_table: table of a pool of pages (`Plane`) of any size; tokens with an invalid entry are zeros.
      interpret: whether to run on any device, slowly.

    Returns:
      One array per entry of `planes`, rounded once from float32; tokens with a NaN scale are NaN.

    Raises:
      ValueError: a shape or dtype is not allowed. Raised before launch, with name and value.
      NotImplementedError: JAX has no Triton back end.
    """
    check_dequantise(planes, ends, dtype=dtype, block_table=block_table)
    arrays = [[plane.arrays for plane in each] for each in planes]
    bits = tuple(tuple(plane.bits for plane in each) for each in planes)
    widths = tuple(sum(plane.width for plane in each) for each in planes)
    dtype = jnp.dtype(dtype)
    found = _launch(arrays, ends, block_table, bits=bits, widths=widths, dtype=dtype, interpret=interpret)
    return list(found)


def check_dequantise(
    planes: Sequence[Sequence[Plane]],
    ends: Shaped,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    block_table: Shaped | None = None,
) -> None:
    """Check the arguments of `dequantise`; errors are those it documents."""
    common.check_device()
    check_back_end()
    lead, K, slots = (reach := planes[0][0].reach).shape
    common.check_integers("ends", ends, (lead if block_table is None else None,), "B")
    if block_table is not None:
        common.check_table(block_table, ends.shape[0], reach, 1)
    common.check_sizes(B=ends.shape[0], K=K, S=slots)
    for i, each in enumerate(planes):
        for j, plane in enumerate(each):
            check_plane(f"planes[{i}][{j}]", plane, (lead, K, slots))
            check_offsets(f"planes[{i}][{j}]", plane)
    if jnp.dtype(dtype) not in DTYPES:
        raise ValueError(f"dtype={jnp.dtype(dtype)}: must be bfloat16, float16 or float32")


@lower_once("bits", "widths", "dtype", "interpret")
def _launch(
    arrays: Sequence[Sequence[Arrays]],
    ends: Array,
    block_table: Array | None,
    *,
    bits: Bits,
    widths: tuple[int, ...],
    dtype: Any,
    interpret: bool,
) -> Sequence[Array]:
    """Launch `dequantise` on checked arguments; `arrays` are those of all planes."""
    reach = arrays[0][0].reach
    B, K, S = rows_of(reach, block_table)
    # No program has tokens of two pages, or past S.
    rows = math.gcd(TOKENS, reach.shape[2])
    return pl.pallas_call(
        functools.partial(_kernel, bits=bits, rows=rows),
        out_shape=[jax.ShapeDtypeStruct((B, K, S, width), dtype) for width in widths],
        grid=(B, K, S // rows),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="zdc_dequantise",
    )(ends.astype(jnp.int32), block_table, arrays)


def _kernel(ends_ref: Any, table_ref: Any, arrays: Any, *out_refs: Any, bits: Bits, rows: int) -> None:
    b, kv, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * rows
    end = ends_ref[b]

    @pl.when((first & -LARGEST_BLOCK) < end)
    def _() -> None:
        lead, slot = b, first
        kept = first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0) < end
        if table_ref is not None:
            lead, slot, there = in_pages(table_ref, b, first, arrays[0][0].levels.shape)
            kept &= there
        slots = pl.ds(slot, rows)
        for out_ref, each, each_bits in zip(out_refs, arrays, bits, strict=True):
            begin = 0
            for (levels_ref, reach_ref), plane_bits in zip(each, each_bits, strict=True):
                C = levels_ref.shape[-1] * 8 // plane_bits
                reach = from_e5m3(plt.load(reach_ref.at[lead, kv, slots], mask=kept[:, 0], other=0))
                step = (reach / 2**plane_bits)[:, None]
                for i, width in pieces(C):
                    level: Any = 0
                    for plane, place, size in byte_places(C, i, width, plane_bits):
                        at = levels_ref.at[lead, kv, slots, pl.ds(jnp.int32(place), size)]
                        level = level << plane | _unpacked(plt.load(at, mask=kept, other=0), plane)
                    odd = 2 * level.astype(jnp.float32) + (1 - 2**plane_bits)
                    written = pl.ds(first, rows), pl.ds(jnp.int32(begin + i), width)
                    plt.store(out_ref.at[b, kv, *written], (odd * step).astype(out_ref.dtype))
                begin += C


def _unpacked(part: Array, plane: int) -> Array:
    """Unpack the parts int32 [rows, ·] of levels from bytes [rows, ·] of a bit plane."""
    part, each = part.astype(jnp.int32), 8 // plane
    if each == 1:
        return part
    apart = lax.broadcast_in_dim(part, (*part.shape, each), (0, 1))
    shifts = plane * lax.broadcasted_iota(jnp.int32, apart.shape, 2)
    return (apart >> shifts & (1 << plane) - 1).reshape(part.shape[0], -1)
