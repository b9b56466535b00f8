"""Unpacking of integers to bfloat16 in registers, with a few instructions per pair (ours).

A level n of b bits stands for the odd number 2n + 1 - 2^b, which bfloat16 represents exactly up to eight
bits. The bits of 2n are inserted into the mantissa of 128, and 127 + 2^b is subtracted. If b is not a power
of two, high and low bits of all levels are stored separately (`bit_planes`). Single low bits are joined with
the high bits of several levels at once.

Integer and logic instructions bind the kernel that unpacks in its inner loop: they have half the rate of
others. Multiplications, and shifts to the left, which compile to multiplications, run at the same time.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

BITS = (2, 3, 4, 5, 6, 8)
QUAD = 4
"""Threads that share a row in the wgmma layout; each has two columns of every eight."""
_OF_128 = 0x43004300
"""Two bfloat16 values 128."""
_AND_OR, _OR_AND, _SELECT = 0xEA, 0xA8, 0xE4
"""Tables of lop3 for (a & b) | c, (a | b) & c, and (a & c) | (b & ~c)."""


def bit_planes(bits: int) -> tuple[int, ...]:
    """Return the bits of the planes in which levels are packed: powers of two, the highest first."""
    return tuple(1 << i for i in reversed(range(bits.bit_length())) if bits >> i & 1)


def words_of(C: int, bits: int) -> int:
    """Return the 32-bit words of a thread's quarter of C coordinates; bit planes do not share words."""
    return sum(-(-C * plane // QUAD // 32) for plane in bit_planes(bits))


def unpacked(words: Array, C: int, bits: int) -> Array:
    """Unpack rows of C levels, as loaded by `packed_loads`, to bfloat16 [M, C] in the wgmma layout.

    Columns are in the order of `columns`.
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
    """Return the coordinate of each column of `unpacked`."""
    unit = _unit(C // QUAD, bits)
    tile, thread, half = np.unravel_index(np.arange(C), (C // 8, QUAD, 2))
    within, pair = np.divmod(tile, unit // 2)
    return thread * (C // QUAD) + within * unit + half * (unit // 2) + pair


def column_of(coordinate: Array, C: int, bits: int) -> Array:
    """Return the column of each coordinate, int32, in `unpacked`; the inverse of `columns`."""
    count = C // QUAD
    unit = _unit(count, bits)
    thread, rest = lax.div(coordinate, jnp.int32(count)), lax.rem(coordinate, jnp.int32(count))
    within, rest = lax.div(rest, jnp.int32(unit)), lax.rem(rest, jnp.int32(unit))
    half, pair = lax.div(rest, jnp.int32(unit // 2)), lax.rem(rest, jnp.int32(unit // 2))
    return (within * (unit // 2) + pair) * (2 * QUAD) + thread * 2 + half


def _unit(count: int, bits: int) -> int:
    """Return the number of a thread's `count` coordinates that are unpacked together.

    Their bits of the highest plane are in one word, those of the lower half in its lower 16 bits.
    """
    highest = bit_planes(bits)[0]
    return math.gcd(count * highest, 32) // highest


def _pairs(words: list[Any], count: int, bits: int) -> Iterator[Any]:
    """Yield pairs of odd numbers of a thread's `count` coordinates, one from each half of a unit."""
    planes, unit, held = bit_planes(bits), _unit(count, bits), []
    for plane in planes:
        each = -(-count * plane // 32)
        held.append(words[:each])
        words = words[each:]
    for first in range(0, count, unit):
        at = [
            (of_plane[first * plane // 32], first * plane % 32)
            for of_plane, plane in zip(held, planes, strict=True)
        ]
        if bits in (3, 5):
            high, low = at
            yield from _joined_pairs(high, low, unit, bits)
            continue
        fields = [_halves(*each, unit * plane) for each, plane in zip(at, planes, strict=True)]
        for i in range(unit // 2):
            yield _odd([(field, i * plane, plane) for field, plane in zip(fields, planes, strict=True)])


def _joined_pairs(highs: tuple[Any, int], lows: tuple[Any, int], unit: int, bits: int) -> Iterator[Any]:
    """Yield the pairs of a unit of levels with a plane of single low bits.

    High bits and low bits of all even levels of each half, and of all odd ones, are joined by one instruction
    each. A level then takes one more to extract, instead of one for each plane.

    Args:
      highs: word of the plane of high bits, and the first bit of the unit.
      lows: those of the plane of low bits.
      unit: levels of the unit.
      bits: bits of a level.
    """
    plane, count = bits - 1, unit // 2
    high, low = _halves(*highs, unit * plane), _low_bits(*lows, count)
    if plane == 2:
        # Every four bits have the high bits of an even level and of an odd one. Low bits move below them:
        # bits 0 and 1 of every four are those of the even and of the odd level.
        if count > 4:
            low = asm(f"lop3.b32 $0, $1, $2, {0x0F0F0F0F}, {_OR_AND};", low, _shifted_left(low, 4))
        if count > 2:
            low = arith.ori(low, _shifted_left(low, 2))
        pairs = (_shifted_left(high, 2), _shifted_left(low, 1)), (high, low)
        above, apart = 0xCCCCCCCC, 4
    else:
        # Every eight bits have those of an even level and of an odd one. They move to bits 2 to 5, and the
        # low bits of levels 0 and 2, or of 1 and 3, to bits 1 and 9.
        pairs = (
            (_shifted_left(high, 2), arith.muli(low, _int(1 << 1 | 1 << 7))),
            (arith.shrui(high, _int(2)), arith.muli(low, _int(1 << 0 | 1 << 6))),
        )
        above, apart = 0x3C3C3C3C, 8
    joined = [asm(f"lop3.b32 $0, $1, $2, {above}, {_SELECT};", *pair) for pair in pairs]
    for i in range(count):
        yield _odd([(joined[i % 2], apart * (i // 2) + 1, bits)])


def _low_bits(word: Any, begin: int, count: int) -> Any:
    """Extract `count` bits of a word from `begin` on to the lower half, and the next ones to the upper half.

    All other bits are zeros. Up to eight bits belong to each half.
    """
    if count == 8:
        return _halves(word, begin, 16)
    mask = 2**count - 1
    if count == 4:
        word = asm(f"prmt.b32 $0, $1, $2, {0x4440 | begin // 8};", word, _int(0))
    else:
        word = arith.andi(arith.shrui(word, _int(begin)), _int(2 ** (2 * count) - 1))
    return asm(f"lop3.b32 $0, $1, $2, {mask * 0x10001}, {_OR_AND};", word, _shifted_left(word, 16 - count))


def _shifted_left(word: Any, by: int) -> Any:
    return arith.shli(word, _int(by))


def _halves(word: Any, begin: int, size: int) -> Any:
    """Extract `size` bits of a word from `begin` on: lower half to the lower 16 bits, upper half above.

    Bits above either half are arbitrary.
    """
    if size == 32:
        return word
    if size == 16:
        byte = begin // 8
        return asm(f"prmt.b32 $0, $1, $2, {0x4040 | byte + 1 << 8 | byte};", word, _int(0))
    field = arith.andi(arith.shrui(word, _int(begin)), _int(2**size - 1))
    return arith.ori(field, arith.shli(field, _int(16 - size // 2)))


def _odd(parts: list[tuple[Any, int, int]]) -> Any:
    """Convert levels to odd numbers, as two bfloat16.

    `parts` are the word, shift and number of bits of each plane, the highest first.
    """
    bits = sum(part[2] for part in parts)
    if bits == 8:
        # From high and low nibbles: 2n - 255 = 16 (2h - 15) + (2l - 15).
        ((word, shift, _),) = parts
        low, high = (_odd([(word, shift + at, 4)]) for at in (0, 4))
        return asm("fma.rn.bf16x2 $0, $1, $2, $3;", high, _both(16.0), low)
    # 2n fits into the seven bits of a mantissa.
    raised, place = _int(_OF_128), 1
    for word, shift, count in reversed(parts):
        at = shift - place
        moved = arith.shrui(word, _int(at)) if at > 0 else arith.shli(word, _int(-at))
        mask = (2**count - 1 << place) * 0x10001
        raised = asm(f"lop3.b32 $0, $1, {mask}, $2, {_AND_OR};", moved, raised)
        place += count
    return asm("sub.rn.bf16x2 $0, $1, $2;", raised, _both(127 + 2**bits))


def _both(value: float) -> Any:
    """Return a value that bfloat16 represents exactly, twice in one word."""
    assert float(np.asarray(value, jnp.bfloat16)) == value
    return _int(int(np.asarray(value, jnp.bfloat16).view(np.uint16)) * 0x10001)


def asm(text: str, *operands: Any) -> Any:
    """Emit one instruction on 32-bit words with a 32-bit result."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, list(operands), text, "=r" + ",r" * len(operands))


def _int(value: int) -> Any:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))
