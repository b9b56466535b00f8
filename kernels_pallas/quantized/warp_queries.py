"""Queries of a KV head as integers, for products with bytes on tensor cores (ours).

Queries are rounded to 15 bits of the largest coordinate of a head in a plane: 128 h + l, with bytes h and l
with a sign. The error of a score grows with this coordinate.
"""

import itertools
from typing import Any

import numpy as np

from kernels_pallas import registers as r
from kernels_pallas.common import LOG2_E
from kernels_pallas.quantized.byte_levels import key_coordinates
from kernels_pallas.quantized.warp_layout import (
    LARGEST_QUERY,
    QUADS,
    SMALLEST,
    Form,
    find_place,
    head_of,
    reduced,
)
from kernels_pallas.registers import Register, Registers

ROUNDING = 0x4B400000
"""Bits of the float32 1.5 · 2^23. Adding it rounds to an integer, with a sign."""


def prepare_queries(form: Form, q: Any, shared: Any) -> list[Registers]:
    """Round the queries of a KV head to integers.

    Args:
      form: static shape.
      q: bfloat16 [columns, R] in global memory.
      shared: int32 [tiles · steps, 32, 4] in shared memory, gets what each thread of a warp multiplies with
        keys: high and low bytes of two words in turn.

    Returns:
      What is added to products of each tile and plane, so that levels count from the middle; and the factors
      of products.
    """
    place = find_place()
    lane = r.add(r.mul(place.row, QUADS), place.quad)
    is_first, step = r.equal(place.warp, 0), 0
    offsets: Registers = []
    factors: Registers = []
    for tile in range(form.tiles):
        begin = 0
        for p in form.key_planes:
            count, bits = form.widths[p] // QUADS, form.bits[p]
            row = r.at(q, r.mul(head_of(form, tile, place.row), 2 * sum(form.widths[:-1])))
            share = r.at(row, r.add(r.mul(place.quad, 2 * count), 2 * begin))
            whole, largest, poison = _integers(r.load_words(share, 2 * count))
            order = key_coordinates(count, bits)
            highs = [r.shr_signed(r.add(x, 64), 7) for x in whole]
            lows = [r.sub(x, r.shl(high, 7)) for x, high in zip(whole, highs, strict=True)]
            words = []
            for word in range(form.words[p]):
                of_word = order[word] if word < len(order) else [count] * 4
                words += [join_bytes([x[c] if c < count else 0 for c in of_word]) for x in (highs, lows)]
            for four in itertools.batched(words, 4):
                r.store(r.at(shared, r.mul(r.add(lane, 32 * step), 16)), list(four), is_first)
                step += 1
            total = reduced(r.add, whole)
            for distance in (1, 2):
                total = r.add(total, r.across(total, distance))
            offsets.append(r.sub(0, r.shr_signed(r.mul(total, 2**bits - 1), 1)))
            factor = r.fmul(largest, form.scale * LOG2_E * 2.0 ** (1 - bits) / LARGEST_QUERY)
            factors.append(r.fadd(factor, poison))
            begin += form.widths[p]
    r.synchronize()
    return [offsets, factors]


def _integers(packed: Registers) -> tuple[Registers, Register, Register]:
    """Round a quad's share of a head.

    Returns:
      Integers; the largest absolute coordinate of the head; and zero, or NaN if a coordinate is not finite.
    """
    numbers = [
        r.as_float(half) for word in packed for half in (r.shl(word, 16), r.and_(word, 0xFFFF0000 - 2**32))
    ]
    largest: Register = SMALLEST
    poison: Register = 0.0
    for x in numbers:
        largest, poison = r.fmax(largest, r.fabs(x)), r.fma(x, 0.0, poison)
    for distance in (1, 2):
        largest = r.fmax(largest, r.across(largest, distance))
        poison = r.fadd(poison, r.across(poison, distance))
    unit = r.fmul(r.rcp(largest), float(LARGEST_QUERY))
    half = float(np.int32(ROUNDING).view(np.float32))
    whole = [r.sub(r.as_int(r.fma(x, unit, half)), ROUNDING) for x in numbers]
    return whole, largest, poison


def join_bytes(numbers: Registers) -> Register:
    """Join the lowest bytes of four integers."""
    a, b, c, d = numbers
    return r.prmt(r.prmt(a, b, 0x0040), r.prmt(c, d, 0x0040), 0x5410)
