"""Unpacking of integers to bfloat16 in registers, with one or two instructions per pair (ours).

A level n of b bits stands for (2n + 1)/2^b - 1. Its bits are inserted into the mantissa of one, from a bit p
on. With the factor f = 2^(8 - p - b), the result v stands for f (v - 1) - (1 - 2^-b): f is a factor on the
other operand or on the result of a product, and the constant is subtracted from sums. Few shifts move all
levels of a word, because `PLACES` gives each its own p.

If b is not a power of two, high and low bits of all levels are stored separately (`bit_planes`), and each
costs one more instruction. Eight bits do not fit into a mantissa: v is 2n - 255, and stands for f v.
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
PLACES = {
    2: (1, 3, 5, 1, 3, 5, 1, 3),
    3: (1, 2, 3, 4, 1, 2, 3, 4),
    4: (3, 3, 3, 3),
    5: (2, 2, 2, 2),
    6: (1, 1, 1, 1),
    8: (8, 8),
}
"""Bit of the mantissa from which the levels of each pair are inserted, by bits per level.

Lower bits need fewer shifts, but sums then lose precision: tensor cores truncate them, and the constant that
is subtracted is up to 43 times the largest level.
"""
_ONE, _OF_128 = 0x3F803F80, 0x43004300
"""Two bfloat16 values 1, and 128."""
_AND_OR, _SELECT = 0xEA, 0xE4
"""Tables of lop3 for (a & b) | c, and for (a & c) | (b & ~c)."""


def bit_planes(bits: int) -> tuple[int, ...]:
    """Return the bits of the planes in which levels are packed: powers of two, the highest first."""
    return tuple(1 << i for i in reversed(range(bits.bit_length())) if bits >> i & 1)


def words_of(C: int, bits: int) -> int:
    """Return the 32-bit words of a thread's quarter of C coordinates; bit planes do not share words."""
    return sum(-(-C * plane // QUAD // 32) for plane in bit_planes(bits))


def unpacked(words: Array, C: int, bits: int) -> Array:
    """Unpack rows of C levels, as loaded by `packed_loads`, to bfloat16 [M, C] in the wgmma layout.

    Columns are in the order of `columns`. The results v stand for f (v - 1) - (1 - 2^-bits), with
    f = `factors`; if bits is 8, for f v.
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
                registers[0, i, 0, 0, half, 0, 0, 0, 0] = _two(pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=wgmma, _is_signed=None)

    return unpack(words)


def filled_rows(M: int, values: np.ndarray) -> Array:
    """Return M equal rows of bfloat16 in the wgmma layout; each eight columns have the same value."""
    layout = plgpu.Layout.WGMMA
    out = plgpu.ShapeDtypeStruct((M, len(values)), jnp.bfloat16, layout=layout)

    @plgpu.inline_mgpu(return_type=out)
    def fill(_: Any) -> Any:
        wgmma = layout.to_mgpu()
        registers = np.empty(wgmma.registers_shape(out.shape), dtype=object)
        for index in np.ndindex(registers.shape):
            registers[index] = _two(_both(float(values[2 * QUAD * index[1]])))
        return mgpu.FragmentedArray(_registers=registers, _layout=wgmma, _is_signed=None)

    return fill()


def to_bfloat16(x: Array) -> Array:
    """Round float32 in the wgmma layout, two values per instruction; the compiler would take two of each."""
    layout = plgpu.Layout.WGMMA
    out = plgpu.ShapeDtypeStruct(x.shape, jnp.bfloat16, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def convert(_: Any, x: Any) -> Any:
        registers, i32 = np.empty_like(x.registers), ir.IntegerType.get_signless(32)
        for index, pair in np.ndenumerate(x.registers):
            high, low = (llvm.extractelement(pair, _int(i)) for i in (1, 0))
            word = llvm.inline_asm(i32, [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")
            registers[index] = _two(word)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return convert(x)


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


def factors(C: int, bits: int) -> np.ndarray:
    """Return the factor of each column of `unpacked`, float32, a power of two."""
    pairs = _unit(C // QUAD, bits) // 2
    exponents = [8 - bits - PLACES[bits][column // (2 * QUAD) % pairs] for column in range(C)]
    return np.exp2(np.array(exponents, np.float32))


def factor_of(column: Array, C: int, bits: int) -> Array:
    """Return the factor of each column, int32, in float32: `factors` without a table in memory."""
    pairs = _unit(C // QUAD, bits) // 2
    table = sum(place << 4 * pair for pair, place in enumerate(PLACES[bits][:pairs]))
    pair = lax.div(column, jnp.int32(2 * QUAD)) & (pairs - 1)
    place = lax.shift_right_logical(jnp.full_like(pair, table), 4 * pair) & 15
    return lax.bitcast_convert_type((127 + 8 - bits - place) << 23, jnp.float32)


def _unit(count: int, bits: int) -> int:
    """Return the number of a thread's `count` coordinates that are unpacked together.

    Their bits of the highest plane are in one word, those of the lower half in its lower 16 bits.
    """
    highest = bit_planes(bits)[0]
    return math.gcd(count * highest, 32) // highest


def _pairs(words: list[Any], count: int, bits: int) -> Iterator[Any]:
    """Yield pairs of numbers of a thread's `count` coordinates, one from each half of a unit."""
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
            parts = [(field, i * plane, plane) for field, plane in zip(fields, planes, strict=True)]
            yield _odd(*parts[0][:2]) if bits == 8 else _inserted(parts, PLACES[bits][i], _ONE)


def _halves(word: Any, begin: int, size: int) -> Any:
    """Extract `size` bits of a word from `begin` on: lower half to the lower 16 bits, upper half above.

    Bits above either half are arbitrary.
    """
    if size == 32:
        return word
    if size == 16:
        byte = begin // 8
        return asm(f"prmt.b32 $0, $1, $2, {0x4040 | byte + 1 << 8 | byte};", word, _int(0))
    low, high = _moved(word, begin), _moved(word, begin + size // 2 - 16)
    return asm(f"lop3.b32 $0, $1, $2, {0xFFFF}, {_SELECT};", low, high)


def _moved(word: Any, by: int) -> Any:
    """Shift a word to the right, or to the left by a negative number of bits."""
    if by == 0:
        return word
    return arith.shrui(word, _int(by)) if by > 0 else arith.shli(word, _int(-by))


def _inserted(parts: list[tuple[Any, int, int]], place: int, onto: int) -> Any:
    """Insert levels into the mantissas of two bfloat16, from bit `place` on.

    `parts` are the word, shift and number of bits of each plane, the highest first.
    """
    raised = _int(onto)
    for word, shift, count in reversed(parts):
        mask = (2**count - 1 << place) * 0x10001
        raised = asm(f"lop3.b32 $0, $1, {mask}, $2, {_AND_OR};", _moved(word, shift - place), raised)
        place += count
    return raised


def _odd(word: Any, shift: int) -> Any:
    """Convert levels of eight bits to odd numbers, from nibbles: 2n - 255 = 16 (2h - 15) + (2l - 15)."""
    low, high = (
        asm("sub.rn.bf16x2 $0, $1, $2;", _inserted([(word, shift + at, 4)], 1, _OF_128), _both(128 + 15))
        for at in (0, 4)
    )
    return asm("fma.rn.bf16x2 $0, $1, $2, $3;", high, _both(16.0), low)


def _two(word: Any) -> Any:
    """View a word as two bfloat16."""
    return mgpu.utils.bitcast(word, ir.VectorType.get((2,), ir.BF16Type.get()))


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
