"""Unpacking of levels to bytes, as tensor cores read them (ours).

Levels are packed in planes of 1, 2, 4 or 8 bits (`bit_planes`). A word of four bytes has four coordinates of
one key, or one coordinate of four keys. Which coordinates of a key share a word does not matter, if queries
have the same order: `key_coordinates`.

Integer and logic instructions bind the kernel. A word of a single plane takes at most two of them, of two
planes four.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from kernels_pallas import registers as r
from kernels_pallas.registers import Register, Registers

BITS = (2, 3, 4, 5, 6, 8)


def bit_planes(bits: int) -> tuple[int, ...]:
    """Return the bits of the planes in which levels are packed: powers of two, the highest first."""
    return tuple(1 << i for i in reversed(range(bits.bit_length())) if bits >> i & 1)


def key_coordinates(count: int, bits: int) -> np.ndarray:
    """Return the coordinate of each byte of `key_words`, [words, 4]; `count` or more for those of none."""
    high = bit_planes(bits)[0]
    word, field, byte = np.unravel_index(
        np.arange(-(-count * high // 32) * (8 // high) * 4), (-(-count * high // 32), 8 // high, 4)
    )
    return (word * (32 // high) + byte * (8 // high) + field).reshape(-1, 4)


def key_words(planes: Sequence[Registers], bits: int) -> Iterator[Register]:
    """Unpack consecutive coordinates of one key, loaded as words of each bit plane, word by word."""
    high, *low = bit_planes(bits)
    for number, word in enumerate(planes[0]):
        if not low:
            yield from (_masked(r.shr(word, s) if s else word, high) for s in range(0, 8, high))
            continue
        below = _spread(planes[1], number * (32 // high) * low[0], low[0] * 8 // high)
        for field in range(8 // high):
            up = field * high - low[0]
            moved = r.shr(word, up) if up > 0 else r.shl(word, -up)
            rest = _masked(r.shr(below, field * low[0]) if field else below, low[0])
            yield r.and_or(moved, _mask(high, low[0]), rest)


def value_words(planes: Sequence[Sequence[Registers]], count: int, bits: int) -> Registers:
    """Unpack `count` consecutive coordinates of four keys.

    Args:
      planes: for each bit plane the words of each of four keys.
      count: coordinates.
      bits: bits of a level.

    Returns:
      For each coordinate a word with a byte of each key: its level, times 2 to the power `factor_of`.
    """
    high, *low = bit_planes(bits)
    turned = [[byte for words in zip(*keys, strict=True) for byte in _turned(words)] for keys in planes]
    found = []
    for c in range(count):
        place, begin = factor_of(c, bits), c * high % 8
        word = turned[0][c * high // 8]
        if not low:
            found.append(r.and_(word, _mask(high, place)) if high < 8 else word)
            continue
        below, at = turned[1][c * low[0] // 8], c * low[0] % 8
        moved = r.shl(word, place + low[0] - begin)
        below = r.shr(below, at - place) if at > place else r.shl(below, place - at)
        rest = r.and_(below, _mask(low[0], place))
        found.append(r.and_or(moved, _mask(high, place + low[0]), rest))
    return found


def factor_of(coordinate: int, bits: int) -> int:
    """Return the logarithm to base 2 of the factor of a coordinate in `value_words`.

    It is where the level lies in its byte. High bits of two planes move only if nothing else is below them.
    """
    high, *low = bit_planes(bits)
    begin = coordinate * high % 8
    return max(begin - low[0], 0) if low else begin


def _mask(bits: int, at: int) -> int:
    """Return a mask of `bits` bits from bit `at` on in each byte."""
    return (2**bits - 1 << at) * 0x01010101


def _masked(word: Register, bits: int) -> Register:
    return r.and_(word, _mask(bits, 0)) if bits < 8 else word


def _spread(words: Registers, begin: int, size: int) -> Register:
    """Spread 4·size bits from bit `begin` on: each byte of the result has `size` of them at its lower end."""
    word, byte = words[begin // 32], begin % 32 // 8
    if size == 4:
        apart = r.prmt(word, 0, 0x4040 | (byte + 1) << 8 | byte)
        return r.or_and(apart, r.shl(apart, 4), 0x0F0F0F0F)
    assert size == 2
    apart = r.prmt(word, 0, 0x4440 | byte)
    apart = r.or_and(apart, r.shl(apart, 12), 0x000F000F)
    return r.or_and(apart, r.shl(apart, 6), 0x03030303)


def _turned(words: Sequence[Register]) -> Registers:
    """Transpose four words of four bytes."""
    a, b, c, d = words
    low, high = ([r.prmt(x, y, s) for x, y in ((a, b), (c, d))] for s in (0x5140, 0x7362))
    return [r.prmt(x, y, s) for x, y in (low, high) for s in (0x5410, 0x7632)]
