"""Levels of packed integers as bfloat16 in registers, a few instructions for every two (ours).

A level n of b bits stands for the odd number 2n + 1 - 2^b, which bfloat16 holds exactly for up to eight bits.
The bits of 2n are put into the mantissa of 128, and 127 + 2^b is taken off. Where b is no power of two, high
and low bits of all levels stand apart (`bit_planes`): each put in takes one instruction more.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

BITS = (2, 3, 4, 5, 6, 8)
QUAD = 4
"""Threads that share a row in the layout of wgmma; each has two columns of every eight."""
_OF_128 = 0x43004300
"""Two bfloat16 128."""
_AND_OR = 0xEA
"""lop3: (a & b) | c."""


def bit_planes(bits: int) -> tuple[int, ...]:
    """Bits of the planes that levels of so many bits are packed in, the highest first: powers of two."""
    return tuple(1 << i for i in reversed(range(bits.bit_length())) if bits >> i & 1)


def words_of(C: int, bits: int) -> int:
    """Words of 32 bits that hold a thread's quarter of C coordinates, those of each bit plane its own."""
    return sum(-(-C * plane // QUAD // 32) for plane in bit_planes(bits))


def unpacked(words: Array, C: int, bits: int) -> Array:
    """What `kernels_pallas.rows` reads of rows of C levels, as bfloat16 [M, C] in the layout of wgmma.

    Columns are ordered as `columns` says.
    """
    layout = plgpu.Layout.WGMMA
    out = plgpu.ShapeDtypeStruct((words.shape[0], C), jnp.bfloat16, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def unpack(_: Any, words: Any) -> Any:
        wgmma = layout.to_mgpu()
        registers = np.empty(wgmma.registers_shape(out.shape), dtype=object)
        for half in range(2):
            raw = [
                mgpu.utils.bitcast(word, ir.IntegerType.get_signless(32))
                for word in words.registers[0, :, 0, 0, half, 0, 0, 0, 0]
            ]
            for i, pair in enumerate(_pairs(raw, C // QUAD, bits)):
                two = mgpu.utils.bitcast(pair, ir.VectorType.get((2,), ir.BF16Type.get()))
                registers[0, i, 0, 0, half, 0, 0, 0, 0] = two
        return mgpu.FragmentedArray(_registers=registers, _layout=wgmma, _is_signed=None)

    return unpack(words)


def columns(C: int, bits: int) -> np.ndarray:
    """Which of C coordinates each column of `unpacked` is."""
    unit = _unit(C // QUAD, bits)
    tile, thread, half = np.unravel_index(np.arange(C), (C // 8, QUAD, 2))
    within, pair = np.divmod(tile, unit // 2)
    return thread * (C // QUAD) + within * unit + half * (unit // 2) + pair


def _unit(count: int, bits: int) -> int:
    """Coordinates of a thread that are unpacked together, of `count`: their bits of the highest plane are in
    one word, those of the lower half in its lower 16 bits."""
    highest = bit_planes(bits)[0]
    return math.gcd(count * highest, 32) // highest


def _pairs(words: list[Any], count: int, bits: int) -> Iterator[Any]:
    """Two odd numbers each, of a thread's `count` coordinates: one of the lower half of a unit, one of the
    upper."""
    planes, unit, held = bit_planes(bits), _unit(count, bits), []
    for plane in planes:
        each = -(-count * plane // 32)
        held.append(words[:each])
        words = words[each:]
    for first in range(0, count, unit):
        fields = [
            _halves(of_plane[first * plane // 32], first * plane % 32, unit * plane)
            for of_plane, plane in zip(held, planes, strict=True)
        ]
        for i in range(unit // 2):
            yield _odd([(field, i * plane, plane) for field, plane in zip(fields, planes, strict=True)])


def _halves(word: Any, begin: int, size: int) -> Any:
    """`size` bits of a word from `begin` on: the lower half of them in the lower 16 bits, the upper half in
    the upper; what is above either is anything."""
    if size == 32:
        return word
    if size == 16:
        byte = begin // 8
        return asm(f"prmt.b32 $0, $1, $2, {0x4040 | byte + 1 << 8 | byte};", word, _int(0))
    field = arith.andi(arith.shrui(word, _int(begin)), _int(2**size - 1))
    return arith.ori(field, arith.shli(field, _int(16 - size // 2)))


def _odd(parts: list[tuple[Any, int, int]]) -> Any:
    """Odd numbers as two bfloat16, of levels whose bits stand in words at shifts: word, shift, bits; the
    highest first."""
    bits = sum(part[2] for part in parts)
    if bits == 8:
        # Nibbles high and low: 2n - 255 = 16 (2h - 15) + (2l - 15).
        ((word, shift, _),) = parts
        low, high = (_odd([(word, shift + at, 4)]) for at in (0, 4))
        return asm("fma.rn.bf16x2 $0, $1, $2, $3;", high, _both(16.0), low)
    # 2n must fit into the seven bits of a mantissa.
    raised, place = _int(_OF_128), 1
    for word, shift, count in reversed(parts):
        at = shift - place
        moved = arith.shrui(word, _int(at)) if at > 0 else arith.shli(word, _int(-at))
        mask = (2**count - 1 << place) * 0x10001
        raised = asm(f"lop3.b32 $0, $1, {mask}, $2, {_AND_OR};", moved, raised)
        place += count
    return asm("sub.rn.bf16x2 $0, $1, $2;", raised, _both(127 + 2**bits))


def _both(value: float) -> Any:
    """Two of a number that bfloat16 holds."""
    assert float(np.asarray(value, jnp.bfloat16)) == value
    return _int(int(np.asarray(value, jnp.bfloat16).view(np.uint16)) * 0x10001)


def asm(text: str, *operands: Any) -> Any:
    """One instruction from words of 32 bits to one."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, list(operands), text, "=r" + ",r" * len(operands))


def _int(value: int) -> Any:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))
