"""The k largest scores of each row, exact and the same in every run (ours).

A radix selection. Scores become keys, unsigned integers that are the smaller the larger the score. Their
digits of 11, 11 and 10 bits are settled from the top: a histogram of the next digit, among keys that agree
with what is settled, says in which bin the k-th smallest key is. As soon as no more keys than shared memory
holds reach up to that bin, they are picked out of the row, in the order of their slots, and the row is not
read again. At last all keys below the k-th are picked, and as many equal to it as are wanted, from the
lowest slots on. Most rows are read twice, and four times those where thousands of scores agree in 22 bits.
Threads that run at the same time only count, so that their order changes nothing.

One CTA has one row. What Pallas has no word for, counting, running sums and storing at computed places, is
inline; each is a function of its own.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Float, Int

from kernels_pallas.select_inputs import LINE, THREADS, check_largest

BLOCK = 2048
"""Scores a step; fewer than 2^15, as two counts of them share an integer."""
STAGES = 2
"""Blocks in flight. Four CTAs have 64 KiB of them on a multiprocessor, enough for all that memory gives."""
PART = 512
"""Held keys a step."""
HELD = 7 * PART
"""Keys held in shared memory, more where k is. As many as leave room for four CTAs on a multiprocessor."""
DIGITS = ((21, 11), (10, 11), (0, 10))
"""Shift and bits, from the top."""
BINS = 2048
"""Of a histogram. The last digit needs half; in the rest it counts keys that come after, to no effect."""
LAST = np.uint32(2**32 - 1)
"""Key of what does not count, behind that of -inf."""
SIGN = np.uint32(1 << 31)
WARPS = THREADS // 32


def largest(
    scores: Float[Array, "B K S"], begin: Int[Array, " B"], end: Int[Array, " B"], *, k: int
) -> Int[Array, "B K k"]:
    """Slots of the k largest scores of each row among begin ≤ j < end; of equal scores the lowest slots.

    NaN is larger than all numbers, so that it is seen, and 0 equals -0.

    Args:
      scores: float32, S a multiple of 64; slots that do not count may hold anything.
      begin, end: of each row.
      k: a multiple of 128 up to 4096.

    Returns:
      int32, ascending in each row; where fewer than k slots count, they are followed by S.

    Raises:
      ValueError: a shape, dtype or k not allowed, named with its value, before launch.
      NotImplementedError: on a GPU not of compute capability 9.0.
    """
    check_largest(scores, begin, end, k=k)
    return _launch(scores, begin, end, k=k)


@functools.partial(jax.jit, static_argnames="k")
def _launch(scores: Array, begin: Array, end: Array, *, k: int) -> Array:
    """`largest`, checked."""
    B, K, S = scores.shape
    if S < BLOCK:
        scores = jnp.pad(scores, ((0, 0), (0, 0), (0, BLOCK - S)))
    span = jnp.stack([jnp.maximum(begin, 0), jnp.minimum(end, S)], 1).astype(jnp.int32)
    return plgpu.kernel(
        functools.partial(_kernel, S=S, k=k),
        out_type=jax.ShapeDtypeStruct((B, K, k), jnp.int32),
        grid=(B, K),
        grid_names=("b", "kv"),
        kernel_name="zdc_largest",
    )(span, scores.reshape(B, K, -1, LINE))


def _kernel(span_ref: Any, scores_ref: Any, o_ref: Any, *, S: int, k: int) -> None:
    held = max(HELD, -(-k // PART) * PART)
    pl.run_scoped(
        functools.partial(_row, span_ref, scores_ref, o_ref, S),
        _Buffers(
            counts=plgpu.SMEM((BINS,), jnp.int32),
            scores=plgpu.SMEM((STAGES, BLOCK // LINE, LINE), jnp.float32),
            keys=plgpu.SMEM((held,), jnp.uint32),
            slots=plgpu.SMEM((held,), jnp.int32),
            sums=plgpu.SMEM((WARPS,), jnp.int32),
            ready=plgpu.Barrier(num_barriers=STAGES),
        ),
    )


class _Buffers(NamedTuple):
    """Shared memory of a CTA. keys, slots: those picked. sums: of warps."""

    counts: Any
    scores: Any
    keys: Any
    slots: Any
    sums: Any
    ready: Any


def _row(span_ref: Any, scores_ref: Any, o_ref: Any, S: int, at: _Buffers) -> None:
    """One CTA: its row."""
    b, kv = lax.axis_index("b"), lax.axis_index("kv")
    row = _Row(scores_ref.at[b, kv], span_ref[b, 0], span_ref[b, 1])
    k = o_ref.shape[-1]
    all_wanted = jnp.clip(row.end - row.begin, 0, k)
    wanted, prefix, held = all_wanted, jnp.uint32(0), jnp.int32(0)
    for shift, bits in DIGITS:
        prefix = prefix << bits
        _histogram(row, at, held, prefix, shift)
        digit, before, size = _bin_of(at, wanted)
        prefix, wanted = prefix + digit.astype(jnp.uint32), wanted - before
        if shift:
            reached = all_wanted - wanted + size
            fits = (held == 0) & (reached <= at.keys.shape[0])

            @pl.when(fits)
            def _(behind: Array = prefix + 1 << shift) -> None:
                _pick(row, at, jnp.int32(0), behind, None)

            held = jnp.where(fits, reached, held)
    _pick(row, at, held, prefix, wanted)
    o_ref[b, kv] = jnp.where(_iota(k) < all_wanted, _load(at.slots.at[pl.ds(0, k)]), S)


def largest_reference(
    scores: Float[Array, "B K S"], begin: Int[Array, " B"], end: Int[Array, " B"], *, k: int
) -> Int[Array, "B K k"]:
    """`largest` by a sort, of any S and k, on any device."""
    S = scores.shape[-1]
    j = jnp.arange(S)
    counts = (j >= begin[:, None]) & (j < end[:, None])
    order = jnp.argsort(jnp.where(counts[:, None], _keys(scores), LAST), axis=-1)
    order = jnp.pad(order, ((0, 0), (0, 0), (0, max(k - S, 0))))[..., :k]
    wanted = jnp.clip(end, 0, S) - jnp.clip(begin, 0, S)
    return jnp.sort(jnp.where(jnp.arange(k) < wanted[:, None, None], order, S), axis=-1)


class _Row(NamedTuple):
    """Scores [S/64, 64] in global memory, and slots begin ≤ j < end that count."""

    scores: Any
    begin: Array
    end: Array


def _histogram(row: _Row, at: _Buffers, held: Array, first: Array, shift: int) -> None:
    """Into `at.counts`: how many keys, cut to what is above `shift`, are `first`, the number after it, ..."""
    at.counts[...] = jnp.zeros(BINS, jnp.int32)

    def body(keys: Array, _: Array, carry: tuple[()]) -> tuple[()]:
        _count(at.counts, (keys >> shift) - first)
        return carry

    _each_block(row, at, held, body, ())
    plgpu.commit_smem()


def _bin_of(at: _Buffers, wanted: Array) -> tuple[Array, Array, Array]:
    """The bin that the wanted-th key is in, how many keys are in bins before it, and how many in it."""
    counts = _load(at.counts)
    before, _ = _sums_before(counts, at.sums)
    here = (before < wanted) & (before + counts >= wanted)
    found = lambda x: jnp.where(here, x, 0).sum()
    return found(_iota(BINS)), found(before), found(counts)


def _pick(row: _Row, at: _Buffers, held: Array, limit: Array, ties: Array | None) -> None:
    """Keys below `limit` and their slots, in the order of slots, and the first `ties` equal to it, if any.

    They may go from those held to themselves: none goes up.
    """

    def body(keys: Array, slots: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        less, equal = carry
        picked = keys < limit
        marks = jnp.where(picked, 1, 0)
        if ties is None:
            before, total = _sums_before(marks, at.sums)
            place = less + before
        else:
            before, total = _sums_before(jnp.where(keys == limit, 1 << 16, marks), at.sums)
            equal_before = equal + (before >> 16)
            picked |= (keys == limit) & (equal_before < ties)
            place = less + (before & 0xFFFF) + jnp.minimum(equal_before, ties)
        place = jnp.where(picked, place, -1)
        _store_at(at.keys, place, keys)
        _store_at(at.slots, place, slots)
        return less + (total & 0xFFFF), equal + (total >> 16)

    _each_block(row, at, held, body, (jnp.int32(0), jnp.int32(0)))
    plgpu.commit_smem()


def _each_block[T](
    row: _Row, at: _Buffers, held: Array, body: Callable[[Array, Array, T], T], carry: T
) -> None:
    """`body` on keys and slots of one block after another, of those held if any are, else of the row."""

    def of_held(step: Array, carry: T) -> T:
        part = pl.ds(pl.multiple_of(step * PART, PART), PART)
        keys = jnp.where(_iota(PART) < held - step * PART, _load(at.keys.at[part]), LAST)
        return body(keys, _load(at.slots.at[part]), carry)

    @pl.when(held > 0)
    def _() -> None:
        lax.fori_loop(0, _blocks(held, PART), of_held, carry)

    @pl.when(held == 0)
    def _() -> None:
        _each_block_of_row(row, at, body, carry)


def _each_block_of_row[T](row: _Row, at: _Buffers, body: Callable[[Array, Array, T], T], carry: T) -> None:
    """Only blocks that hold slots that count are read."""
    first = lax.div(row.begin, jnp.int32(BLOCK))
    last = jnp.where(row.end > row.begin, _blocks(row.end, BLOCK), first)
    S = row.scores.shape[0] * LINE

    def start(step: Array) -> Array:
        # The last block is a whole one too: it begins in the one before.
        return jnp.minimum(step * BLOCK, S - BLOCK)

    def load(step: Array) -> None:
        slot = lax.rem(step - first, jnp.int32(STAGES))
        lines = pl.ds(lax.div(start(step), jnp.int32(LINE)), BLOCK // LINE)
        plgpu.copy_gmem_to_smem(row.scores.at[lines], at.scores.at[slot], at.ready.at[slot])

    def next_block(step: Array, carry: T) -> T:
        slot = lax.rem(step - first, jnp.int32(STAGES))
        plgpu.barrier_wait(at.ready.at[slot])
        scores = _load(at.scores.at[slot])

        @pl.when(step + STAGES < last)
        def _() -> None:
            plgpu.commit_smem()  # All threads have read.
            load(step + STAGES)

        slots, low = _iota(BLOCK) + start(step), jnp.maximum(row.begin, step * BLOCK)
        # Unsigned, so that slots below `low` are far beyond.
        counts = (slots - low).astype(jnp.uint32) < (row.end - low).astype(jnp.uint32)
        return body(jnp.where(counts, _keys(scores), LAST), slots, carry)

    @pl.loop(first, jnp.minimum(first + STAGES, last))
    def _fill(step: Array) -> None:
        load(step)

    lax.fori_loop(first, last, next_block, carry)


def _keys(scores: Array) -> Array:
    """Unsigned integers that are the smaller the larger the score, and 0 of what is no number."""
    bits = lax.bitcast_convert_type(scores, jnp.uint32)
    # What is above zero falls as its bits rise, what is below rises with them; -0 goes with 0.
    keys = jnp.where(bits > SIGN, bits, ~bits & ~SIGN)
    return jnp.where(scores != scores, np.uint32(0), keys)


def _blocks(count: Array, size: int) -> Array:
    return lax.div(count + (size - 1), jnp.int32(size))


def _layout(*shape: int) -> Any:
    """Each thread has an equal share of consecutive numbers."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=math.prod(shape) // THREADS)


def _iota(count: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=_layout(count))


def _load(ref: Any) -> Array:
    """A buffer in shared memory, as one axis."""
    return plgpu.load(ref, layout=_layout(*ref.shape), optimized=False).reshape(math.prod(ref.shape))


def _count(counts: Any, bins: Array) -> None:
    """Adds one to counts[bin] for each of `bins`, unsigned; bins that counts has not are left out."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _layout(bins.size)))
    def count(_: Any, counts: Any, bins: Any) -> None:
        for index in _numbers(bins):
            here, address = _element(counts, index)
            utils.inline_ptx("red.shared.add.u32 [$0], 1;", address, predicate=here)

    count(counts, bins)


def _store_at(ref: Any, places: Array, values: Array) -> None:
    """ref[place] = value for each; places that ref has not are left out."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _layout(places.size), _layout(places.size)))
    def store(_: Any, ref: Any, places: Any, values: Any) -> None:
        for index, value in zip(_numbers(places), _numbers(values), strict=True):
            here, address = _element(ref, index)
            utils.inline_ptx("st.shared.u32 [$0], $1;", address, value, predicate=here)

    store(ref, places, values)


def _sums_before(x: Array, sums: Any) -> tuple[Array, Array]:
    """Of integers, the sum of all before each, and the sum of all; `sums` takes those of warps."""
    layout = _layout(x.size)
    out = (
        plgpu.ShapeDtypeStruct(x.shape, jnp.int32, layout=layout),
        plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=out)
    def add(_: Any, x: Any, sums: Any) -> Any:
        upto = list(itertools.accumulate(_numbers(x), arith.addi))
        of_lanes = _warp_sums(upto[-1])
        of_warps, total = _warps_before(of_lanes, sums)
        base = arith.addi(of_warps, arith.subi(of_lanes, upto[-1]))
        registers = np.empty_like(x.registers)
        before = [base, *(arith.addi(base, each) for each in upto[:-1])]
        registers[0] = vector.from_elements(x.registers[0].type, before)
        found = mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=True)
        return found, mgpu.FragmentedArray.splat(total, (), is_signed=True)

    return add(x, sums)


def _warp_sums(x: Any) -> Any:
    """Of one number of each lane, the sum of those of lanes up to it."""
    steps = "".join(
        f"shfl.sync.up.b32 t|p, $0, {distance}, 0, -1; @p add.u32 $0, $0, t; "
        for distance in (1, 2, 4, 8, 16)
    )
    text = "{ .reg .pred p; .reg .b32 t; mov.b32 $0, $1; " + steps + "}"
    return utils.inline_ptx(text, x, result_types=x.type, has_side_effects=True, convergent=True)


def _warps_before(upto: Any, sums: Any) -> tuple[Any, Any]:
    """From the sums up to each lane, that of all warps before, and of all."""
    thread = utils.thread_idx()
    warp = arith.shrui(thread, _i32(5))
    is_last = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(thread, _i32(31)), _i32(31))
    utils.warpgroup_barrier()  # Sums of the last call have been read.
    utils.inline_ptx("st.shared.u32 [$0], $1;", _element(sums, warp)[1], upto, predicate=is_last)
    utils.warpgroup_barrier()
    before, total = _i32(0), _i32(0)
    for w in range(WARPS):
        total = arith.addi(total, llvm.load(total.type, _element(sums, _i32(w))[1]))
        before = arith.select(arith.cmpi(arith.CmpIPredicate.ugt, warp, _i32(w)), total, before)
    return before, total


def _numbers(x: Any) -> list[Any]:
    """A thread's elements of an array in `_layout`, one by one."""
    (register,) = x.registers
    at = lambda i: ir.DenseI64ArrayAttr.get([i])
    return [
        vector.extract(register, dynamic_position=[], static_position=at(i)) for i in range(x.layout.vec_size)
    ]


def _element(ref: Any, index: Any) -> tuple[Any, Any]:
    """Whether a buffer of 32-bit numbers has this element, and its address."""
    (size,) = ref.type.shape
    here = arith.cmpi(arith.CmpIPredicate.ult, index, _i32(size))
    return here, utils.getelementptr(utils.memref_ptr(ref), [index], ir.IntegerType.get_signless(32))


def _i32(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))
