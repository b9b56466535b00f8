"""Keys, values and query heads of each thread of a warp in a step (ours).

Thread t of a warp has row r = t / 4 and quad i = t % 4, as in products on tensor cores.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from kernels_pallas import registers as r
from kernels_pallas.quantized.byte_levels import QUADS, key_coordinates, key_share
from kernels_pallas.registers import Register, Registers

ROWS, WARPS = 8, 4
KEYS = 32
"""Keys of one warp in a step."""
EACH = KEYS // QUADS
"""Keys whose scores a thread has."""
LARGEST_QUERY = 127 * 128
"""Largest integer of a query, 128 h + l, with bytes h and l with a sign."""
SMALLEST = 1e-30
"""Least divisor: what is smaller counts as zero."""


class Form(NamedTuple):
    """Static shape of a pass.

    Attributes:
      columns: query heads per KV head, padded to 4, 8 or 16.
      widths: coordinates of each plane of keys, then of values.
      bits: bits of each plane.
      scale: factor on the scores.
    """

    columns: int
    widths: tuple[int, ...]
    bits: tuple[int, ...]
    scale: float

    @property
    def tiles(self) -> int:
        """Tiles of eight query heads."""
        return -(-self.columns // ROWS)

    @property
    def key_planes(self) -> range:
        """Numbers of the planes of keys."""
        return range(len(self.widths) - 1)

    @property
    def value_share(self) -> int:
        """Coordinates of values that a thread has."""
        return self.widths[-1] // ROWS

    @property
    def shares(self) -> tuple[int, ...]:
        """Coordinates that a quad has of each plane of keys. The last quads may have none."""
        return tuple(key_share(self.widths[p], self.bits[p]) for p in self.key_planes)

    @property
    def words(self) -> tuple[int, ...]:
        """Words of a query's high bytes in each plane of keys, an even number."""
        return tuple(_words_of(self.shares[p], self.bits[p]) for p in self.key_planes)

    @property
    def steps(self) -> int:
        """Products of all coordinates of the keys with the queries of a tile."""
        return sum(self.words) // 2

    @property
    def query_rows(self) -> int:
        """Rows of 32 · 4 integers of the arranged queries, with one for their offsets and factors."""
        return self.tiles * self.steps + 1

    @property
    def query_sizes(self) -> list[tuple[int, Any]]:
        """Registers and dtypes that `prepare_queries` returns."""
        count = self.tiles * len(self.key_planes)
        return [(count, jnp.int32), (count, jnp.float32)]

    @property
    def carry_sizes(self) -> list[int]:
        """Registers of an unfinished result: outputs, maxima, sums, and sums of integer weights."""
        return [2 * self.value_share * self.tiles, *[self.tiles] * 3]


def _words_of(count: int, bits: int) -> int:
    return -(-len(key_coordinates(count, bits)) // 2) * 2


class Rows(NamedTuple):
    """Keys of a step, as functions of the thread.

    Attributes:
      levels: pointer to the row of plane p of a key of the warp. Its number is a register plus a number that
        is the same for all threads.
      scales: words with the scales of the keys 8i to 8i + 7 in plane p.
      gains: what base-2 scores of a query head gain with the keys 8i to 8i + 7: one number for each, or one
        for all; or None.
      visible: whether the keys 8i to 8i + 7 count.
      hides: whether some of the warp's keys may not count; None if that is not known.
    """

    levels: Callable[[int, Register, int], Any]
    scales: Callable[[int], Registers]
    gains: Callable[[Register], Registers] | None
    visible: Callable[[], Registers]
    hides: Register | None = None


class Place(NamedTuple):
    """A thread's row and quad, and its warp."""

    row: Register
    quad: Register
    warp: Register


def find_place() -> Place:
    """Find the row and the quad of this thread, and its warp."""
    lane = r.and_(r.thread(), 31)
    return Place(r.shr(lane, 2), r.and_(lane, 3), r.shr(r.thread(), 5))


def head_of(form: Form, tile: int, row: Register) -> Register:
    """Return the query head of a row."""
    return r.and_(row, 3) if form.columns == 4 else r.add(row, ROWS * tile)


def reduced(operation: Callable[[Register, Register], Register], numbers: Registers) -> Register:
    """Combine numbers in pairs, so that few wait for each other."""
    while len(numbers) > 1:
        pairs = [operation(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=False)]
        numbers = [*pairs, *numbers[len(numbers) // 2 * 2 :]]
    return numbers[0]


def over_quads(x: Register) -> Register:
    """Add the numbers of a row's quads."""
    for distance in (1, 2):
        x = r.fadd(x, r.across(x, distance))
    return x


def of_columns(x: Register, place: Place) -> Registers:
    """Return the numbers of the heads of a thread's two columns, from those of the rows."""
    first = r.mul(place.quad, 8)
    return [r.of_lane(x, first), r.of_lane(x, r.add(first, 4))]
