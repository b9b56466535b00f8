"""Queries of a KV head as integers, for products with bytes on tensor cores (ours).

Queries are rounded to 15 bits of the largest coordinate of a head in a plane: 128 h + l, with bytes h and l
with a sign. The error of a score grows with this coordinate.
"""

import functools
import itertools
from typing import Any

import numpy as np

from kernels_pallas import registers as r
from kernels_pallas.common import LOG2_E
from kernels_pallas.quantized.byte_levels import QUADS, key_coordinates
from kernels_pallas.quantized.warp_layout import (
    LARGEST_QUERY,
    SMALLEST,
    WARPS,
    Form,
    Place,
    find_place,
    head_of,
    reduced,
)
from kernels_pallas.registers import Register, Registers

ROUNDING = 0x4B400000
"""Bits of the float32 1.5 · 2^23. Adding it rounds to an integer, with a sign."""


def prepare_queries(form: Form, q: Any, shared: Any) -> list[Registers]:
    """Round the queries of a KV head to integers. Of several planes or tiles each is the work of one warp.

    Args:
      form: static shape.
      q: bfloat16 [columns, R] in global memory.
      shared: int32 [query rows, 32, 4] in shared memory, gets what each thread of a warp multiplies with
        keys: high and low bytes of two words in turn. The last row gets offsets and factors.

    Returns:
      What is added to products of each tile and plane, so that levels count from the middle; and the factors
      of products.
    """
    place, steps = find_place(), [words // 2 for words in form.words]
    pairs = r.at(shared, 512 * (form.query_rows - 1))
    step = 0
    each = list(itertools.product(range(form.tiles), form.key_planes))
    for number, (tile, p) in enumerate(each):
        # Read from a lane, the warp is known to be the same for all threads.
        is_own = r.equal(r.of_lane(place.warp, 0), number % WARPS)
        prepare = functools.partial(
            _prepare,
            form,
            q,
            tile=tile,
            p=p,
            words_to=r.at(shared, 512 * step),
            pair_to=r.at(pairs, 64 * number),
            place=place,
            is_own=is_own,
        )
        if len(each) > 1:
            r.when(is_own, prepare)
        else:
            prepare()  # With a condition, the kernel was seen to take five registers more.
        step += steps[p]
    r.synchronize()
    found = [r.load_words(r.at(r.at(pairs, r.mul(place.row, 8)), 64 * n), 8) for n in range(len(each))]
    return [[offset for offset, _ in found], [r.as_float(factor) for _, factor in found]]


def _prepare(
    form: Form,
    q: Any,
    *,
    tile: int,
    p: int,
    words_to: Any,
    pair_to: Any,
    place: Place,
    is_own: Register,
) -> None:
    """Round the queries of a tile and plane, and store them, their offset and their factor.

    Only the threads of a warp that `is_own` store.
    """
    count, bits, C = form.shares[p], form.bits[p], form.widths[p]
    row = r.at(q, r.mul(head_of(form, tile, place.row), 2 * sum(form.widths[:-1])))
    of_plane = r.at(row, 2 * sum(form.widths[:p]))
    has_any = r.less(place.quad, C // count)
    share = r.at(of_plane, r.mul(r.select(has_any, place.quad, 0), 2 * count))
    whole, largest, poison = _integers(r.load_words(share, 2 * count), has_any)
    highs = [r.shr_signed(r.add(x, 64), 7) for x in whole]
    lows = [r.sub(x, r.shl(high, 7)) for x, high in zip(whole, highs, strict=True)]
    lane = r.add(r.mul(place.row, QUADS), place.quad)
    order, words = key_coordinates(count, bits), []
    for word in range(form.words[p]):
        of_word = order[word] if word < len(order) else [count] * 4
        words += [join_bytes([x[c] if c < count else 0 for c in of_word]) for x in (highs, lows)]
    for step, four in enumerate(itertools.batched(words, 4)):
        r.store(r.at(r.at(words_to, r.mul(lane, 16)), 512 * step), list(four), is_own)
    total = reduced(r.add, whole)
    for distance in (1, 2):
        total = r.add(total, r.across(total, distance))
    # A byte of a key is a level times 2^(8 - bits).
    offset = r.sub(0, r.shr_signed(r.mul(total, 256 - 2 ** (8 - bits)), 1))
    factor = r.fadd(r.fmul(largest, form.scale * LOG2_E / 128 / LARGEST_QUERY), poison)
    is_first = r.both(is_own, r.equal(place.quad, 0))
    r.store(r.at(pair_to, r.mul(place.row, 8)), [offset, r.as_int(factor)], is_first)


def _integers(packed: Registers, has_any: Register) -> tuple[Registers, Register, Register]:
    """Round a quad's share of a head. Without `has_any`, its integers are zeros.

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
    unit = r.select(has_any, r.fmul(r.rcp(largest), float(LARGEST_QUERY)), 0.0)
    half = float(np.int32(ROUNDING).view(np.float32))
    whole = [r.sub(r.as_int(r.fma(x, unit, half)), ROUNDING) for x in numbers]
    return whole, largest, poison


def join_bytes(numbers: Registers) -> Register:
    """Join the lowest bytes of four integers."""
    a, b, c, d = numbers
    return r.prmt(r.prmt(a, b, 0x0040), r.prmt(c, d, 0x0040), 0x5410)
