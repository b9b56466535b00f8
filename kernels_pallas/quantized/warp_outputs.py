"""Merging of the results of a CTA's four warps (ours)."""

from typing import Any

from kernels_pallas import registers as r
from kernels_pallas.common import LOG2_E
from kernels_pallas.quantized.byte_levels import QUADS, factor_of
from kernels_pallas.quantized.warp_layout import (
    ROWS,
    WARPS,
    Form,
    Place,
    find_place,
    of_columns,
    over_quads,
    reduced,
)
from kernels_pallas.registers import Register, Registers

VECTOR = 4
"""Numbers that are stored together."""


def finish(form: Form, o: Any, lse: Any, sums: Any, outputs: Any, carry: list[Registers]) -> None:
    """Merge the results of all warps, and store them in global memory.

    Args:
      form: static shape.
      o: float32 [columns, Z], gets the outputs.
      lse: float32 [columns], gets natural log-sum-exps.
      sums: float32 [2, warps, 8 · tiles] in shared memory, for maxima and sums.
      outputs: float32 [warps, columns, Z] in shared memory.
      carry: unfinished results.
    """
    place, width, Z = find_place(), ROWS * form.tiles, form.widths[-1]
    acc, maxima, totals, whole = carry
    for tile in range(form.tiles):
        for which, x in enumerate((maxima[tile], over_quads(totals[tile]))):
            number = r.add(r.mul(place.warp, width), r.add(place.row, ROWS * tile + which * WARPS * width))
            r.store(r.at(sums, r.mul(number, 4)), [x], r.equal(place.quad, 0))
        _store_outputs(form, tile, outputs, acc, over_quads(whole[tile]), place)
    r.synchronize()
    count = form.columns * Z // VECTOR
    for first in range(0, count, r.THREADS):
        number = r.add(r.thread(), first)
        is_inside = r.less(number, count)
        number = r.select(is_inside, number, 0)
        begin = r.mul(number, VECTOR)
        merged: Registers = []
        head = r.divided(begin, Z)
        shares, natural = _merge(sums, width, head)
        for warp, share in enumerate(shares):
            at = r.mul(r.add(begin, warp * form.columns * Z), 4)
            of_warp = [r.fmul(x, share) for x in r.load_floats(r.at(outputs, at), VECTOR)]
            merged = [r.fadd(x, y) for x, y in zip(merged, of_warp, strict=True)] if merged else of_warp
        r.store(r.at(o, r.mul(begin, 4)), merged, is_inside)
        is_first = r.both(is_inside, r.equal(r.mul(head, Z), begin))
        r.store(r.at(lse, r.mul(head, 4)), [natural], is_first)


def _merge(sums: Any, width: int, head: Register) -> tuple[Registers, Register]:
    """Return each warp's share of a head's output, and the natural log-sum-exp."""
    each = [
        [r.load_float(r.at(sums, r.mul(r.add(head, (which * WARPS + w) * width), 4))) for w in range(WARPS)]
        for which in range(2)
    ]
    highest = reduced(r.fmax, each[0])
    weights = [r.ex2(r.fsub(x, highest)) for x in each[0]]
    total: Register = 0.0
    for weight, of_warp in zip(weights, each[1], strict=True):
        total = r.fma(of_warp, weight, total)
    is_empty = r.equal(r.as_int(total), 0)
    scale = r.select(is_empty, 0.0, r.rcp(total))
    natural = r.fmul(r.fadd(highest, r.lg2(total)), 1 / LOG2_E)
    return [r.fmul(x, scale) for x in weights], r.select(is_empty, -float("inf"), natural)


def _store_outputs(
    form: Form, tile: int, outputs: Any, acc: Registers, total: Register, place: Place
) -> None:
    """Store a warp's outputs of a tile in shared memory, relative to its own maximum."""
    bits, count, Z = form.bits[-1], form.value_share, form.widths[-1]
    middles = of_columns(r.fmul(total, (2**bits - 1) / 2), place)
    is_own = r.less(place.quad, 2 if form.columns == 4 else QUADS)  # Other quads have the same heads.
    for e in range(2):
        row = r.add(r.add(r.mul(place.warp, form.columns), r.mul(place.quad, 2)), ROWS * tile + e)
        begin = r.add(r.mul(row, Z), r.mul(place.row, count))
        found = []
        for c in range(count):
            x = acc[2 * (tile * count + c) + e]
            if form.columns == 4:
                x = r.fadd(x, r.across(x, 2))
            x = r.fsub(r.fmul(x, 0.5 ** factor_of(c, bits)), middles[e])
            found.append(r.fmul(x, 2.0 ** (1 - bits)))
        for c in range(0, count, VECTOR):
            r.store(r.at(outputs, r.mul(r.add(begin, c), 4)), found[c : c + VECTOR], is_own)


def leave_out(form: Form, lse: Any) -> None:
    """Store log-sum-exps of no keys."""
    thread = r.thread()
    r.store(r.at(lse, r.mul(thread, 4)), [-float("inf")], r.less(thread, form.columns))
