"""Levels of packed integers as bfloat16 in registers, a few instructions for every two (ours).

A level n of b bits stands for the odd number 2n + 1 - 2^b, which bfloat16 holds exactly for up to eight bits.
The bits of 2n are put into the mantissa of 128, and 127 + 2^b is taken off.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

BITS = (2, 4, 8)
WORD = 16
"""Bits of a word: levels of consecutive coordinates, the first lowest."""
NAN_CODE = 255
"""Of a reach: the token holds what is no number."""
E5M3_BIAS, E5M3_SHIFT = (127 - 16) << 3, 20
"""From the 8 bits of a reach to those of float32: exponent and three bits of 2^-16, bits that are dropped."""
_OF_128 = 0x43004300
"""Two bfloat16 128."""
_AND_OR = 0xEA
"""lop3: (a & b) | c."""


def unpacked(words: Array, bits: int) -> Array:
    """uint16 [M, W] in the layout of wgmma as bfloat16 [M, W · 16/bits], coordinates ordered as `columns`."""
    M, W = words.shape
    layout = plgpu.Layout.WGMMA
    out = plgpu.ShapeDtypeStruct((M, W * WORD // bits), jnp.bfloat16, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def unpack(_: Any, words: Any) -> Any:
        planes = []
        for shift in range(0, WORD, bits):
            plane = np.empty_like(words.registers)
            for index, register in np.ndenumerate(words.registers):
                plane[index] = _halves(register, shift, bits)
            planes.append(plane)
        # The second axis of registers counts tiles of eight columns.
        return mgpu.FragmentedArray(
            _registers=np.concatenate(planes, axis=1), _layout=words.layout, _is_signed=None
        )

    return unpack(words)


def columns(C: int, bits: int, word: np.ndarray | None = None) -> np.ndarray:
    """Which of C coordinates each column of `unpacked` is: those of a word stand C·bits/16 columns apart.

    word: which word each column of words is, where they do not stand in order.
    """
    each = WORD // bits
    word = np.arange(C // each) if word is None else word
    return (np.arange(each)[:, None] + word * each).reshape(-1)


def words(packed: Array) -> Array:
    """Bytes [..., P] as words [..., P/2], little end first: the same memory."""
    return jax.lax.bitcast_convert_type(packed.reshape(*packed.shape[:-1], -1, 2), jnp.uint16)


def reaches(codes: Array) -> Array:
    """float32 of a plane's reaches, uint8 in e5m3 (`zdc_jax.cache.short_scales`)."""
    codes = codes.astype(jnp.int32)
    size = jax.lax.bitcast_convert_type((codes + E5M3_BIAS) << E5M3_SHIFT, jnp.float32)
    return jnp.where(codes == 0, 0.0, jnp.where(codes == NAN_CODE, jnp.nan, size))


def _halves(register: Any, shift: int, bits: int) -> Any:
    """Odd numbers of the levels at `shift` of two words."""
    two = mgpu.utils.bitcast(register, ir.IntegerType.get_signless(32))
    if bits == 8:
        # Nibbles high and low: 2n - 255 = 16 (2h - 15) + (2l - 15).
        low, high = (_odd(two, shift + at, 4) for at in (0, 4))
        found = _asm("fma.rn.bf16x2 $0, $1, $2, $3;", high, _both(16.0), low)
    else:
        found = _odd(two, shift, bits)
    return mgpu.utils.bitcast(found, ir.VectorType.get((2,), ir.BF16Type.get()))


def _odd(two: Any, shift: int, bits: int) -> Any:
    """`_halves` of at most four bits, for 2n must fit into the seven bits of a mantissa."""
    i32 = ir.IntegerType.get_signless(32)
    at_one = (
        arith.shrui(two, mgpu.utils.c(shift - 1, i32)) if shift else arith.shli(two, mgpu.utils.c(1, i32))
    )
    mask = (2**bits - 1 << 1) * 0x10001
    raised = _asm(f"lop3.b32 $0, $1, {mask}, {_OF_128}, {_AND_OR};", at_one)
    return _asm("sub.rn.bf16x2 $0, $1, $2;", raised, _both(127 + 2**bits))


def _both(value: float) -> Any:
    """Two of a number that bfloat16 holds."""
    assert float(np.asarray(value, jnp.bfloat16)) == value
    bits = int(np.asarray(value, jnp.bfloat16).view(np.uint16))
    return mgpu.utils.c(bits * 0x10001, ir.IntegerType.get_signless(32))


def _asm(text: str, *operands: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, list(operands), text, "=r" + ",r" * len(operands))
