"""New tokens as a quantized cache stores them, and as attention then reads them, in one launch (ours).

    grid: (B, K, tiles of up to 32 tokens), Triton; 4 warps per program, no explicit barriers

Per token and KV head it reads C coordinates, and writes as many and C·bits/8 + 1 bytes. Operations are those
of `encode`.

A program has some tokens of one KV head. It quantizes them as `encode` does, and writes the
levels, the scale, and the values that they stand for. Nothing else of a cache is read or written.

JAX plans to drop Pallas' Triton back end. Without it `check_round_tokens` raises, and XLA does the work.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt8

from kernels_pallas import common
from kernels_pallas.common import Shaped
from kernels_pallas.lowering import lower_once
from kernels_pallas.quantized.byte_levels import BITS
from kernels_pallas.quantized.encode import coded, packed
from kernels_pallas.quantized.short_scales import from_e5m3
from kernels_pallas.triton import check_back_end, check_bytes, pieces, plt

TOKENS = 32
"""Largest number of tokens per program."""


class Rounded(NamedTuple):
    """Quantized tokens.

    Attributes:
      levels: packed levels of each token, uint8 [B, T, K, C·bits/8].
      reach: scale of each token, uint8 [B, T, K].
      values: what levels and scales stand for, in the dtype of the tokens, [B, T, K, C].
    """

    levels: UInt8[Array, "B T K _"]
    reach: UInt8[Array, "B T K"]
    values: Float[Array, "B T K C"]


def check_round_tokens(x: Sequence[Shaped], bits: int) -> None:
    """Check the arguments of `round_tokens`; errors are those it documents."""
    check_back_end()
    B, T, K, _ = x[0].shape
    common.check_sizes(B=B, T=T, K=K)
    if bits not in BITS:
        raise ValueError(f"{bits=}: must be one of {BITS}")
    for i, array in enumerate(x):
        common.check_floats(f"x[{i}]", array, (B, T, K, None), "B, T, K, C")
        if (C := array.shape[3]) % 16 or not C:
            raise ValueError(f"x[{i}] has {C} coordinates: must be a multiple of 16")
        check_bytes(f"x[{i}]", array)


@lower_once("bits", "interpret")
@common.checked_by(check_round_tokens)
def round_tokens(
    x: Sequence[Float[Array, "B T K _"]], bits: int, *, interpret: bool = False
) -> list[Rounded]:
    """Quantize all coordinates of the tokens x into one plane of `bits` for each array.

    Args:
      x: float arrays of tokens, such as keys and values. Each has a multiple of 16 coordinates.
      bits: bits per level: 2 to 6, or 8.
      interpret: whether to run on any device, slowly.

    Returns:
      The quantized tokens of each array. A token with a coordinate that is not finite has NaN values.

    Raises:
      ValueError: a shape, dtype or number of bits is not allowed. Raised before launch, with name and value.
      NotImplementedError: JAX has no Triton back end.
    """
    B, T, K, _ = x[0].shape
    rows = min(TOKENS, pl.next_power_of_2(T))
    like: Any = jax.ShapeDtypeStruct
    shapes = [
        Rounded(
            like((B, T, K, each.shape[3] * bits // 8), jnp.uint8),
            like((B, T, K), jnp.uint8),
            like(each.shape, each.dtype),
        )
        for each in x
    ]
    return pl.pallas_call(
        functools.partial(_kernel, bits=bits, rows=rows),
        out_shape=[shapes],
        grid=(B, K, pl.cdiv(T, rows)),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="zdc_round_tokens",
    )(x)[0]


def _kernel(x_refs: Sequence[Any], out: Sequence[Any], *, bits: int, rows: int) -> None:
    b, kv, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * rows
    there = first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0) < x_refs[0].shape[1]
    tokens = pl.ds(first, rows)
    for x_ref, (levels_ref, reach_ref, values_ref) in zip(x_refs, out, strict=True):
        C = x_ref.shape[3]

        def place(begin: int, width: int) -> tuple[Any, ...]:
            return b, tokens, kv, pl.ds(jnp.int32(begin), width)

        x = [plt.load(x_ref.at[place(*span)], mask=there, other=0.0) for span in pieces(C)]
        levels, reach = coded([piece.astype(jnp.float32) for piece in x], bits)
        step = (from_e5m3(reach) / 2**bits)[:, None]
        for (begin, width), level in zip(pieces(C), levels, strict=True):
            odd = 2 * level.astype(jnp.float32) + (1 - 2**bits)
            plt.store(values_ref.at[place(begin, width)], (odd * step).astype(values_ref.dtype), mask=there)
            for byte, size, part in packed(level, C, begin, bits):
                plt.store(levels_ref.at[place(byte, size)], part, mask=there)
        plt.store(reach_ref.at[b, tokens, kv], reach, mask=there[:, 0])
