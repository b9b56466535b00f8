"""Attention of one new token per row to keys and values in few bits, read as integers (ours).

Levels become bfloat16 in registers (`kernels_pallas.unpack`). Keys are the *rows* of products with the few
query heads of their KV head, eight or sixteen columns: Sᵀ = K qᵀ with K from registers, Oᵀ = Vᵀ Pᵀ with V
through shared memory. Steps of keys multiply scores, those of values probabilities.

The running maximum of a softmax would be a sum over all four warps at every step. Here each part takes the
maximum of its first block for all that follow: float32 holds probabilities up to 2^127 times as large as the
largest of them, and what is less than 2^-126 of it counts for nothing. Where a later key is 2^60 times as
likely, the part is done again with a running maximum.
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

from kernels_pallas.coded_inputs import BLOCK, CodedConfig, Plane, check_coded, config_for, rows_of
from kernels_pallas.common import LOG2_E, NEVER, filled, tile_width, tiled
from kernels_pallas.parts import Parts, merged
from kernels_pallas.rows import PER_ROW, block_rows, gathered_bytes, gathered_rows
from kernels_pallas.short_scales import from_e5m3
from kernels_pallas.unpack import columns, unpacked

LARGEST_SUM = 2.0**60
"""Of probabilities relative to the first block's; above it the running maximum is needed."""
ALIGNED = 128
"""Bytes that an asynchronous copy's place in shared memory is a multiple of."""


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
    config: CodedConfig | None = None,
) -> tuple[Float[Array, "B N Z"], Float[Array, "B N"]]:
    """Attention of each row's last token over the slots begin ≤ j < end, which alone are read.

    Args:
      q: bfloat16, as many coordinates as `keys` have together.
      keys: one or two planes of consecutive coordinates (an index, and the rest). values: one plane. Levels
        have 2 to 6 bits, or 8; planes a multiple of 16 coordinates, up to 256. Z is a multiple of 64, and S,
        too, where there are no `slots`.
      begin, end: of each row; a row of none gives zeros and -inf, slots that are not there count for nothing.
      scale: factor on the scores, 1/√H of the original head dim.
      slots: with it, only those of these slots that count are read, each as often as it is there; int32.
      block_table: with it planes are a pool of pages (`Plane`), of a multiple of 64 slots each where there
        are no `slots`.
      config: how keys are cut; None takes the measured or default one.

    Returns:
      o in bfloat16; the natural log-sum-exp of scaled scores, float32. A token whose reach says that it is no
      number makes the result so.

    Raises:
      ValueError: a shape, dtype or number of bits not allowed, named with its value, before launch.
      NotImplementedError: on a GPU not of compute capability 9.0.
    """
    parts = coded_parts(
        q, keys, values, begin, end, scale=scale, slots=slots, block_table=block_table, config=config
    )
    return merged(parts, q.shape[1] // parts.o.shape[1], q.dtype)


def coded_parts(
    q: Float[Array, "B N R"],
    keys: Sequence[Plane],
    values: Plane,
    begin: Int[Array, " B"],
    end: Int[Array, " B"],
    *,
    scale: float,
    slots: Int[Array, "B K n"] | None = None,
    block_table: Int[Array, "B pages"] | None = None,
    config: CodedConfig | None = None,
) -> Parts:
    """`coded_attention` before its parts are merged; raises as it does."""
    check_coded(q, keys, values, begin, end, slots=slots, block_table=block_table, config=config)
    config = config or config_for(keys, values, 0 if slots is None else slots.shape[2], block_table)
    planes = [(plane.levels, plane.reach) for plane in (*keys, values)]
    bits = tuple(plane.bits for plane in (*keys, values))
    return _launch(q, planes, begin, end, slots, block_table, bits=bits, scale=scale, config=config)


@functools.partial(jax.jit, static_argnames=("bits", "scale", "config"))
def _launch(
    q: Array,
    planes: Sequence[tuple[Array, Array]],
    begin: Array,
    end: Array,
    slots: Array | None,
    block_table: Array | None,
    *,
    bits: tuple[int, ...],
    scale: float,
    config: CodedConfig,
) -> Parts:
    """`coded_parts`, checked; levels and reach of the planes of keys, then of values."""
    widths = tuple(levels.shape[-1] * 8 // b for (levels, _), b in zip(planes, bits, strict=True))
    B, K, S = rows_of(planes[0][1], block_table)
    N, Z, page = q.shape[1], widths[-1], planes[0][1].shape[2]
    G = N // K
    more = [] if block_table is None else [block_table]
    if slots is not None:
        if block_table is not None:
            slots, begin, end = _in_pool(slots, begin, end, block_table, planes[0][1].shape)
            planes = [(x.reshape(1, 1, -1, x.shape[-1]), reach.reshape(1, 1, -1)) for x, reach in planes]
            S = planes[0][1].size
        # A slot that is not there counts for nothing.
        slots = jnp.pad(slots, ((0, 0), (0, 0), (0, -slots.shape[2] % BLOCK)), constant_values=S)
        more = [slots.astype(jnp.int32).reshape(B, K, -1, BLOCK)]
    g = _Geometry(
        K=K,
        S=S,
        page=0 if block_table is None else page,
        chosen=0 if slots is None else slots.shape[2],
        columns=-(-G // 8) * 8,
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
        # What a thread writes to shared memory it reads behind barriers that stand here.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(
        begin.astype(jnp.int32),
        end.astype(jnp.int32),
        _queries(q, g),
        *(levels if g.chosen else _blocks(levels) for levels, _ in planes),
        *(reach for _, reach in planes),
        *more,
    )
    return Parts(partial, lse, order=tuple(map(int, g.order(-1))), transposed=True)


def _in_pool(
    slots: Array, begin: Array, end: Array, block_table: Array, pool: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    """A list's slots as those of a pool [P, K, page size] taken for one row, with the begin and end of all.

    What does not count is -1: its page may be any number.
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
    """Static shape of a launch. page: slots of one, 0 without a block table. chosen: slots of a list, 0 where
    there is none. columns: query heads, eight or sixteen. widths, bits: of the planes.

    A list of slots in pages is one of all the pool's S, as if they were of one head of one row.
    """

    K: int
    S: int
    page: int
    chosen: int
    columns: int
    widths: tuple[int, ...]
    bits: tuple[int, ...]
    scale: float
    parts: int
    stages: int

    def order(self, plane: int) -> np.ndarray:
        """Which coordinate each column of an unpacked plane is."""
        return columns(self.widths[plane], self.bits[plane])

    @property
    def key_columns(self) -> list[Any]:
        """Coordinates of each plane of keys, among all."""
        begins = itertools.accumulate(self.widths[:-2], initial=0)
        return [pl.ds(begin, width) for begin, width in zip(begins, self.widths[:-1], strict=True)]


def _queries(q: Array, g: _Geometry) -> Array:
    """[B, K, columns, C], coordinates of each plane as they are unpacked; zeros beyond G heads."""
    B, N, _ = q.shape
    G = N // g.K
    order = np.concatenate([at.start + g.order(plane) for plane, at in enumerate(g.key_columns)])
    groups = q[..., order].reshape(B, g.K, G, -1)
    return jnp.pad(groups, ((0, 0), (0, 0), (0, g.columns - G), (0, 0)))


def _blocks(levels: Array) -> Array:
    """[B, K, S, P] as blocks of keys [B, K, S/64, 64·P/L, L], L ≤ 256: a copy's rows of whole bytes are
    multiples of 16. The same memory."""
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
                # Copies begin at whole tiles.
                tiled(g.columns, at.size, dtype=jnp.bfloat16, width=math.gcd(tile_width(at.size), at.start))
                for at in g.key_columns
            ],
            levels=[] if g.chosen else [plgpu.SMEM((g.stages, *_block_shape(P)), jnp.uint8) for P in sizes],
            reach=[] if g.chosen else [plgpu.SMEM((g.stages, ALIGNED), jnp.uint8) for _ in sizes],
            slots=[plgpu.SMEM((g.chosen // BLOCK, BLOCK), jnp.int32)] if g.chosen else [],
            values=tiled(BLOCK, Z, dtype=jnp.bfloat16, width=64),
            p=tiled(g.columns, BLOCK, dtype=jnp.bfloat16, width=64),
            o=plgpu.SMEM((Z, g.columns), jnp.float32),
            lse=plgpu.SMEM((g.columns,), jnp.float32),
            largest=plgpu.SMEM((1,), jnp.float32),
            q_ready=plgpu.Barrier(num_arrivals=planes - 1 + (g.chosen > 0)),
            ready=plgpu.Barrier(num_barriers=g.stages, num_arrivals=2 * planes),
        ),
    )


class _Buffers(NamedTuple):
    """Shared memory of a CTA."""

    q: Any
    levels: Any
    reach: Any
    slots: Any
    values: Any
    p: Any
    o: Any
    lse: Any
    largest: Any
    q_ready: Any
    ready: Any


def _part(refs: Any, g: _Geometry, at: _Buffers) -> None:
    """One CTA: its share of the blocks of one KV head of one row."""
    begin_ref, end_ref, q_ref, *others = refs
    sources, (*more, o_ref, lse_ref) = others[: 2 * len(g.widths)], others[2 * len(g.widths) :]
    head, part = lax.axis_index("head"), lax.axis_index("part")
    b, kv = lax.div(head, jnp.int32(g.K)), lax.rem(head, jnp.int32(g.K))

    def inside(slot):
        return jnp.clip(slot, 0, g.S)

    span = _Span.of(g, inside(begin_ref[b]), inside(end_ref[b]), part)
    for coordinates, buffer in zip(g.key_columns, at.q, strict=True):
        plgpu.copy_gmem_to_smem(q_ref.at[b, kv, pl.ds(0, g.columns), coordinates], buffer, at.q_ready)
    source: _Source
    if g.chosen:
        plgpu.copy_gmem_to_smem(more[0].at[b, kv], at.slots[0], at.q_ready)
        source = _Chosen(g, at, span, sources, (0, 0) if g.page else (b, kv))
    else:
        source = _Stream(g, at, span, sources, (b, kv), *more)
    plgpu.barrier_wait(at.q_ready)

    @pl.loop(0, 2)
    def _attempt(number: Array) -> None:
        # Not "above": what is no number is neither.
        @pl.when((number == 0) | jnp.logical_not(at.largest[0] < LARGEST_SUM))
        def _() -> None:
            settled = jnp.where(number == 0, jnp.minimum(span.first + 1, span.last), span.last)
            _store(g, at, *_accumulate(g, at, span, settled, source))

    plgpu.copy_smem_to_gmem(at.o, o_ref.at[b, kv, part])
    plgpu.copy_smem_to_gmem(at.lse, lse_ref.at[b, kv, part])
    plgpu.wait_smem_to_gmem(0)


class _Span(NamedTuple):
    """Blocks first ≤ i < last of a part, and slots begin ≤ j < end that count."""

    first: Array
    last: Array
    begin: Array
    end: Array

    @classmethod
    def of(cls, g: _Geometry, begin: Array, end: Array, part: Array) -> "_Span":
        """Equal shares of the blocks that hold any, of the store or of the list."""
        low = jnp.int32(0) if g.chosen else lax.div(begin, jnp.int32(BLOCK))
        high = g.chosen // BLOCK if g.chosen else lax.div(end + (BLOCK - 1), jnp.int32(BLOCK))
        count = jnp.where(end > begin, high - low, 0)
        share = lax.div(count + (g.parts - 1), jnp.int32(g.parts))
        first = jnp.minimum(part * share, count)
        return cls(low + first, low + jnp.minimum(first + share, count), begin, end)

    def counts(self, slots: Array) -> Array:
        """Which slots do."""
        return (slots >= self.begin) & (slots < self.end)


class _Block(NamedTuple):
    """A block of keys: levels [keys, ·] as read and reaches [keys] of plane i, which slots count."""

    levels: Callable[[int], Array]
    reach: Callable[[int], Array]
    visible: Array


@dataclass(frozen=True)
class _Source:
    """Where a part's blocks come from: planes in global memory, of one KV head of one row.

    table: which pages a row has, if it has its blocks there.
    """

    g: _Geometry
    at: _Buffers
    span: "_Span"
    sources: Any
    head: tuple[Any, Any]
    table: Any = None

    def begin(self) -> None:
        """Before the first block."""

    def place(self, step: Array) -> Array:
        """What `ahead` wants to know of a step, asked for before its block is read."""
        return jnp.int32(0)

    def block(self, step: Array) -> _Block:
        """Of a step."""
        raise NotImplementedError

    def ahead(self, step: Array, place: Array) -> None:
        """Asks for more, once all threads have read a step's block."""


class _Stream(_Source):
    """All blocks of a span, `stages` of them on their way."""

    def begin(self) -> None:
        """Asks for the first blocks."""

        @pl.loop(self.span.first, jnp.minimum(self.span.first + self.g.stages, self.span.last))
        def _fill(step: Array) -> None:
            self._load(step, self._lead(step))

    def place(self, step: Array) -> Array:
        """The page of the block that is asked for `ahead`: it comes while the step's own is computed with."""
        return self._lead(jnp.minimum(step + self.g.stages, self.span.last - 1))

    def block(self, step: Array) -> _Block:
        """Waits for it."""
        slot, at = self._slot(step), self.at
        plgpu.barrier_wait(at.ready.at[slot])
        return _Block(
            lambda i: block_rows(at.levels[i].at[slot], BLOCK, self.g.widths[i], self.g.bits[i]),
            lambda i: plgpu.load(at.reach[i].at[slot, pl.ds(0, BLOCK)], layout=PER_ROW, optimized=False),
            self.span.counts(_rows(self.g) + step * BLOCK),
        )

    def ahead(self, step: Array, place: Array) -> None:
        """Asks for the block that takes its place."""

        @pl.when(step + self.g.stages < self.span.last)
        def _() -> None:
            self._load(step + self.g.stages, place)

    def _slot(self, step: Array) -> Array:
        return lax.rem(step - self.span.first, jnp.int32(self.g.stages))

    def _lead(self, step: Array) -> Array:
        """The row of a step's block, or its page."""
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


class _Chosen(_Source):
    """Blocks of the slots of a list in shared memory; while one CTA waits for rows, others compute."""

    def block(self, step: Array) -> _Block:
        """All loads are asked for before any is used."""
        slots = plgpu.load(self.at.slots[0].at[step], layout=PER_ROW, optimized=False)
        visible = self.span.counts(lax.broadcast_in_dim(slots, (BLOCK, self.g.columns), [0]))
        there = jnp.clip(slots, 0, self.g.S - 1)  # What does not count is read, too.
        stores, found = [source.at[*self.head] for source in self.sources], []
        for store, C, bits in zip(stores, self.g.widths, self.g.bits, strict=False):
            found.append(gathered_rows(store, there, C, bits))
        reach = [gathered_bytes(store, there) for store in stores[len(found) :]]
        return _Block(found.__getitem__, reach.__getitem__, visible)


def _rows(g: _Geometry) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (BLOCK, g.columns), 0, layout=plgpu.Layout.WGMMA)


def _accumulate(
    g: _Geometry, at: _Buffers, span: _Span, settled: Array, source: _Source
) -> tuple[Array, Array, Array]:
    """Weighted values [Z, columns], the maximum and the sum of probabilities [columns].

    The maximum is that of the blocks before `settled`.
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
    """Softmax over one block of keys more; `l` is summed over keys at the end.

    have_read: called when all threads have read the block, while tensor cores work.
    """
    acc, m, l = carry
    shape, last = (BLOCK, g.columns), len(g.widths) - 1

    def unpack(i):
        return unpacked(block.levels(i), g.widths[i], g.bits[i])

    def steps(i):
        return _steps(block.reach(i), g.bits[i], shape)

    scores = sum(_product(unpack(i), at.q[i], shape) * steps(i) for i in range(last)) * (g.scale * LOG2_E)
    _wait_for_all()
    at.values[...] = unpack(last)
    scores = jnp.where(block.visible, scores, -jnp.inf)
    if running:
        highest = jnp.maximum(m, scores.max(axis=0))
        alpha, m = jnp.exp2(m - highest), highest
        acc, l = acc * _down(alpha, acc.shape), l * _down(alpha, shape)
    p = jnp.exp2(scores - _down(m, shape))
    # A slot that does not count may hold what is no number.
    weights = jnp.where(block.visible, p * steps(last), 0.0).astype(jnp.bfloat16)
    at.p.transpose((1, 0))[...] = plgpu.layout_cast(weights, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()

    return acc + _product(at.values.transpose((1, 0)), at.p, acc.shape, have_read), m, l + p


@plgpu.inline_mgpu()
def _wait_for_all(_: Any) -> None:
    """Until all warps are here: they have read the block, and what they wrote for the one before."""
    mgpu.warpgroup_barrier()


def _product(a: Any, b: Any, shape: tuple[int, int], meanwhile: Callable[[], None] = lambda: None) -> Array:
    """a bᵀ in float32; a from registers or shared memory, b from shared memory."""

    def product(result: Any) -> Array:
        plgpu.wgmma(result, a, b.transpose((1, 0)))
        meanwhile()
        return result[...]

    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def _steps(reach: Array, bits: int, shape: tuple[int, int]) -> Array:
    """reach/2^bits of each key, along the rows of `shape`; reach is in `short_scales`' 8 bits."""
    return lax.broadcast_in_dim(from_e5m3(reach) * 2.0**-bits, shape, [0])


def _down(x: Array, shape: tuple[int, ...]) -> Array:
    """A number of each column, in all rows."""
    return lax.broadcast_in_dim(x, shape, [1])


def _store(g: _Geometry, at: _Buffers, acc: Array, m: Array, l: Array) -> None:
    at.o[...] = acc * _down(jnp.where(l == 0, 0.0, 1.0 / l), acc.shape)
    at.lse[...] = jnp.where(l == 0, -jnp.inf, m / LOG2_E + jnp.log(l))
    at.largest[...] = lax.broadcast_in_dim(l.max(axis=0), (1,), [])
    plgpu.commit_smem()
