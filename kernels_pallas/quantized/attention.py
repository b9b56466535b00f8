"""Attention of one new token per sequence to quantized keys and values (ours).

    grid: (B·K, parts); one warpgroup per CTA
    stream of blocks:   TMA levels, scales → ready[slot]   (`stages` in flight)
    list of slots:      loads from global memory into registers

    each block of 64 keys:
        | Sᵀ = K qᵀ     | K unpacked in registers, q in shared memory |
        | softmax       | along keys, over all four warps             |
        | Oᵀ += Vᵀ Pᵀ   | V unpacked into shared memory               |

    then write the partial output and log-sum-exp; `decode.merge` merges them

Per token and KV head the kernel reads C·bits/8 + 1 bytes of each plane, and computes 2 G (C + Z) FLOP. Levels
become bfloat16 in registers (`unpack`). Keys are the rows of the products; the few query heads
of a KV head are eight or sixteen columns. Scales of keys multiply scores, those of values probabilities.

A running maximum would need a reduction over all four warps in every block. Instead each part uses the
maximum of its first block throughout. Float32 then holds probabilities up to 2^127 times the largest of that
block; those below 2^-126 of it vanish. If a later sum exceeds 2^60, the part is repeated with a running
maximum.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas.common import LOG2_E, NEVER, filled, tile_width, tiled
from kernels_pallas.decode.merge import Parts, merged
from kernels_pallas.quantized.inputs import BLOCK, CodedConfig, Plane, check_coded, config_for, rows_of
from kernels_pallas.quantized.packed_loads import (
    PER_ROW,
    block_rows,
    gathered_bytes,
    gathered_gains,
    gathered_rows,
)
from kernels_pallas.quantized.queries import arrange_gains, arrange_queries
from kernels_pallas.quantized.short_scales import from_e5m3
from kernels_pallas.quantized.unpack import columns, unpacked

LARGEST_SUM = 2.0**60
"""Sum of probabilities, relative to the first block's, above which the running maximum is needed."""
ALIGNED = 128
"""Alignment in bytes of an asynchronous copy's destination in shared memory."""


def coded_attention(
    q: Float[Array, "B N R"],
    keys: Sequence[Plane],
    values: Plane,
    begin: Int[Array, " B"],
    end: Int[Array, " B"],
    *,
    scale: float,
    slots: Int[Array, "B K n"] | None = None,
    block_table: Int[Array, "B pages"] | None = None,
    gains: Float[Array, "B N blocks"] | None = None,
    blocks: Int[Array, "B K n"] | None = None,
    config: CodedConfig | None = None,
) -> tuple[Float[Array, "B N Z"], Float[Array, "B N"]]:
    """Compute attention of each sequence's last token over the slots begin ≤ j < end; only these are read.

    Args:
      q: queries, bfloat16, with as many coordinates as `keys` have together.
      keys: one or two planes of consecutive coordinates (an index, and the rest). Planes have levels of 2 to
        6 or 8 bits and a multiple of 16 coordinates, up to 256.
      values: one plane. Z is a multiple of 64, and so is S without `slots`.
      begin: first slot of each sequence.
      end: end of the slots of each sequence. An empty range gives zeros and -inf; slots past S are ignored.
      scale: factor on the scores, 1/√H of the original head dimension.
      slots: int32 list of slots to read, if not all. Each counts as often as it is listed, if it is in range.
      block_table: table of a pool of pages (`Plane`). Without `slots`, pages have a multiple of 64 slots.
      gains: what scaled scores gain in each block of keys, float32; without `slots`, of 64 slots.
      blocks: block of `gains` of each entry of `slots`, int32; None means slot / 64.
      config: how keys are divided; None uses the measured or default config.

    Returns:
      The output in bfloat16, and the natural log-sum-exp of the scaled scores in float32. A token whose scale
      is NaN makes both NaN.

    Raises:
      ValueError: a shape, dtype or number of bits is not allowed. Raised before launch, with name and value.
      NotImplementedError: the GPU has another compute capability than 9.0.
    """
    given: dict[str, Any] = {"slots": slots, "block_table": block_table, "gains": gains, "blocks": blocks}
    parts = coded_parts(q, keys, values, begin, end, scale=scale, config=config, **given)
    return merged(parts, q.shape[1] // parts.o.shape[1], q.dtype)


def coded_parts(
    q: Float[Array, "B N R"] | Float[Array, "B K columns R"],
    keys: Sequence[Plane],
    values: Plane,
    begin: Int[Array, " B"],
    end: Int[Array, " B"],
    *,
    scale: float,
    slots: Int[Array, "B K n"] | None = None,
    block_table: Int[Array, "B pages"] | None = None,
    gains: Float[Array, "B N blocks"] | Float[Array, "B K blocks columns"] | None = None,
    blocks: Int[Array, "B K n"] | None = None,
    config: CodedConfig | None = None,
) -> Parts:
    """Compute `coded_attention` without merging the parts; errors are the same.

    Queries and gains may be arranged already (`kernels_pallas.quantized.queries`).
    """
    given: dict[str, Any] = {"slots": slots, "block_table": block_table, "gains": gains, "blocks": blocks}
    check_coded(q, keys, values, begin, end, config=config, **given)
    config = config or config_for(keys, values, 0 if slots is None else slots.shape[2], block_table)
    planes = [(plane.levels, plane.reach) for plane in (*keys, values)]
    bits = tuple(plane.bits for plane in (*keys, values))
    arrays = q, planes, begin, end, slots, block_table, gains, blocks
    return _launch(*arrays, bits=bits, scale=scale, config=config)


@functools.partial(jax.jit, static_argnames=("bits", "scale", "config"))
def _launch(
    q: Array,
    planes: Sequence[tuple[Array, Array]],
    begin: Array,
    end: Array,
    slots: Array | None,
    block_table: Array | None,
    gains: Array | None,
    blocks: Array | None,
    *,
    bits: tuple[int, ...],
    scale: float,
    config: CodedConfig,
) -> Parts:
    """Launch `coded_parts` on checked arguments; `planes` are levels and scales of keys, then of values."""
    widths = tuple(levels.shape[-1] * 8 // b for (levels, _), b in zip(planes, bits, strict=True))
    B, K, S = rows_of(planes[0][1], block_table)
    Z, page = widths[-1], planes[0][1].shape[2]
    if q.ndim == 3:
        q = arrange_queries(q, K, list(zip(widths, bits, strict=True))[:-1])
    more = [] if block_table is None else [block_table]
    if gains is not None and gains.ndim == 3:
        gains = arrange_gains(gains, K)
    if slots is not None:
        blocks = slots // BLOCK if blocks is None else blocks
        if block_table is not None:
            slots, begin, end = _in_pool(slots, begin, end, block_table, planes[0][1].shape)
            planes = [(x.reshape(1, 1, -1, x.shape[-1]), reach.reshape(1, 1, -1)) for x, reach in planes]
            S = planes[0][1].size
        # Slot S is out of range, so padding is ignored.
        slots = _in_blocks(slots, S)
        more = [slots]
        if gains is not None:
            more.append(_in_blocks(jnp.clip(blocks, 0, gains.shape[2] - 1), 0))
    if gains is not None:
        more.append(gains)
    g = _Geometry(
        K=K,
        S=S,
        page=0 if block_table is None else page,
        chosen=0 if slots is None else slots.shape[2] * BLOCK,
        columns=q.shape[2],
        gains=gains is not None,
        widths=widths,
        bits=bits,
        scale=scale,
        parts=config.splits,
        stages=config.stages,
    )
    partial, lse = plgpu.kernel(
        functools.partial(_kernel, g=g),
        out_type=[
            jax.ShapeDtypeStruct((B, K, g.parts, Z, g.columns), jnp.float32),
            jax.ShapeDtypeStruct((B, K, g.parts, g.columns), jnp.float32),
        ],
        grid=(B * K, g.parts),
        grid_names=("head", "part"),
        kernel_name="zdc_coded_decode",
        # The kernel places its own barriers between writes and reads of shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(
        begin.astype(jnp.int32),
        end.astype(jnp.int32),
        q,
        *(levels if g.chosen else _blocks(levels) for levels, _ in planes),
        *(reach for _, reach in planes),
        *more,
    )
    return Parts(partial, lse, order=tuple(map(int, g.order(-1))), transposed=True)


def _in_blocks(entries: Array, fill: int) -> Array:
    """Divide the entries of lists [B, K, n] into blocks, int32 [B, K, ⌈n/64⌉, 64], padded with `fill`."""
    B, K, n = entries.shape
    padded = jnp.pad(entries, ((0, 0), (0, 0), (0, -n % BLOCK)), constant_values=fill)
    return padded.astype(jnp.int32).reshape(B, K, -1, BLOCK)


def _in_pool(
    slots: Array, begin: Array, end: Array, block_table: Array, pool: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    """Convert a list of slots to slots of a pool [P, K, page size] that is treated as one sequence.

    Slots out of range become -1, because their page may have any value.

    Returns:
      The slots, and begin and end of the pool.
    """
    P, K, page = pool
    S, of_row = block_table.shape[1] * page, lambda x: x[:, None, None]
    slots = slots.astype(jnp.int32)
    counts = (slots >= jnp.maximum(of_row(begin), 0)) & (slots < jnp.minimum(of_row(end), S))
    inside = jnp.where(counts, slots, 0)
    entry = jnp.take_along_axis(block_table[:, None], inside // page, axis=2, mode="promise_in_bounds")
    found = (entry * K + jnp.arange(K, dtype=jnp.int32)[:, None]) * page + inside % page
    last = jnp.where(begin < end, P * K * page, 0)
    return jnp.where(counts, found, -1), jnp.zeros_like(last), last


class _Geometry(NamedTuple):
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


def _blocks(levels: Array) -> Array:
    """View [B, K, S, P] as blocks of keys [B, K, S/64, 64·P/L, L] with L ≤ 256, without a copy.

    Rows of an asynchronous copy must have a multiple of 16 bytes.
    """
    B, K, S, P = levels.shape
    return levels.reshape(B, K, S // BLOCK, *_block_shape(P))


def _block_shape(P: int) -> tuple[int, int]:
    several = math.gcd(P, 4)
    return P // several, BLOCK * several


def _kernel(*refs: Any, g: _Geometry) -> None:
    planes, Z = len(g.widths), g.widths[-1]
    sizes = [C * b // 8 for C, b in zip(g.widths, g.bits, strict=True)]
    pl.run_scoped(
        functools.partial(_part, refs, g),
        _Buffers(
            q=[
                # Copies must begin at whole tiles.
                tiled(g.columns, at.size, dtype=jnp.bfloat16, width=math.gcd(tile_width(at.size), at.start))
                for at in g.key_columns
            ],
            levels=[] if g.chosen else [plgpu.SMEM((g.stages, *_block_shape(P)), jnp.uint8) for P in sizes],
            reach=[] if g.chosen else [plgpu.SMEM((g.stages, ALIGNED), jnp.uint8) for _ in sizes],
            lists=[plgpu.SMEM((g.chosen // BLOCK, BLOCK), jnp.int32)] * g.lists,
            gains=[plgpu.SMEM((g.stages, ALIGNED // 4), jnp.float32)] if g.gains and not g.chosen else [],
            values=tiled(BLOCK, Z, dtype=jnp.bfloat16, width=64),
            p=tiled(g.columns, BLOCK, dtype=jnp.bfloat16, width=64),
            o=plgpu.SMEM((Z, g.columns), jnp.float32),
            lse=plgpu.SMEM((g.columns,), jnp.float32),
            largest=plgpu.SMEM((1,), jnp.float32),
            q_ready=plgpu.Barrier(num_arrivals=planes - 1 + g.lists),
            ready=plgpu.Barrier(num_barriers=g.stages, num_arrivals=2 * planes + (g.gains and not g.chosen)),
        ),
    )


class _Buffers(NamedTuple):
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


def _part(refs: Any, g: _Geometry, at: _Buffers) -> None:
    """Run one CTA: its share of the blocks of one KV head of one sequence."""
    begin_ref, end_ref, q_ref, *others = refs
    sources, (*more, o_ref, lse_ref) = others[: 2 * len(g.widths)], others[2 * len(g.widths) :]
    head, part = lax.axis_index("head"), lax.axis_index("part")
    b, kv = lax.div(head, jnp.int32(g.K)), lax.rem(head, jnp.int32(g.K))

    def inside(slot):
        return jnp.clip(slot, 0, g.S)

    span = _Span.of(g, inside(begin_ref[b]), inside(end_ref[b]), part)
    for coordinates, buffer in zip(g.key_columns, at.q, strict=True):
        plgpu.copy_gmem_to_smem(q_ref.at[b, kv, pl.ds(0, g.columns), coordinates], buffer, at.q_ready)
    gains = more.pop().at[b, kv] if g.gains else None
    source: _Source
    for entries, buffer in zip(more, at.lists, strict=False):
        plgpu.copy_gmem_to_smem(entries.at[b, kv], buffer, at.q_ready)
    if g.chosen:
        source = _Chosen(g, at, span, sources, (0, 0) if g.page else (b, kv), gains)
    else:
        source = _Stream(g, at, span, sources, (b, kv), gains, *more)
    plgpu.barrier_wait(at.q_ready)

    @pl.loop(0, 2)
    def _attempt(number: Array) -> None:
        # Negated, so that NaN also repeats the part.
        @pl.when((number == 0) | jnp.logical_not(at.largest[0] < LARGEST_SUM))
        def _() -> None:
            settled = jnp.where(number == 0, jnp.minimum(span.first + 1, span.last), span.last)
            _store(g, at, *_accumulate(g, at, span, settled, source))

    plgpu.copy_smem_to_gmem(at.o, o_ref.at[b, kv, part])
    plgpu.copy_smem_to_gmem(at.lse, lse_ref.at[b, kv, part])
    plgpu.wait_smem_to_gmem(0)


class _Span(NamedTuple):
    """Blocks first ≤ i < last of a part, and the range of valid slots begin ≤ j < end."""

    first: Array
    last: Array
    begin: Array
    end: Array

    @classmethod
    def of(cls, g: _Geometry, begin: Array, end: Array, part: Array) -> "_Span":
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


class _Block(NamedTuple):
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
class _Source:
    """Source of a part's blocks: planes in global memory, of one KV head of one sequence.

    `gains` are those of this head, or None. `table` is the block table of a paged cache.
    """

    g: _Geometry
    at: _Buffers
    span: "_Span"
    sources: Any
    head: tuple[Any, Any]
    gains: Any = None
    table: Any = None

    def begin(self) -> None:
        """Start loading, before the first block."""

    def place(self, step: Array) -> Array:
        """Look up what `ahead` needs for a step, before its block is read."""
        return jnp.int32(0)

    def block(self, step: Array) -> _Block:
        """Return the block of a step."""
        raise NotImplementedError

    def ahead(self, step: Array, place: Array) -> None:
        """Start the next load, once all threads have read a step's block."""


class _Stream(_Source):
    """All blocks of a span, with `stages` of them in flight."""

    def begin(self) -> None:

        @pl.loop(self.span.first, jnp.minimum(self.span.first + self.g.stages, self.span.last))
        def _fill(step: Array) -> None:
            self._load(step, self._lead(step))

    def place(self, step: Array) -> Array:
        """Look up the page of the block that `ahead` loads, during the computation of the current block."""
        return self._lead(jnp.minimum(step + self.g.stages, self.span.last - 1))

    def block(self, step: Array) -> _Block:
        slot, at = self._slot(step), self.at
        plgpu.barrier_wait(at.ready.at[slot])
        return _Block(
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
        return _down(row, (BLOCK, columns))

    def ahead(self, step: Array, place: Array) -> None:

        @pl.when(step + self.g.stages < self.span.last)
        def _() -> None:
            self._load(step + self.g.stages, place)

    def _slot(self, step: Array) -> Array:
        return lax.rem(step - self.span.first, jnp.int32(self.g.stages))

    def _lead(self, step: Array) -> Array:
        """Return the sequence of a step's block, or its page."""
        if self.table is None:
            return self.head[0]
        return self.table[self.head[0], lax.div(jnp.maximum(step, 0), jnp.int32(self.g.page // BLOCK))]

    def _load(self, step: Array, lead: Array) -> None:
        block = step if self.table is None else lax.rem(step, jnp.int32(self.g.page // BLOCK))
        rows, slot = pl.ds(pl.multiple_of(block * BLOCK, BLOCK), BLOCK), self._slot(step)
        levels = [(block, buffer.at[slot]) for buffer in self.at.levels]
        reach = [(rows, buffer.at[slot, pl.ds(0, BLOCK)]) for buffer in self.at.reach]

        @plgpu.warp_map
        def _(warp: Array) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                for source, (place, buffer) in zip(self.sources, (*levels, *reach), strict=True):
                    at = source.at[lead, self.head[1], place]
                    plgpu.copy_gmem_to_smem(at, buffer, self.at.ready.at[slot])
                if self.gains is not None:
                    buffer = self.at.gains[0].at[slot, pl.ds(0, self.g.columns)]
                    plgpu.copy_gmem_to_smem(self.gains.at[step], buffer, self.at.ready.at[slot])


class _Chosen(_Source):
    """Blocks of listed slots. While one CTA waits for its rows, others compute."""

    def block(self, step: Array) -> _Block:
        """Issue all loads before any is used."""
        slots, *blocks = (
            plgpu.load(entries.at[step], layout=PER_ROW, optimized=False) for entries in self.at.lists
        )
        visible = self.span.counts(lax.broadcast_in_dim(slots, (BLOCK, self.g.columns), [0]))
        there = jnp.clip(slots, 0, self.g.S - 1)  # Slots out of range are read as well.
        stores, found = [source.at[*self.head] for source in self.sources], []
        for store, C, bits in zip(stores, self.g.widths, self.g.bits, strict=False):
            found.append(gathered_rows(store, there, C, bits))
        reach = [gathered_bytes(store, there) for store in stores[len(found) :]]
        gains = None if self.gains is None else gathered_gains(self.gains, blocks[0], self.g.columns)
        return _Block(found.__getitem__, reach.__getitem__, visible, gains)


def _rows(g: _Geometry) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (BLOCK, g.columns), 0, layout=plgpu.Layout.WGMMA)


def _accumulate(
    g: _Geometry, at: _Buffers, span: _Span, settled: Array, source: _Source
) -> tuple[Array, Array, Array]:
    """Accumulate the part's blocks; the maximum is that of the blocks before `settled`.

    Returns:
      Weighted values [Z, columns], and maximum and sum of the probabilities [columns].
    """
    source.begin()

    def body(step: Array, carry: Any, *, running: bool) -> Any:
        place = source.place(step)
        return _add_block(g, at, source.block(step), lambda: source.ahead(step, place), carry, running)

    column = plgpu.Layout.WGMMA.reduce(0)
    carry = (
        filled((g.widths[-1], g.columns), 0, plgpu.Layout.WGMMA),
        filled((g.columns,), NEVER, column),
        filled((BLOCK, g.columns), 0, plgpu.Layout.WGMMA),
    )
    carry = lax.fori_loop(span.first, settled, functools.partial(body, running=True), carry)
    acc, m, l = lax.fori_loop(settled, span.last, functools.partial(body, running=False), carry)
    return acc, m, l.sum(axis=0)


def _add_block(
    g: _Geometry, at: _Buffers, block: _Block, have_read: Callable[[], None], carry: Any, running: bool
) -> Any:
    """Add one block to the softmax; `l` is summed over keys at the end.

    `have_read` is called when all threads have read the block, during the tensor-core product.
    """
    acc, m, l = carry
    shape, last = (BLOCK, g.columns), len(g.widths) - 1

    def unpack(i):
        return unpacked(block.levels(i), g.widths[i], g.bits[i])

    def steps(i):
        return _steps(block.reach(i), g.bits[i], shape)

    scores = sum(_product(unpack(i), at.q[i], shape) * steps(i) for i in range(last)) * (g.scale * LOG2_E)
    if block.gains is not None:
        scores = scores + block.gains
    _wait_for_all()
    at.values[...] = unpack(last)
    scores = jnp.where(block.visible, scores, -jnp.inf)
    if running:
        highest = jnp.maximum(m, scores.max(axis=0))
        alpha, m = jnp.exp2(m - highest), highest
        acc, l = acc * _down(alpha, acc.shape), l * _down(alpha, shape)
    p = jnp.exp2(scores - _down(m, shape))
    # Slots out of range may contain NaN.
    weights = jnp.where(block.visible, p * steps(last), 0.0).astype(jnp.bfloat16)
    at.p.transpose((1, 0))[...] = plgpu.layout_cast(weights, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()

    return acc + _product(at.values.transpose((1, 0)), at.p, acc.shape, have_read), m, l + p


@plgpu.inline_mgpu()
def _wait_for_all(_: Any) -> None:
    """Synchronize the warps: all have read the block, and their writes for the previous one."""
    mgpu.warpgroup_barrier()


def _product(a: Any, b: Any, shape: tuple[int, int], meanwhile: Callable[[], None] = lambda: None) -> Array:
    """Compute a bᵀ in float32; a is in registers or shared memory, b in shared memory."""

    def product(result: Any) -> Array:
        plgpu.wgmma(result, a, b.transpose((1, 0)))
        meanwhile()
        return result[...]

    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def _steps(reach: Array, bits: int, shape: tuple[int, int]) -> Array:
    """Return scale/2^bits of each key, broadcast along the rows of `shape`; `reach` is in e5m3."""
    return lax.broadcast_in_dim(from_e5m3(reach) * 2.0**-bits, shape, [0])


def _down(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast one value per column to all rows."""
    return lax.broadcast_in_dim(x, shape, [1])


def _store(g: _Geometry, at: _Buffers, acc: Array, m: Array, l: Array) -> None:
    at.o[...] = acc * _down(jnp.where(l == 0, 0.0, 1.0 / l), acc.shape)
    at.lse[...] = jnp.where(l == 0, -jnp.inf, m / LOG2_E + jnp.log(l))
    at.largest[...] = lax.broadcast_in_dim(l.max(axis=0), (1,), [])
    plgpu.commit_smem()
