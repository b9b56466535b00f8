"""Blocks of quantized keys and values, as they arrive in registers: a whole store, or listed slots (ours)."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernels_pallas.quantized.inputs import BLOCK
from kernels_pallas.quantized.packed_loads import (
    PER_ROW,
    block_rows,
    gathered_bytes,
    gathered_gains,
    gathered_rows,
)
from kernels_pallas.quantized.unpack import columns


class Geometry(NamedTuple):
    """Static shape of a launch.

    A list of slots in pages indexes all S slots of the pool, as if they were of one head of one sequence.

    Attributes:
      K: KV heads.
      S: slots of a sequence.
      page: slots per page; 0 without a block table.
      chosen: length of the list of slots; 0 without a list.
      columns: query heads per KV head, padded to eight or sixteen.
      gains: whether scores have gains.
      widths: coordinates of each plane.
      bits: bits of each plane.
      scale: factor on the scores.
      parts: parts of the keys.
      stages: blocks of keys in flight.
    """

    K: int
    S: int
    page: int
    chosen: int
    columns: int
    gains: bool
    widths: tuple[int, ...]
    bits: tuple[int, ...]
    scale: float
    parts: int
    stages: int

    def order(self, plane: int) -> np.ndarray:
        """Return the coordinate of each column of an unpacked plane."""
        return columns(self.widths[plane], self.bits[plane])

    @property
    def lists(self) -> int:
        """Number of lists: slots, and the blocks of their gains."""
        return (1 + self.gains) * (self.chosen > 0)

    @property
    def key_columns(self) -> list[Any]:
        """Coordinates of each plane of keys, as slices of all key coordinates."""
        begins = itertools.accumulate(self.widths[:-2], initial=0)
        return [pl.ds(begin, width) for begin, width in zip(begins, self.widths[:-1], strict=True)]


def view_blocks(levels: Array) -> Array:
    """View [B, K, S, P] as blocks of keys [B, K, S/64, 64·P/L, L] with L ≤ 256, without a copy.

    Rows of an asynchronous copy must have a multiple of 16 bytes.
    """
    B, K, S, P = levels.shape
    return levels.reshape(B, K, S // BLOCK, *block_shape(P))


def block_shape(P: int) -> tuple[int, int]:
    several = math.gcd(P, 4)
    return P // several, BLOCK * several


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
      gains: arranged gains.
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

    q: Any
    levels: Any
    reach: Any
    lists: Any
    gains: Any
    values: Any
    p: Any
    o: Any
    lse: Any
    largest: Any
    q_ready: Any
    ready: Any


class Span(NamedTuple):
    """Blocks first ≤ i < last of a part, and the range of valid slots begin ≤ j < end."""

    first: Array
    last: Array
    begin: Array
    end: Array

    @classmethod
    def of(cls, g: Geometry, begin: Array, end: Array, part: Array) -> "Span":
        """Divide the non-empty blocks of the store, or of the list, into equal shares."""
        low = jnp.int32(0) if g.chosen else lax.div(begin, jnp.int32(BLOCK))
        high = g.chosen // BLOCK if g.chosen else lax.div(end + (BLOCK - 1), jnp.int32(BLOCK))
        count = jnp.where(end > begin, high - low, 0)
        share = lax.div(count + (g.parts - 1), jnp.int32(g.parts))
        first = jnp.minimum(part * share, count)
        return cls(low + first, low + jnp.minimum(first + share, count), begin, end)

    def counts(self, slots: Array) -> Array:
        """Return which slots are in range."""
        return (slots >= self.begin) & (slots < self.end)


class KeyBlock(NamedTuple):
    """One block of keys.

    Attributes:
      levels: function that returns the packed levels [keys, ·] of plane i.
      reach: function that returns the scales [keys] of plane i.
      visible: which slots are in range.
      gains: what base-2 scores gain, [keys, columns], or None.
    """

    levels: Callable[[int], Array]
    reach: Callable[[int], Array]
    visible: Array
    gains: Array | None


@dataclass(frozen=True)
class Source:
    """Source of a part's blocks: planes in global memory, of one KV head of one sequence.

    `head` is the sequence and the KV head. `gains` are those of this head, or None.
    """

    g: Geometry
    at: Buffers
    span: Span
    refs: Operands
    head: tuple[Any, Any]
    gains: Any

    def begin(self) -> None:
        """Start loading, before the first block."""

    def place(self, step: Array) -> Array:
        """Look up what `ahead` needs for a step, before its block is read."""
        return jnp.int32(0)

    def block(self, step: Array) -> KeyBlock:
        """Return the block of a step."""
        raise NotImplementedError

    def ahead(self, step: Array, place: Array) -> None:
        """Start the next load, once all threads have read a step's block."""


class Stream(Source):
    """All blocks of a span, with `stages` of them in flight."""

    def begin(self) -> None:

        @pl.loop(self.span.first, jnp.minimum(self.span.first + self.g.stages, self.span.last))
        def _fill(step: Array) -> None:
            self._load(step, self._lead(step))

    def place(self, step: Array) -> Array:
        """Look up the page of the block that `ahead` loads, during the computation of the current block."""
        return self._lead(jnp.minimum(step + self.g.stages, self.span.last - 1))

    def block(self, step: Array) -> KeyBlock:
        slot, at = self._slot(step), self.at
        plgpu.barrier_wait(at.ready.at[slot])
        return KeyBlock(
            lambda i: block_rows(at.levels[i].at[slot], BLOCK, self.g.widths[i], self.g.bits[i]),
            lambda i: plgpu.load(at.reach[i].at[slot, pl.ds(0, BLOCK)], layout=PER_ROW, optimized=False),
            self.span.counts(_rows(self.g) + step * BLOCK),
            self._gains_at(slot),
        )

    def _gains_at(self, slot: Array) -> Array | None:
        if self.gains is None:
            return None
        columns, layout = self.g.columns, plgpu.Layout.WGMMA.reduce(0)
        row = plgpu.load(self.at.gains[0].at[slot, pl.ds(0, columns)], layout=layout, optimized=False)
        return spread_down(row, (BLOCK, columns))

    def ahead(self, step: Array, place: Array) -> None:

        @pl.when(step + self.g.stages < self.span.last)
        def _() -> None:
            self._load(step + self.g.stages, place)

    def _slot(self, step: Array) -> Array:
        return lax.rem(step - self.span.first, jnp.int32(self.g.stages))

    def _lead(self, step: Array) -> Array:
        """Return the sequence of a step's block, or its page."""
        if self.refs.table is None:
            return self.head[0]
        return self.refs.table[self.head[0], lax.div(jnp.maximum(step, 0), jnp.int32(self.g.page // BLOCK))]

    def _load(self, step: Array, lead: Array) -> None:
        block = step if self.refs.table is None else lax.rem(step, jnp.int32(self.g.page // BLOCK))
        rows, slot = pl.ds(pl.multiple_of(block * BLOCK, BLOCK), BLOCK), self._slot(step)
        ready, at = self.at.ready.at[slot], self.at

        @plgpu.warp_map
        def _(warp: Array) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                for source, buffer in zip(self.refs.levels, at.levels, strict=True):
                    plgpu.copy_gmem_to_smem(source.at[lead, self.head[1], block], buffer.at[slot], ready)
                for source, buffer in zip(self.refs.reach, at.reach, strict=True):
                    scales = buffer.at[slot, pl.ds(0, BLOCK)]
                    plgpu.copy_gmem_to_smem(source.at[lead, self.head[1], rows], scales, ready)
                if self.gains is not None:
                    buffer = at.gains[0].at[slot, pl.ds(0, self.g.columns)]
                    plgpu.copy_gmem_to_smem(self.gains.at[step], buffer, ready)


class Chosen(Source):
    """Blocks of listed slots. While one CTA waits for its rows, others compute."""

    def block(self, step: Array) -> KeyBlock:
        """Issue all loads before any is used."""
        slots, *blocks = (
            plgpu.load(entries.at[step], layout=PER_ROW, optimized=False) for entries in self.at.lists
        )
        visible = self.span.counts(lax.broadcast_in_dim(slots, (BLOCK, self.g.columns), [0]))
        there = jnp.clip(slots, 0, self.g.S - 1)  # Slots out of range are read as well.
        forms = zip(self.refs.levels, self.g.widths, self.g.bits, strict=True)
        levels = [gathered_rows(source.at[*self.head], there, C, bits) for source, C, bits in forms]
        reach = [gathered_bytes(source.at[*self.head], there) for source in self.refs.reach]
        gains = None if self.gains is None else gathered_gains(self.gains, blocks[0], self.g.columns)
        return KeyBlock(levels.__getitem__, reach.__getitem__, visible, gains)


def _rows(g: Geometry) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (BLOCK, g.columns), 0, layout=plgpu.Layout.WGMMA)


def spread_down(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast one value per column to all rows."""
    return lax.broadcast_in_dim(x, shape, [1])
