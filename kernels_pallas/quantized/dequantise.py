"""Dequantization of keys and values from planes of integers, for other kernels, in one launch (ours).

    grid: (B, K, tiles of up to 64 tokens), Triton; 4 warps per program, no explicit barriers
    each array, each of its planes: load scales; each part of the coordinates: load levels → unpack → store

A program unpacks the levels of some tokens of one KV head, multiplies them by their scales and writes the
result, or copies sinks. It may add the mean of each block of 64 positions to the first array. Programs
without requested tokens exit. Per token and array the kernel reads C·bits/8 + 1 bytes per plane and writes
2 C or 4 C. A coordinate costs three FLOP, so memory traffic bounds the time. Without means, results are
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
from kernels_pallas.common import GAIN_BLOCK, Shaped
from kernels_pallas.lowering import lower_once
from kernels_pallas.prefill.inputs import LARGEST_BLOCK
from kernels_pallas.quantized.block_means import BlockMeans, check_means
from kernels_pallas.quantized.inputs import Plane, rows_of
from kernels_pallas.quantized.short_scales import from_e5m3
from kernels_pallas.triton import byte_places, check_back_end, check_planes, in_pages, pieces, plt

TOKENS = 64
"""Largest number of tokens per program; it divides `LARGEST_BLOCK`."""
DTYPES = (*common.DTYPES, jnp.float32)


def check_dequantise(
    planes: Sequence[Sequence[Plane]],
    ends: Shaped,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    block_table: Shaped | None = None,
    sinks: int = 0,
    sink_values: Sequence[Shaped] = (),
    means: BlockMeans | None = None,
) -> None:
    """Check the arguments of `dequantise`; errors are those it documents."""
    check_back_end()
    lead, K, slots = (reach := planes[0][0].reach).shape
    common.check_rows(lead if block_table is None else None, ends=ends)
    if block_table is not None:
        common.check_table(block_table, ends.shape[0], reach, 1)
    common.check_sizes(B=ends.shape[0], K=K, S=slots)
    for i, each in enumerate(planes):
        check_planes(f"planes[{i}]", each, (lead, K, slots))
    if jnp.dtype(dtype) not in DTYPES:
        raise ValueError(f"dtype={jnp.dtype(dtype)}: must be bfloat16, float16 or float32")
    if sinks < 0 or (sinks and len(sink_values) != len(planes)):
        raise ValueError(
            f"{sinks=}: must be 0, or above with sink_values for {len(planes)} arrays, not {len(sink_values)}"
        )
    check_means(means, ends.shape[0], K, sum(plane.width for plane in planes[0]))
    for i, (x, each) in enumerate(zip(sink_values, planes, strict=True) if sinks else ()):
        name, width = f"sink_values[{i}]", sum(plane.width for plane in each)
        common.check_shape(name, x, (ends.shape[0], K, None, width), "B, K, P, C")
        if x.dtype != jnp.dtype(dtype) or x.shape[2] < sinks:
            raise ValueError(
                f"{name} has {x.shape[2]} tokens of {x.dtype}: must have {sinks} of {jnp.dtype(dtype)}"
            )


@lower_once("dtype", "sinks", "interpret")
@common.checked_by(check_dequantise)
def dequantise(
    planes: Sequence[Sequence[Plane]],
    ends: Int[Array, " B"],
    *,
    dtype: DTypeLike = jnp.bfloat16,
    block_table: Int[Array, "B pages"] | None = None,
    sinks: int = 0,
    sink_values: Sequence[Float[Array, "B K P _"]] = (),
    means: BlockMeans | None = None,
    interpret: bool = False,
) -> Sequence[Float[Array, "B K S _"]]:
    """Dequantize the tokens in slots below `ends`, followed by zeros as far as prefill reads.

    The zeros end at a multiple of `LARGEST_BLOCK`, or at S. Later slots are not written and have arbitrary
    values.

    Args:
      planes: for each array, such as keys and values, the planes of its consecutive coordinates.
      ends: number of slots of each sequence, int32.
      dtype: dtype of the arrays: bfloat16, float16 or float32.
      block_table: table of a pool of pages (`Plane`) of any size; tokens with an invalid entry are zeros.
      sinks: number of first tokens whose values are those of `sink_values`, not those of their levels.
      sink_values: for each array the values of at least `sinks` tokens, in `dtype`; empty without sinks.
      means: what tokens of the first array gain, sinks too.
      interpret: whether to run on any device, slowly.

    Returns:
      One array per entry of `planes`, rounded once from float32; tokens with a NaN scale are NaN.

    Raises:
      ValueError: a shape or dtype is not allowed. Raised before launch, with name and value.
      NotImplementedError: JAX has no Triton back end.
    """
    reach = planes[0][0].reach
    B, K, S = rows_of(reach, block_table)
    # No program has tokens of two pages, or past S.
    rows = math.gcd(TOKENS, reach.shape[2])
    widths = (sum(plane.width for plane in each) for each in planes)
    return pl.pallas_call(
        functools.partial(_kernel, rows=rows, sinks=sinks),
        out_shape=[jax.ShapeDtypeStruct((B, K, S, width), dtype) for width in widths],
        grid=(B, K, S // rows),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="zdc_dequantise",
    )(ends.astype(jnp.int32), block_table, sink_values if sinks else (), means, planes)


def _kernel(
    ends_ref: Any,
    table_ref: Any,
    sink_refs: Sequence[Any],
    means: BlockMeans | None,
    planes: Sequence[Sequence[Plane]],
    *out_refs: Any,
    rows: int,
    sinks: int,
) -> None:
    b, kv, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * rows
    end = ends_ref[b]

    @pl.when((first & -LARGEST_BLOCK) < end)
    def _() -> None:
        lead, slot = b, first
        token = first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        kept = token < end
        if table_ref is not None:
            lead, slot, there = in_pages(table_ref, b, first, planes[0][0].levels.shape)
            kept &= there
        is_sink = kept & (token < sinks)
        slots = pl.ds(slot, rows)
        for array, (out_ref, each) in enumerate(zip(out_refs, planes, strict=True)):
            begin = 0
            for plane in each:
                C = plane.width
                reach = from_e5m3(plt.load(plane.reach.at[lead, kv, slots], mask=kept[:, 0], other=0))
                step = (reach / 2**plane.bits)[:, None]
                for i, width in pieces(C):
                    level: Any = 0
                    for bits, place, size in byte_places(C, i, width, plane.bits):
                        at = plane.levels.at[lead, kv, slots, pl.ds(jnp.int32(place), size)]
                        level = level << bits | _unpacked(plt.load(at, mask=kept, other=0), bits)
                    odd = 2 * level.astype(jnp.float32) + (1 - 2**plane.bits)
                    values, columns = odd * step, pl.ds(jnp.int32(begin + i), width)
                    if sinks:
                        column = begin + i + lax.broadcasted_iota(jnp.int32, (1, width), 1)
                        at = sink_refs[array].at[b, kv, jnp.minimum(token, sinks - 1), column]
                        sink = plt.load(at, mask=is_sink, other=0).astype(jnp.float32)
                        values = jnp.where(is_sink, sink, values)
                    if means is not None and array == 0:
                        gain = means.load(b, kv, lax.div(first, jnp.int32(GAIN_BLOCK)), columns)
                        values = jnp.where(kept, values + gain[None], 0)
                    plt.store(out_ref.at[b, kv, pl.ds(first, rows), columns], values.astype(out_ref.dtype))
                begin += C


def _unpacked(part: Array, bits: int) -> Array:
    """Unpack the parts int32 [rows, ·] of levels from bytes [rows, ·] of a plane of these bits."""
    part, each = part.astype(jnp.int32), 8 // bits
    if each == 1:
        return part
    apart = lax.broadcast_in_dim(part, (*part.shape, each), (0, 1))
    shifts = bits * lax.broadcasted_iota(jnp.int32, apart.shape, 2)
    return (apart >> shifts & (1 << bits) - 1).reshape(part.shape[0], -1)
