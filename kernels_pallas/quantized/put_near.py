"""New near tokens of a chunk of prompts, to all places that need them, in one launch (ours).

    grid: (B, K, tiles of slots, then tiles of 8 rows), Triton; 2 warps per program, no explicit barriers
    slots: load the token of each slot → quantize → ring, snapshot
           load the slot's old token → rows, if queries of the chunk still read it
    rows:  load the new token of each row → quantize → values; zeros where there is no token

Attention of a chunk reads near tokens by position: the last ones before the chunk, which the ring has, and
those of the chunk. They are read as the ring stores them; keys that left out their mean regain it. Per KV
head the kernel reads T + M tokens and writes as many. Operations are those of `encode`. A launch takes
longer than this work for most chunks, and XLA would need about fifteen.

Rings and snapshots are updated in place. A program has its own slots, of which it reads the old tokens before
it writes new ones, so that programs need no order. Within a program that order rests on Triton: each thread
writes the levels that it read itself, and scales are stored after a barrier that Triton inserts. So it was in
the code compiled for 128 coordinates and tiles of 4 and 8 slots.

JAX plans to drop Pallas' Triton back end. Without it `check_put_near` raises, and XLA does the work.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import GAIN_BLOCK, Shaped
from kernels_pallas.lowering import lower_once
from kernels_pallas.prefill.inputs import Trailing, first_near_row, rows_before
from kernels_pallas.quantized.block_means import BlockMeans, check_means
from kernels_pallas.quantized.encode import coded
from kernels_pallas.quantized.inputs import Plane
from kernels_pallas.quantized.short_scales import from_e5m3
from kernels_pallas.triton import check_addressed, check_back_end, check_bytes, pieces, plt

BITS = 8
"""Bits per level of a ring."""
ROWS = 8
"""Rows per program, and largest number of slots."""


class RingSnapshots(NamedTuple):
    """Copies of rings at earlier lengths.

    Attributes:
      planes: copies of each ring, with levels [copies, K, M, C] and scales [copies, K, M].
      marks: number of tokens of each sequence in its copy, at least `starts`, [B] int32.
      slots: number of each copy, [B] int32; copies with other numbers are not made.
    """

    planes: Sequence[Plane]
    marks: Array
    slots: Array


class NearTokens(NamedTuple):
    """Result of `put_near`.

    Attributes:
      rings: rings with the new tokens.
      snapshots: planes of the copies; none without `RingSnapshots`.
      trailing: near tokens that the queries of the chunk read.
    """

    rings: Sequence[Plane]
    snapshots: Sequence[Plane]
    trailing: Trailing


class _Geometry(NamedTuple):
    """Static shape of a launch: slots M of a ring, slots per program, sinks and window."""

    M: int
    tile: int
    sinks: int
    window: int


class _Numbers(NamedTuple):
    """Numbers of one sequence; `row` is its ring, and `first` the position of the first row."""

    row: Array
    start: Array
    end: Array
    first: Array
    mark: Array
    copy: Array


def check_put_near(
    x: Sequence[Shaped],
    rings: Sequence[Plane],
    rows: Shaped,
    starts: Shaped,
    ends: Shaped,
    *,
    sinks: int,
    window: int,
    snapshots: RingSnapshots | None = None,
    means: BlockMeans | None = None,
) -> None:
    """Check the arguments of `put_near`; errors are those it documents."""
    check_back_end()
    B, T, K, _ = x[0].shape
    N, _, M = rings[0].reach.shape
    common.check_sizes(B=B, T=T, K=K)
    if sinks < 0 or window < 1 or sinks + window > M:
        raise ValueError(f"{sinks=}, {window=}: a window, together with sinks, must be 1 to {M}, the slots")
    if snapshots is not None and len(snapshots.planes) != len(rings):
        raise ValueError(f"snapshots.planes has {len(snapshots.planes)} planes: must be {len(rings)}")
    for i, (array, ring) in enumerate(zip(x, rings, strict=True)):
        copies = [] if snapshots is None else [(f"snapshots.planes[{i}]", snapshots.planes[i])]
        for name, plane in ((f"rings[{i}]", ring), *copies):
            if plane.bits != BITS:
                raise ValueError(f"{name} has {plane.bits} bits: must be {BITS}")
        common.check_floats(f"x[{i}]", array, (B, T, K, ring.width), "B, T, K, C")
        if array.dtype != x[0].dtype:
            raise ValueError(f"x[{i}] has dtype {array.dtype}: must be {x[0].dtype}, as x[0] has")
        check_bytes(f"x[{i}]", array)
        for name, plane in ((f"rings[{i}]", ring), *copies):
            count = N if plane is ring else plane.reach.shape[0]
            check_addressed(name, plane, (count, K, M))
            if plane.width != ring.width:
                raise ValueError(f"{name} has {plane.width} coordinates: must be {ring.width}")
    check_means(means, B, K, rings[0].width)
    common.check_rows(B, rows=rows, starts=starts, ends=ends)
    if snapshots is not None:
        common.check_rows(B, **{"snapshots.marks": snapshots.marks, "snapshots.slots": snapshots.slots})


@lower_once("sinks", "window", "interpret")
@common.checked_by(check_put_near)
def put_near(
    x: Sequence[Float[Array, "B T K _"]],
    rings: Sequence[Plane],
    rows: Int[Array, " B"],
    starts: Int[Array, " B"],
    ends: Int[Array, " B"],
    *,
    sinks: int,
    window: int,
    snapshots: RingSnapshots | None = None,
    means: BlockMeans | None = None,
    interpret: bool = False,
) -> NearTokens:
    """Quantize tokens at positions `starts` … `ends` - 1 into rings; list what their queries read.

    Args:
      x: keys and values of the chunk, float arrays of equal dtype; tokens from `ends` on are padding.
      rings: rings of keys and of values, of 8 bits, levels [N, K, M, C] and scales [N, K, M].
      rows: ring of each sequence, int32, all different; sequences with other numbers are not stored.
      starts: position of the first new token of each sequence, int32.
      ends: number of tokens of each sequence, int32, at most `starts` + T (not checked).
      sinks: sinks of the rings; sink p is in slot window + p.
      window: window of the rings, at least 1; position p is in slot p mod window.
      snapshots: copies of rings to make.
      means: what keys gain where queries read them, but for sinks; neither rings nor sinks have it.
      interpret: whether to run on any device, slowly.

    Returns:
      Rings and snapshots, in the same memory if their arrays are donated, and the near tokens, in the dtype
      of x. Rows without a near token are zeros, or the means of keys.

    Raises:
      ValueError: a shape or dtype is not allowed. Raised before launch, with name and value.
      NotImplementedError: JAX has no Triton back end.
    """
    first = first_near_row(starts, window)
    marks, slots = (snapshots.marks, snapshots.slots) if snapshots else (ends, ends)
    numbers = jnp.stack(_Numbers(rows, starts, ends, first, marks, slots), 1).astype(jnp.int32)
    (B, T, K, _), M = x[0].shape, rings[0].reach.shape[2]
    # Interpreted stores write the old value where a mask is false, perhaps to the place of another token.
    g = _Geometry(M, 1 if interpret else math.gcd(M, ROWS), sinks, window)
    like: Any = jax.ShapeDtypeStruct
    total = pl.cdiv(rows_before(window) + T, ROWS) * ROWS
    near = [like((B, K, total, each.shape[3]), each.dtype) for each in x]
    of_sinks = [like((B, K, M - window, each.shape[3]), each.dtype) for each in x] if sinks else []
    planes = rings, snapshots.planes if snapshots else []
    before = 1 + len(x) + len(jax.tree.leaves(means))  # Arrays before the planes.
    stored = jax.tree.map(lambda leaf: like(leaf.shape, leaf.dtype), planes)
    (rings, copies), (k, v), of_sinks = pl.pallas_call(
        functools.partial(_kernel, g=g),
        out_shape=(stored, near, of_sinks),
        grid=(B, K, M // g.tile + total // ROWS),
        input_output_aliases={before + i: i for i in range(len(jax.tree.leaves(planes)))},
        compiler_params=plt.CompilerParams(num_warps=2),
        interpret=interpret,
        name="zdc_put_near",
    )(numbers, x, means, planes)
    return NearTokens(rings, copies, Trailing(k, v, first, *of_sinks))


def _kernel(
    numbers_ref: Any,
    x_refs: Any,
    means: BlockMeans | None,
    _before: Any,
    stored: Any,
    near: Any,
    of_sinks: Any,
    *,
    g: _Geometry,
) -> None:
    # `_before` shares memory with `stored`.
    b, kv, part = (pl.program_id(axis) for axis in range(3))
    numbers = _Numbers(*(numbers_ref[b, i] for i in range(len(_Numbers._fields))))
    slot_tiles = g.M // g.tile
    rings, copies = stored

    @pl.when(part < slot_tiles)
    def _slots() -> None:
        slot = part * g.tile + lax.broadcasted_iota(jnp.int32, (g.tile, 1), 0)
        for i, (x_ref, ring, near_ref) in enumerate(zip(x_refs, rings, near, strict=True)):
            copy, sink_ref = (each[i] if each else None for each in (copies, of_sinks))
            tokens = _Tokens(x_ref, b, kv, None if i else means)
            _put_slots(tokens, ring, copy, near_ref, sink_ref, slot, numbers, g)

    @pl.when(part >= slot_tiles)
    def _rows() -> None:
        row = (part - slot_tiles) * ROWS + lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0)
        position = numbers.first + row
        recent = (position >= numbers.start - g.window) | (position < g.sinks)
        is_old = recent & (position < numbers.start)
        for i, (x_ref, near_ref) in enumerate(zip(x_refs, near, strict=True)):
            tokens = _Tokens(x_ref, b, kv, None if i else means)
            is_new = (position >= numbers.start) & (position < numbers.end)
            values = _values(*tokens.quantize(position - numbers.start, is_new))
            tokens.put(near_ref, b, row, tokens.add_means(values, position), ~is_old)


class _Tokens(NamedTuple):
    """New tokens of one array, sequence and KV head; `means` is what queries read in addition."""

    ref: Any
    b: Array
    kv: Array
    means: BlockMeans | None

    def quantize(self, token: Array, kept: Array) -> tuple[list[Array], Array]:
        """Return levels, by parts of the coordinates, and scales of tokens [n, 1]; zeros if not kept."""
        token = jnp.clip(token, 0, self.ref.shape[1] - 1)
        x = [
            plt.load(self.ref.at[self.b, token, self.kv, column], mask=kept, other=0.0)
            for column in self.columns()
        ]
        return coded([part.astype(jnp.float32) for part in x], BITS)

    def load(self, plane: Any, row: Array, slot: Array) -> tuple[list[Array], Array]:
        """Return levels and scales that a plane stores, as `quantize` does."""
        levels = [
            plt.load(plane.levels.at[row, self.kv, slot, column]).astype(jnp.int32)
            for column in self.columns()
        ]
        return levels, plt.load(plane.reach.at[row, self.kv, slot])[:, 0]

    def put(self, ref: Any, row: Array, index: Array, parts: Sequence[Array], mask: Array) -> None:
        """Write parts of tokens [n, ·] to an array with their coordinates on the last axis."""
        for column, part in zip(self.columns(), parts, strict=True):
            plt.store(ref.at[row, self.kv, index, column], part.astype(ref.dtype), mask=mask)

    def add_means(self, parts: Sequence[Array], position: Array) -> list[Array]:
        """Return parts of tokens at positions [n, 1] as queries read them."""
        if self.means is None:
            return list(parts)
        block = lax.div(jnp.maximum(position, 0), jnp.int32(GAIN_BLOCK))
        return [
            part + self.means.load(self.b, self.kv, block, column)
            for column, part in zip(self.columns(), parts, strict=True)
        ]

    def columns(self) -> list[Array]:
        """Return the coordinates of each part."""
        spans = pieces(self.ref.shape[3])
        return [begin + lax.broadcasted_iota(jnp.int32, (1, width), 1) for begin, width in spans]


def _put_slots(
    tokens: _Tokens,
    ring: Any,
    copy: Any,
    near_ref: Any,
    sink_ref: Any,
    slot: Array,
    numbers: _Numbers,
    g: _Geometry,
) -> None:
    """Write tokens to slots [n, 1] of a ring and of its copy, and list the old ones that queries read."""
    there = (numbers.row >= 0) & (numbers.row < ring.reach.shape[0])
    row = jnp.clip(numbers.row, 0, ring.reach.shape[0] - 1)
    old = tokens.load(ring, row, slot)

    def fill(length: Array) -> tuple[tuple[list[Array], Array], Array]:
        """Return levels and scales of the slots at a length, and which are of new tokens."""
        position = _find_positions(slot, length, g)
        kept = position >= numbers.start
        new_levels, new_reach = tokens.quantize(position - numbers.start, kept)
        levels = [jnp.where(kept, *pair) for pair in zip(new_levels, old[0], strict=True)]
        return (levels, jnp.where(kept[:, 0], new_reach, old[1])), kept

    (levels, reach), kept = fill(numbers.end)
    _store(tokens, ring, row, slot, (levels, reach), kept & there)
    if sink_ref is not None:
        sink = jnp.maximum(slot - g.window, 0)
        tokens.put(sink_ref, tokens.b, sink, _values(levels, reach), slot >= g.window)
    if copy is not None:
        count = copy.reach.shape[0]
        is_wanted = (numbers.copy >= 0) & (numbers.copy < count) & (slot >= 0)
        at = jnp.clip(numbers.copy, 0, count - 1)
        _store(tokens, copy, at, slot, fill(numbers.mark)[0], is_wanted)
    position = _find_positions(slot, numbers.start, g)
    is_read = position >= numbers.first
    index = jnp.maximum(position - numbers.first, 0)
    tokens.put(near_ref, tokens.b, index, tokens.add_means(_values(*old), position), is_read)


def _store(
    tokens: _Tokens, plane: Any, row: Array, slot: Array, token: tuple[list[Array], Array], mask: Array
) -> None:
    """Write levels and scales to slots of a plane."""
    levels, reach = token
    tokens.put(plane.levels, row, slot, levels, mask)
    plt.store(plane.reach.at[row, tokens.kv, slot], reach[:, None], mask=mask)


def _find_positions(slot: Array, length: Array, g: _Geometry) -> Array:
    """Return the positions in slots of a ring of `length` tokens; negative for empty slots."""
    last = length - 1
    recent = last - lax.rem(last - slot + g.window, jnp.int32(g.window))
    sink = slot - g.window
    is_recent = slot < g.window
    occupied = jnp.where(is_recent, recent >= g.sinks, (sink < g.sinks) & (sink <= last))
    return jnp.where(occupied, jnp.where(is_recent, recent, sink), -1)


def _values(levels: Sequence[Array], reach: Array) -> list[Array]:
    """Return what levels [n, ·] with scales [n] stand for, float32."""
    step = (from_e5m3(reach) / 2**BITS)[:, None]
    return [(2 * level.astype(jnp.float32) + (1 - 2**BITS)) * step for level in levels]
