"""Attention of the four warps of a CTA to their keys, with integers on tensor cores (ours).

Thread t of a warp has row r = t / 4 and quad i = t % 4. One step of a warp has 32 keys:

    Sᵀ = q Kᵀ     rows: eight query heads, each as two bytes in rows r and r + 8; columns: keys
    softmax       row r has the scores of its head with keys 8i to 8i + 7; weights become 16-bit integers
    Oᵀ += Vᵀ Wᵀ   rows: coordinates; columns: the high or low bytes of the weights of a head

Levels are bytes, exact, and so are sums. Only queries and weights are rounded: queries to 15 bits of the
largest coordinate of a head, weights to 16 bits of the largest of the warp's 32 keys. With up to four query
heads rows 4 to 7 repeat them; columns 4 to 7 then are the low bytes of the weights.

All results of a warp are relative to its own running maximum. The four warps meet once, at the end.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernels_pallas import registers as r
from kernels_pallas.common import NEVER
from kernels_pallas.quantized.byte_levels import QUADS, bit_planes, key_words, value_words
from kernels_pallas.quantized.short_scales import E5M3_BIAS, E5M3_SHIFT, NAN_CODE
from kernels_pallas.quantized.warp_layout import (
    EACH,
    SMALLEST,
    Form,
    Place,
    Rows,
    find_place,
    head_of,
    of_columns,
    reduced,
)
from kernels_pallas.registers import Register, Registers

LARGEST_WEIGHT = 255 * 256
"""Largest integer of a weight, 256 h + l, with bytes h and l without a sign."""
MAGIC = 0x4B000000
"""Bits of the float32 2^23. Integers up to 2^23 may be added to either."""


def add_keys(
    form: Form, rows: Rows, shared: Any, queries: list[Registers], carry: list[Registers]
) -> list[Registers]:
    """Add a warp's 32 keys to its result; `shared` and `queries` are those of `prepare_queries`."""
    place = find_place()
    packed = [rows.scales(p) for p in form.key_planes]
    scores = _scores(form, rows, shared, queries, packed, place)
    packed.append(rows.scales(len(form.widths) - 1))
    *scores, scales = _correct([*scores, _sizes(packed[-1])], packed, rows.visible)
    acc, maxima, sums, totals = carry
    weights = [_weigh(x, scales, maximum) for x, maximum in zip(scores, maxima, strict=True)]
    shrunk = [_shrink(form, tile, acc, weights[tile], place) for tile in range(form.tiles)]
    found = _add_values(form, rows, weights, shrunk, place)
    return [
        [x for of_tile in found for x in of_tile],
        [each.maximum for each in weights],
        [r.fma(x, each.shrink, r.fmul(each.sum, each.unit)) for x, each in zip(sums, weights, strict=True)],
        [
            r.fma(x, each.shrink, r.fmul(each.total, each.factor))
            for x, each in zip(totals, weights, strict=True)
        ],
    ]


def _load_key(form: Form, rows: Rows, p: int, n: int, place: Place) -> list[Registers]:
    """Load a quad's coordinates of the key in this row of product n."""
    # Column c of a product is key 8 (c / 2) + 2n + c % 2: a thread then has eight consecutive keys.
    key, share = r.add(r.mul(r.shr(place.row, 1), EACH), r.and_(place.row, 1)), form.shares[p]
    # A quad without coordinates reads those of the first one. Its queries are zeros.
    has = form.widths[p] // share
    quad = place.quad if has == QUADS else r.select(r.less(place.quad, has), place.quad, 0)
    return load_share(rows.levels(p, key, 2 * n), form.widths[p], form.bits[p], quad, share)


def _load_value(form: Form, rows: Rows, x: int, place: Place) -> list[Registers]:
    """Load a row's coordinates of the value of a thread's key x."""
    p = len(form.widths) - 1
    row = rows.levels(p, r.mul(place.quad, EACH), x)
    return load_share(row, form.widths[p], form.bits[p], place.row, form.value_share)


def _scores(
    form: Form,
    rows: Rows,
    shared: Any,
    queries: list[Registers],
    packed: list[Registers],
    place: Place,
) -> list[Registers]:
    """Return base-2 scores of each tile's head with a thread's keys; those that do not count are -inf."""
    offsets, factors = queries
    own = r.at(shared, r.mul(r.add(r.mul(place.row, QUADS), place.quad), 16))
    find_gains, tiles = rows.gains, range(form.tiles)
    gains = [find_gains(head_of(form, tile, place.row)) if find_gains else [0.0] for tile in tiles]
    scores = [x * EACH if len(x) == 1 else [0.0] * EACH for x in gains]
    begins = list(itertools.accumulate(form.words, initial=0))
    # The widest plane needs most registers, and then there are no scores yet.
    for p in sorted(form.key_planes, key=lambda p: -form.widths[p]):
        products = {
            (tile, n): [0, 0, *[offsets[tile * len(form.key_planes) + p]] * 2]
            for tile in tiles
            for n in range(EACH // 2)
        }
        levels = [
            itertools.chain(key_words(_load_key(form, rows, p, n, place), form.bits[p]), [0])
            for n in range(EACH // 2)
        ]
        for step in range(begins[p] // 2, begins[p + 1] // 2):
            pairs = [list(itertools.islice(each, 2)) for each in levels]
            for tile in tiles:
                words = r.load_words(r.at(own, 512 * (tile * form.steps + step)), 16)
                for n, pair in enumerate(pairs):
                    products[tile, n] = r.mma(True, words, pair, products[tile, n])
        sizes = _sizes(packed[p])
        for (tile, n), product in products.items():
            for e in range(2):
                whole = r.to_float(r.add(r.shl(product[e], 7), product[2 + e]))
                x = 2 * n + e
                factor = r.fmul(sizes[x], factors[tile * len(form.key_planes) + p])
                scores[tile][x] = r.fma(whole, factor, scores[tile][x])
    for tile in tiles:
        if len(gains[tile]) > 1:
            scores[tile] = [r.fadd(*pair) for pair in zip(scores[tile], gains[tile], strict=True)]

    def hide() -> Registers:
        seen = rows.visible() * form.tiles
        return [r.select(is_seen, x, -float("inf")) for is_seen, x in zip(seen, flat, strict=True)]

    flat = list(itertools.chain(*scores))
    flat = hide() if rows.hides is None else r.branch(rows.hides, hide, flat)
    return [flat[begin : begin + EACH] for begin in range(0, len(flat), EACH)]


def load_share(row: Any, C: int, bits: int, thread: Register, count: int) -> list[Registers]:
    """Load `count` consecutive coordinates of a row of C, a thread's share, as words of each bit plane."""
    found, begin = [], 0
    for plane in bit_planes(bits):
        share, of_plane = count * plane, r.at(row, begin)
        if share % 8 == 0:
            own, aligned = r.at(of_plane, r.mul(thread, share // 8)), math.gcd(C * bits // 8, begin)
            found.append(r.load_words(own, share // 8, aligned))
        else:
            # In one-bit planes every second share begins in the middle of a byte.
            own = r.at(of_plane, r.shr(r.mul(thread, share), 3))
            loads = [r.load_words(r.at(own, i), 1)[0] for i in range(share // 8 + 1)]
            words: Registers = [0] * (len(loads) // 4 + 2)
            for i, byte in enumerate(loads):
                words[i // 4] = r.or_(words[i // 4], r.shl(byte, 8 * (i % 4)))
            shift = r.mul(r.and_(thread, 1), 4)
            found.append([r.funnel(low, high, shift) for low, high in itertools.pairwise(words)])
        begin += C * plane // 8
    return found


def _sizes(packed: Registers) -> Registers:
    """Decode scales. Zero becomes 2^-16, and NaN a number: see `_correct`."""
    codes = [r.prmt(packed[x // 4], 0, 0x4044 | (x % 4) << 8) for x in range(EACH)]  # In bits 16 to 23.
    return [r.as_float(r.add(r.shl(code, E5M3_SHIFT - 16), E5M3_BIAS << E5M3_SHIFT)) for code in codes]


def _correct(
    numbers: list[Registers], packed: list[Registers], visible: Callable[[], Registers]
) -> list[Registers]:
    """Correct scores and the scales of values for codes that are rare.

    A NaN in any plane makes the scores of a key that counts NaN. Zero as a scale of values becomes zero; as a
    scale of keys it stays 2^-16.
    """
    *scores, scales = numbers
    special: Register = 0
    # The highest bit of a byte is set if its code, or that of a byte below it, is NaN.
    for word in itertools.chain(*packed):
        special = r.or_(special, r.and_(r.sub(_wrapped(0xFEFEFEFE), word), word))
    for word in packed[-1]:  # The same for zero.
        special = r.or_(special, r.and_(r.sub(word, 0x01010101), r.sub(-1, word)))
    is_special = r.less(0, r.and_(special, 0x80808080 - 2**32))

    def correct() -> Registers:
        # Other instructions than in `_sizes`: the compiler would keep their results.
        codes = [[r.and_(r.shr(word, 8 * i), 0xFF) for word in words for i in range(4)] for words in packed]
        found, seen = [list(of_tile) for of_tile in scores], visible()
        for x in range(EACH):
            for of_plane in codes:
                is_nan = r.both(seen[x], r.equal(of_plane[x], NAN_CODE))
                for of_tile in found:
                    of_tile[x] = r.select(is_nan, float("nan"), of_tile[x])
        found.append([r.select(r.equal(c, 0), 0.0, x) for c, x in zip(codes[-1], scales, strict=True)])
        return [x for each in found for x in each]

    flat = r.branch(is_special, correct, [x for each in numbers for x in each])
    return [flat[begin : begin + EACH] for begin in range(0, len(flat), EACH)]


class _Weights(NamedTuple):
    """Weights of a thread's keys for one query head.

    Attributes:
      whole: integers, in the lower 16 bits of each register.
      sum: sum of the probabilities, relative to the warp's largest score.
      total: sum of the integers, float32.
      maximum: next running maximum.
      shrink: factor of earlier results.
      unit: factor of `sum`.
      factor: factor of integers.
    """

    whole: Registers
    sum: Register
    total: Register
    maximum: Register
    shrink: Register
    unit: Register
    factor: Register


def _weigh(scores: Registers, scales: Registers, maximum: Register) -> _Weights:
    """Return the weights of values for a thread's scores."""
    highest = _over_keys(scores, NEVER)
    following = r.fmax(maximum, highest)
    shrink, unit = r.ex2(r.fsub(maximum, following)), r.ex2(r.fsub(highest, following))
    p = [r.ex2(r.fsub(x, highest)) for x in scores]
    weighted = [r.fmul(x, scale) for x, scale in zip(p, scales, strict=True)]
    largest = _over_keys(weighted, SMALLEST)
    step = r.fmul(r.rcp(largest), float(LARGEST_WEIGHT))
    magic = float(np.int32(MAGIC).view(np.float32))
    whole = [r.as_int(r.fma(x, step, magic)) for x in weighted]
    total = r.to_float(r.sub(reduced(r.add, whole), _wrapped(EACH * MAGIC)))
    factor = r.fmul(r.fmul(largest, unit), 1.0 / LARGEST_WEIGHT)
    return _Weights(whole, reduced(r.fadd, p), total, following, shrink, unit, factor)


def _wrapped(value: int) -> int:
    """Return the signed 32-bit integer with the lowest bits of a number."""
    return (value + 2**31) % 2**32 - 2**31


def _over_keys(numbers: Registers, least: float) -> Register:
    """Return the largest number of a row, over all of the warp's keys."""
    largest = r.fmax(reduced(r.fmax, numbers), least)
    for distance in (1, 2):
        largest = r.fmax(largest, r.across(largest, distance))
    return largest


def _shrink(form: Form, tile: int, acc: Registers, weights: _Weights, place: Place) -> Registers:
    """Return a tile's outputs relative to the next maximum."""
    share = 2 * form.value_share
    of_tile, shrink = acc[tile * share : (tile + 1) * share], of_columns(weights.shrink, place)
    return r.branch(
        r.differ(r.fmul(*shrink), 1.0),
        lambda: [r.fmul(x, shrink[i % 2]) for i, x in enumerate(of_tile)],
        of_tile,
    )


def _add_values(
    form: Form, rows: Rows, weights: list[_Weights], acc: list[Registers], place: Place
) -> list[Registers]:
    """Add the values of 32 keys, times their weights, to the outputs of each tile."""
    parts = [_parts(form, each, place) for each in weights]
    shares = [_load_value(form, rows, x, place) for x in range(EACH)]
    halves = [
        value_words(list(zip(*of_half, strict=True)), form.value_share, form.bits[-1])
        for of_half in (shares[: EACH // 2], shares[EACH // 2 :])
    ]
    magic = float(np.int32(MAGIC).view(np.float32))
    for c in range(0, form.value_share, 2):
        a = [half[c + i] for half in halves for i in range(2)]
        for of_tile, out in zip(parts, acc, strict=True):
            for bytes_, factors in of_tile:
                for i, x in enumerate(r.mma(False, a, bytes_, [MAGIC] * 4)):
                    at = 2 * c + i
                    out[at] = r.fma(r.fsub(r.as_float(x), magic), factors[i % 2], out[at])
    return acc


def _parts(form: Form, weights: _Weights, place: Place) -> list[tuple[Registers, Registers]]:
    """Return bytes of the weights as columns of products, and the factors of a thread's two columns."""
    pairs = [r.prmt(weights.whole[x], weights.whole[x + 1], 0x5410) for x in range(0, EACH, 2)]

    def bytes_of(selector: Register) -> Registers:
        return [r.prmt(pairs[i], pairs[i + 1], selector) for i in (0, 2)]

    low, high = 0x6420, 0x7531
    if form.columns > 4:
        parts = [(bytes_of(high), r.fmul(weights.factor, 256.0)), (bytes_of(low), weights.factor)]
    else:
        is_high = r.less(place.row, 4)
        factor = r.fmul(weights.factor, r.select(is_high, 256.0, 1.0))
        parts = [(bytes_of(r.select(is_high, high, low)), factor)]
    return [(bytes_, of_columns(factor, place)) for bytes_, factor in parts]
