"""Unpacking of levels to bytes, as tensor cores read them (ours).

Levels are packed in planes of 1, 2, 4 or 8 bits (`bit_planes`). A word of four bytes has four coordinates of
one key, or one coordinate of four keys. Which coordinates of a key share a word does not matter, if queries
have the same order: `key_coordinates`.

Logic instructions and shifts to the right bind the kernel: they run on the slowest pipe. A word of keys takes
one of them per plane, and two to four if bits of a second plane are spread for it. Shifts to the left run as
multiplications.
"""

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from kernels_pallas import registers as r
from kernels_pallas.registers import Register, Registers

BITS = (2, 3, 4, 5, 6, 8)
QUADS = 4
"""Threads of a warp that share a key."""


def bit_planes(bits: int) -> tuple[int, ...]:
    """Return the bits of the planes in which levels are packed: powers of two, the highest first."""
    return tuple(1 << i for i in reversed(range(bits.bit_length())) if bits >> i & 1)


def key_share(C: int, bits: int) -> int:
    """Return how many consecutive coordinates of a key with C coordinates each of its threads has.

    Whole words, if they divide C: then the last thread may have none. Otherwise a quarter of C.
    """
    high = bit_planes(bits)[0]
    whole = -(-C * high // (32 * QUADS)) * (32 // high)
    return whole if C % whole == 0 else C // QUADS


def key_coordinates(count: int, bits: int) -> np.ndarray:
    """Return the coordinate of each byte of `key_words`, [words, 4]; `count` or more for those of none."""
    high = bit_planes(bits)[0]
    word, field, byte = np.unravel_index(
        np.arange(-(-count * high // 32) * (8 // high) * 4), (-(-count * high // 32), 8 // high, 4)
    )
    return (word * (32 // high) + byte * (8 // high) + field).reshape(-1, 4)


def key_words(planes: Sequence[Registers], bits: int) -> Iterator[Register]:
    """Unpack consecutive coordinates of one key, loaded as words of each bit plane, word by word.

    A byte is a level times 2^(8 - bits), so that all shifts are to the left.
    """
    high, *low = bit_planes(bits)
    for number, word in enumerate(planes[0]):
        below = _spread(planes[1], number * (32 // high) * low[0], low[0] * 8 // high) if low else 0
        for field in range(8 // high):
            moved = r.shl(word, 8 - high * (field + 1))
            if low:
                rest = r.and_(r.shl(below, 8 - bits - field * low[0]), _mask(low[0], 8 - bits))
                yield r.and_or(moved, _mask(high, 8 - high), rest)
            else:
                yield r.and_(moved, _mask(high, 8 - high)) if high < 8 else moved


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
        rest = r.and_(_moved(below, place - at), _mask(low[0], place))
        found.append(r.and_or(_moved(word, place + low[0] - begin), _mask(high, place + low[0]), rest))
    return found


@functools.cache
def factor_of(coordinate: int, bits: int) -> int:
    """Return the logarithm to base 2 of the factor of a coordinate in `value_words`.

    It is where the level lies in its byte. Shifts to the right cost most.
    """
    places, end = [], 0
    for plane in reversed(bit_planes(bits)):
        places.append((coordinate * plane % 8, end))
        end += plane

    def cost(at: int) -> int:
        return sum(2 if begin > at + to else begin < at + to for begin, to in places)

    return min(range(9 - bits), key=cost)


def _mask(bits: int, at: int) -> int:
    """Return a mask of `bits` bits from bit `at` on in each byte."""
    return (2**bits - 1 << at) * 0x01010101


def _moved(word: Register, by: int) -> Register:
    return r.shl(word, by) if by >= 0 else r.shr(word, -by)


def _spread(words: Registers, begin: int, size: int) -> Register:
    """Spread 4·size bits from bit `begin` on: each byte of the result has `size` of them at its lower end.

    The other bits of a byte have any values.
    """
    word, byte = words[begin // 32], begin % 32 // 8
    if size == 4:
        apart = r.prmt(word, 0, 0x4040 | (byte + 1) << 8 | byte)
        return r.or_(apart, r.shl(apart, 4))
    assert size == 2
    apart = r.mul(r.and_(r.shr(word, 8 * byte), 0xFF), 1 << 12 | 1)
    return r.or_(apart, r.shl(apart, 6))


def _turned(words: Sequence[Register]) -> Registers:
    """Transpose four words of four bytes."""
    a, b, c, d = words
    low, high = ([r.prmt(x, y, s) for x, y in ((a, b), (c, d))] for s in (0x5140, 0x7362))
    return [r.prmt(x, y, s) for x, y in (low, high) for s in (0x5410, 0x7632)]
