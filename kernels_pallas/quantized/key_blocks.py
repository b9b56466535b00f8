"""Keys and values as the warps of a CTA find them: blocks of a store or of a ring, or listed slots (ours).

A step has 128 keys, 32 for each warp: one or two units of a store, which are copied to shared memory, or
128 entries of a list.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import registers as r
from kernels_pallas.quantized.inputs import BLOCK, STEP
from kernels_pallas.quantized.warp_attention import add_keys
from kernels_pallas.quantized.warp_layout import EACH, KEYS, WARPS, Form, Rows, find_place
from kernels_pallas.quantized.warp_queries import join_bytes
from kernels_pallas.registers import Register, Registers, inline

PAIR = STEP // BLOCK
"""Blocks of keys of a step."""
ALIGNED = 128
"""Alignment in bytes of an asynchronous copy's destination in shared memory."""


class Geometry(NamedTuple):
    """Static shape of a launch.

    A list of slots in pages indexes all S slots of the pool, as if they were of one head of one sequence.

    Attributes:
      K: KV heads.
      S: slots of a sequence.
      page: slots per page; 0 without a block table.
      chosen: length of the list of slots; 0 without a list.
      ring: sinks and window of a ring, or None.
      gains: whether scores have gains.
      parts: parts of the keys.
      least: steps of a part that has any.
      stages: steps of keys in flight.
      form: what the warps need to know.
    """

    K: int
    S: int
    page: int
    chosen: int
    ring: tuple[int, int] | None
    gains: bool
    parts: int
    least: int
    stages: int
    form: Form

    @property
    def lists(self) -> int:
        """Number of lists: slots, and the blocks of their gains."""
        return (1 + self.gains) * (self.chosen > 0)

    @property
    def sizes(self) -> list[int]:
        """Bytes of a token in each plane."""
        return [C * bits // 8 for C, bits in zip(self.form.widths, self.form.bits, strict=True)]

    @property
    def unit(self) -> int:
        """Keys that are copied together: a step, if pages and sequences have whole ones, or a block."""
        return STEP if not self.ring and (self.page or self.S) % STEP == 0 else BLOCK

    @property
    def units(self) -> int:
        """Units of a step."""
        return STEP // self.unit


def view_units(levels: Array, unit: int) -> Array:
    """View [B, K, S, P] as units [B, K, S/unit, unit·P/L, L] with L ≤ 256, without a copy.

    Rows of an asynchronous copy must have a multiple of 16 bytes.
    """
    B, K, S, P = levels.shape
    return levels.reshape(B, K, S // unit, *unit_shape(P, unit))


def unit_shape(P: int, unit: int) -> tuple[int, int]:
    """Return the shape of a unit of rows of P bytes."""
    several = math.gcd(P, 256 // BLOCK)
    return P * unit // (BLOCK * several), BLOCK * several


class Operands(NamedTuple):
    """Arrays of a pass, or references to them in the kernel; absent ones are None.

    Attributes:
      begin: first slot of each sequence.
      end: end of the slots of each sequence.
      q: arranged queries.
      levels: packed levels of each plane.
      reach: scales of each plane.
      lists: listed slots, and the blocks of their gains; without a list of slots, none.
      table: block table, unless slots are listed.
      gains: arranged gains, [B, K, blocks · columns].
    """

    begin: Any
    end: Any
    q: Any
    levels: list[Any]
    reach: list[Any]
    lists: list[Any]
    table: Any
    gains: Any


class Buffers(NamedTuple):
    """Shared memory of a CTA."""

    levels: Any
    reach: Any
    lists: Any
    gains: Any
    q: Any
    sums: Any
    outputs: Any
    lists_ready: Any
    ready: Any


class Span(NamedTuple):
    """Blocks first ≤ i < last of a part, and the range of valid slots begin ≤ j < end."""

    first: Array
    last: Array
    begin: Array
    end: Array

    @classmethod
    def of(cls, g: Geometry, begin: Array, end: Array, part: Array) -> "Span":
        """Divide the non-empty blocks of the store, or of the list, into equal shares of whole steps."""
        # Steps begin at multiples of their keys.
        low, high = PAIR * lax.div(begin, jnp.int32(STEP)), lax.div(end + (BLOCK - 1), jnp.int32(BLOCK))
        if g.chosen or g.ring:
            low, high = jnp.int32(0), jnp.int32(-(-(g.chosen or g.S) // BLOCK))
        count = jnp.where(end > begin, high - low, 0)
        steps = lax.div(count + (PAIR * g.parts - 1), jnp.int32(PAIR * g.parts))
        share = PAIR * jnp.maximum(steps, g.least)
        first = jnp.minimum(part * share, count)
        return cls(low + first, low + jnp.minimum(first + share, count), begin, end)

    @property
    def steps(self) -> Array:
        """Number of steps."""
        return lax.div(self.last - self.first + (PAIR - 1), jnp.int32(PAIR))


@dataclass(frozen=True)
class Source:
    """Source of a part's keys: planes in global memory, of one KV head of one sequence.

    `head` is the sequence and the KV head. `gains` are those of this head, or None.
    """

    g: Geometry
    at: Buffers
    span: Span
    refs: Operands
    head: tuple[Any, Any]
    gains: Any

    def begin(self) -> None:
        """Start loading, before the first step."""

    def place(self, step: Array) -> list[Array]:
        """Look up what `ahead` needs for a step, before its keys are read."""
        return []

    def add(self, step: Array, queries: list[Array], carry: list[Array]) -> list[Array]:
        """Add the keys of a step to the results of all warps."""
        raise NotImplementedError

    def ahead(self, step: Array, place: list[Array]) -> None:
        """Start the next load, once all threads have read a step's keys."""

    def _add(
        self,
        rows: Callable[..., Rows],
        refs: list[Any],
        scalars: list[Array],
        queries: list[Array],
        carry: list[Array],
    ) -> list[Array]:
        form, counts = self.g.form, len(queries)

        def add(pointers: list[Any], numbers: Registers, arrays: list[Registers]) -> list[Registers]:
            found = rows(self.g, pointers[1:], *numbers)
            return add_keys(form, found, pointers[0], arrays[:counts], arrays[counts:])

        out = [(size, jnp.float32) for size in form.carry_sizes]
        return inline(add, [self.at.q, *refs], scalars, [*queries, *carry], out)


class Stream(Source):
    """All blocks of a span, with `stages` steps of them in flight."""

    def begin(self) -> None:

        @pl.loop(0, jnp.minimum(self.g.stages, self.span.steps))
        def _fill(step: Array) -> None:
            self._load(step, self._leads(step))

    def place(self, step: Array) -> list[Array]:
        """Look up the pages of the keys that `ahead` loads, during the computation of the current ones."""
        return self._leads(jnp.minimum(step + self.g.stages, self.span.steps - 1))

    def add(self, step: Array, queries: list[Array], carry: list[Array]) -> list[Array]:
        slot, at, span = lax.rem(step, jnp.int32(self.g.stages)), self.at, self.span
        plgpu.barrier_wait(at.ready.at[slot])
        refs = [buffer.at[slot] for buffer in (*at.levels, *at.reach, *at.gains)]
        end = jnp.minimum(span.end, span.last * BLOCK)
        return self._add(_streamed, refs, [self._block(step, 0) * BLOCK, span.begin, end], queries, carry)

    def ahead(self, step: Array, place: list[Array]) -> None:
        # All have read the keys.
        wait_for_all()

        @pl.when(step + self.g.stages < self.span.steps)
        def _() -> None:
            self._load(step + self.g.stages, place)

    def _block(self, step: Array, number: int) -> Array:
        return self.span.first + step * PAIR + number

    def _inside(self, step: Array, number: int) -> Array:
        """Return a block of a step. The last one is read twice if no other follows."""
        block = jnp.minimum(self._block(step, number), self.span.last - 1)
        if self.g.units == 1 or self.g.ring:
            return block
        # A step may begin before the first block with a slot that counts, whose page may not be there.
        return jnp.maximum(block, lax.div(self.span.begin, jnp.int32(BLOCK)))

    def _units(self, step: Array) -> list[Array]:
        """Return the numbers of a step's units in the sequence."""
        blocks = self.g.unit // BLOCK
        inside = (self._inside(step, number * blocks) for number in range(self.g.units))
        return [lax.div(block, jnp.int32(blocks)) for block in inside]

    def _leads(self, step: Array) -> list[Array]:
        """Return the sequence, or the pages, of a step's units."""
        if self.refs.table is None:
            return [self.head[0]] * self.g.units
        of_page = jnp.int32(self.g.page // self.g.unit)
        units = (jnp.maximum(unit, 0) for unit in self._units(step))
        return [self.refs.table[self.head[0], lax.div(unit, of_page)] for unit in units]

    def _load(self, step: Array, leads: list[Array]) -> None:
        slot, at, size = lax.rem(step, jnp.int32(self.g.stages)), self.at, self.g.unit
        ready, positions = at.ready.at[slot], self._units(step)
        # Units of the sequence, or of the page.
        units = positions
        if self.refs.table is not None:
            units = [lax.rem(each, jnp.int32(self.g.page // size)) for each in positions]
        gains = size // BLOCK * self.g.form.columns

        def part(number: Array, count: int) -> Any:
            return pl.ds(pl.multiple_of(number * count, count), count)

        def pairs(i: int, lead: Array) -> Iterator[tuple[Any, Any]]:
            head = lead, self.head[1]
            for source, buffer in zip(self.refs.levels, at.levels, strict=True):
                yield source.at[*head, units[i]], buffer.at[slot, i]
            for source, buffer in zip(self.refs.reach, at.reach, strict=True):
                yield source.at[*head, part(units[i], size)], buffer.at[slot, i, pl.ds(0, size)]
            if self.gains is not None:
                yield self.gains.at[part(positions[i], gains)], at.gains[0].at[slot, i, pl.ds(0, gains)]

        _copy_by_warps([pair for i, lead in enumerate(leads) for pair in pairs(i, lead)], ready)


class Ring(Stream):
    """All blocks of a ring. The last one overlaps the one before, so that it ends with the ring.

    Scales and gains are read from global memory: copies begin at multiples of 16 bytes.
    """

    def add(self, step: Array, queries: list[Array], carry: list[Array]) -> list[Array]:
        slot, at = lax.rem(step, jnp.int32(self.g.stages)), self.at
        plgpu.barrier_wait(at.ready.at[slot])
        lead = self._leads(step)[0]
        refs = [buffer.at[slot] for buffer in at.levels]
        refs += [source.at[lead, self.head[1]] for source in self.refs.reach]
        refs += [] if self.gains is None else [self.gains]
        starts = [self._start(self._inside(step, number)) for number in range(PAIR)]
        scalars = [self._block(step, 0) * BLOCK, *starts, self.span.end]
        return self._add(_of_ring, refs, scalars, queries, carry)

    def _start(self, block: Array) -> Array:
        return jnp.minimum(block * BLOCK, self.g.S - BLOCK)

    def _leads(self, step: Array) -> list[Array]:
        """Return the number of the ring, for each of a step's blocks."""
        lead = self.head[0] if self.refs.table is None else self.refs.table[self.head[0], 0]
        return [lead] * PAIR

    def _load(self, step: Array, leads: list[Array]) -> None:
        slot, at = lax.rem(step, jnp.int32(self.g.stages)), self.at
        ready, starts = at.ready.at[slot], [self._start(self._inside(step, number)) for number in range(PAIR)]

        pairs = [
            (source.at[lead, self.head[1], pl.ds(start, BLOCK)], buffer.at[slot, i])
            for i, (lead, start) in enumerate(zip(leads, starts, strict=True))
            for source, buffer in zip(self.refs.levels, at.levels, strict=True)
        ]
        _copy_by_warps(pairs, ready, warps=1)  # They are few.


class Chosen(Source):
    """Listed slots. While one CTA waits for its rows, others compute."""

    def add(self, step: Array, queries: list[Array], carry: list[Array]) -> list[Array]:
        at, span = self.at, self.span
        planes = [source.at[*self.head] for source in (*self.refs.levels, *self.refs.reach)]
        refs = [*planes, *at.lists, *([] if self.gains is None else [self.gains])]
        first = (span.first + step * PAIR) * BLOCK
        scalars = [first, span.last * BLOCK, span.begin, span.end]
        return self._add(_listed, refs, scalars, queries, carry)


def _copy_by_warps(pairs: list[tuple[Any, Any]], ready: Any, *, warps: int = WARPS) -> None:
    """Start copies from global to shared memory. Some warps start some each: all wait for the slowest one."""

    @plgpu.warp_map
    def _(warp: Array) -> None:
        for number in range(warps):

            @pl.when(warp == number)
            def _(number: int = number) -> None:
                for source, to in pairs[number::warps]:
                    plgpu.copy_gmem_to_smem(source, to, ready)


def _streamed(g: Geometry, pointers: list[Any], first: Register, begin: Register, end: Register) -> Rows:
    """Find a warp's keys among those that were copied to shared memory; `first` is the slot of the first."""
    place, gains = find_place(), pointers[2 * len(g.sizes) :]
    own = r.add(r.mul(place.warp, KEYS), r.mul(place.quad, EACH))
    of_unit = g.unit // KEYS
    unit, within = r.divided(place.warp, of_unit), r.remainder(place.warp, of_unit)
    number = r.sub(r.add(first, own), begin)

    def gain(head: Register) -> Registers:
        block = r.mul(r.divided(within, BLOCK // KEYS), 4 * g.form.columns)
        return [r.load_float(r.at(gains[0], r.add(r.add(r.mul(unit, ALIGNED), block), r.mul(head, 4))))]

    count = r.sub(end, begin)

    def visible() -> Registers:
        return [r.less(r.add(number, x), count) for x in range(EACH)]

    # Numbers below zero are large ones without a sign.
    low = r.sub(r.add(first, r.mul(place.warp, KEYS)), begin)
    high = r.add(low, KEYS - 1)
    hides = r.less(r.sub(count, 1), r.select(r.less(low, high), high, low))

    scales = r.add(r.mul(unit, ALIGNED), r.add(r.mul(within, KEYS), r.mul(place.quad, EACH)))
    return _copied(g, pointers, scales, gain if gains else None, visible)._replace(hides=hides)


def _of_ring(
    g: Geometry, pointers: list[Any], nominal: Register, first: Register, second: Register, end: Register
) -> Rows:
    """Find a warp's keys among those of a ring that were copied to shared memory.

    The two blocks begin with slots `first` and `second`. Slots before `nominal` belong to other steps, and in
    the second block those before `nominal` + 64.
    """
    assert g.ring
    place, gains, (sinks, window) = find_place(), pointers[2 * len(g.sizes) :], g.ring
    is_first = r.less(place.warp, WARPS // PAIR)
    begin = r.select(is_first, nominal, r.add(nominal, BLOCK))
    within = r.add(r.mul(r.and_(place.warp, 1), KEYS), r.mul(place.quad, EACH))
    slot = r.add(r.select(is_first, first, second), within)
    last = r.sub(end, 1)
    newest = r.remainder(last, max(window, 1))

    def positions() -> tuple[Registers, Registers]:
        """Return positions, and whether they count."""
        found, counts = [], []
        for own in (r.add(slot, x) for x in range(EACH)):
            sink, turn = r.sub(own, window), r.add(r.sub(last, newest), own)
            recent = r.select(r.less(newest, own), r.sub(turn, window), turn)
            is_recent = r.less(own, window)
            # Both are at least zero; a smaller number is a large one without a sign.
            of_recent, of_sink = r.less(r.sub(recent, sinks), 2**30), r.less(sink, sinks)
            is_there = r.select(is_recent, of_recent, r.both(of_sink, r.less(sink, end)))
            counts.append(r.both(is_there, r.less(r.sub(own, begin), BLOCK)))
            found.append(r.select(is_recent, recent, sink))
        return found, counts

    def load_gain(block: Register, head: Register) -> Register:
        return r.load_float(r.at(r.at_row(gains[0], block, 4 * g.form.columns), r.mul(head, 4)))

    def gain(head: Register) -> Registers:
        if window % BLOCK or sinks > BLOCK:
            places = (r.select(seen, r.shr(at, 6), 0) for at, seen in zip(*positions(), strict=True))
            return [load_gain(block, head) for block in places]
        # A thread's eight slots have positions of one block, before or after the ring's last turn.
        turns, is_recent, newest_block = window // BLOCK, r.less(slot, window), r.shr(last, 6)
        after = r.shr(r.add(r.sub(last, newest), slot), 6)
        before = r.select(r.less(after, turns), 0, r.sub(after, turns))
        after = r.select(r.less(newest_block, after), newest_block, after)
        old, new = (load_gain(r.select(is_recent, each, 0), head) for each in (before, after))
        return [r.select(r.less(newest, r.add(slot, x)), old, new) for x in range(EACH)]

    return _copied(g, pointers, slot, gain if gains else None, lambda: positions()[1])


def _copied(
    g: Geometry,
    pointers: list[Any],
    scales: Register,
    gains: Callable[[Register], Registers] | None,
    visible: Callable[[], Registers],
) -> Rows:
    """Find a warp's keys in shared memory; `scales` is the place of a thread's eight among all scales."""
    place, planes = find_place(), len(g.sizes)
    levels, reach = pointers[:planes], pointers[planes : 2 * planes]
    return Rows(
        levels=lambda p, x, more: r.at(
            r.at(levels[p], r.mul(r.add(r.mul(place.warp, KEYS), x), g.sizes[p])), more * g.sizes[p]
        ),
        scales=lambda p: r.load_words(r.at(reach[p], scales), EACH),
        gains=gains,
        visible=visible,
    )


def _listed(
    g: Geometry, pointers: list[Any], first: Register, last: Register, begin: Register, end: Register
) -> Rows:
    """Find a warp's keys by a list of slots, from entry `first` on; entries from `last` on do not count.

    Slots out of range are read as slot 0.
    """
    place, planes = find_place(), len(g.sizes)
    levels, reach, (slots, *gains) = pointers[:planes], pointers[planes : 2 * planes], pointers[2 * planes :]
    own = r.add(first, r.mul(place.warp, KEYS))
    entry = r.add(own, r.mul(place.quad, EACH))

    def entries(pointer: Any, number: Register, count: int) -> Registers:
        inside = r.select(r.less(number, last), number, 0)
        return r.load_words(r.at(pointer, r.mul(inside, 4)), 4 * count)

    def there(slot: Register) -> Register:
        return r.select(r.less(slot, g.S), slot, 0)

    own_slots = entries(slots, entry, EACH)

    def scales(p: int) -> Registers:
        codes = [r.load_words(r.at_row(reach[p], there(slot), 1), 1)[0] for slot in own_slots]
        return [join_bytes(codes[x : x + 4]) for x in range(0, EACH, 4)]

    def gain(head: Register) -> Registers:
        blocks, store = entries(gains[0], entry, EACH), gains[1]
        rows = (r.at_row(store, block, 4 * g.form.columns) for block in blocks)
        return [r.load_float(r.at(row, r.mul(head, 4))) for row in rows]

    def visible() -> Registers:
        size = r.select(r.less(entry, last), r.sub(end, begin), 0)
        return [r.less(r.sub(slot, begin), size) for slot in own_slots]

    return Rows(
        levels=lambda p, x, more: r.at_row(
            levels[p], there(entries(slots, r.add(own, r.add(x, more)), 1)[0]), g.sizes[p]
        ),
        scales=scales,
        gains=gain if gains else None,
        visible=visible,
    )


def wait_for_all() -> None:
    """Wait until all warps have arrived."""

    def wait(*_: Any) -> list[Registers]:
        r.synchronize()
        return []

    inline(wait, [], [], [], [])
