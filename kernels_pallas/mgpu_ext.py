"""Warpgroup primitives that Pallas lacks: counting, prefix sums, and access at computed indices.

All are inline code on one-dimensional arrays. Buffers hold 32-bit elements.
"""

import functools
import itertools
import math
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

THREADS = utils.WARPGROUP_SIZE
WARPS = THREADS // 32
RUN = 4
"""Consecutive elements per thread, so that one load fetches them without bank conflicts."""
SCALAR = plgpu.Layout.WG_SPLAT(())


def layout(count: int, run: int = RUN) -> Any:
    """Return the layout in which each thread has every THREADS-th run of consecutive elements."""
    return plgpu.Layout.WG_STRIDED((count,), vec_size=min(run, count // THREADS))


def iota(count: int, run: int = RUN) -> Array:
    """Return 0, 1, ... in `layout`."""
    return plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout(count, run))


def load(ref: Any, run: int = RUN) -> Array:
    """Load a buffer in shared memory as one axis in `layout`."""
    size = math.prod(ref.shape)
    of_ref = plgpu.Layout.WG_STRIDED(tuple(ref.shape), vec_size=min(run, size // THREADS))
    return plgpu.load(ref, layout=of_ref, optimized=False).reshape(size)


def add_ones(counts: Any, bins: Array) -> None:
    """Add one to counts[bin] for each of `bins`, which are unsigned; bins out of range are ignored."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout(bins.size)))
    def add(_: Any, counts: Any, bins: Any) -> None:
        for index in itertools.chain(*_runs(bins)):
            here = arith.cmpi(arith.CmpIPredicate.ult, index, _i32(counts.type.shape[0]))
            utils.inline_ptx("red.shared.add.u32 [$0], 1;", _address(counts, index), predicate=here)

    add(counts, bins)


def gather(ref: Any, index: Array) -> Array:
    """Load elements of global memory by their flat indices."""
    placed = layout(index.size)
    out = plgpu.ShapeDtypeStruct(index.shape, ref.dtype, layout=placed)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), placed), return_type=out)
    def take(_: Any, ref: Any, index: Any) -> Any:
        element = ref.type.element_type
        found = [[llvm.load(element, _address(ref, i)) for i in run] for run in _runs(index)]
        is_signed = None if out.dtype == jnp.float32 else out.dtype == jnp.int32
        return _array(found, index.layout, is_signed)

    return take(ref, index)


def append(
    refs: tuple[Any, Any], wanted: Array, values: tuple[Array, Array], count: Array, sums: Any
) -> Array:
    """Append the wanted values to two buffers that hold `count` elements, in order; return the new count.

    If they do not all fit, none is stored. `sums` is scratch memory for the sums of warps.
    """
    placed = layout(wanted.size)

    @plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * 3, *[placed] * 3, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),
    )
    def put(_: Any, first: Any, second: Any, sums: Any, wanted: Any, x: Any, y: Any, count: Any) -> Any:
        marks = [[arith.extui(_i32(0).type, each) for each in run] for run in _runs(wanted)]
        before, total = _before([functools.reduce(arith.addi, run) for run in marks], sums)
        count = count.registers.item()
        then = arith.addi(count, total)
        with utils.when(arith.cmpi(arith.CmpIPredicate.ule, then, _i32(first.type.shape[0]))):
            for start, *runs in zip(before, *map(_runs, (wanted, x, y)), marks, strict=True):
                place = arith.addi(count, start)
                for is_wanted, *pair, mark in zip(*runs, strict=True):
                    with utils.when(is_wanted):
                        for ref, value in zip((first, second), pair, strict=True):
                            llvm.store(value, _address(ref, place))
                    place = arith.addi(place, mark)
        return _scalar(then)

    return put(*refs, sums, wanted, *values, count)


def sums_before(x: Array, sums: Any, run: int = RUN) -> tuple[Array, Array]:
    """Return the exclusive prefix sums and the total of integers; `sums` is scratch memory for warps.

    If threads have several runs, integers must be 0 or 1.
    """
    placed = layout(x.size, run)
    out = (
        plgpu.ShapeDtypeStruct(x.shape, jnp.int32, layout=placed),
        plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),
    )

    @plgpu.inline_mgpu(arg_types=(placed, plgpu.RefType()), return_type=out)
    def add(_: Any, x: Any, sums: Any) -> Any:
        upto = [list(itertools.accumulate(run, arith.addi)) for run in _runs(x)]
        before, total = _before([run[-1] for run in upto], sums)
        starts = [[_i32(0), *run[:-1]] for run in upto]
        found = [[arith.addi(at, x) for x in run] for at, run in zip(before, starts, strict=True)]
        return _array(found, x.layout, True), _scalar(total)

    return add(x, sums)


def the_one(here: Array, values: tuple[Array, ...], found: Any, run: int) -> tuple[Array, ...]:
    """Return the element of each array where `here` is true, or 0 if it is nowhere true.

    `here` must be true at most once. `found` is scratch memory.
    """
    placed = layout(here.size, run)
    out = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[placed] * (1 + len(values))), return_type=(out,) * len(values)
    )
    def find(_: Any, found: Any, here: Any, *values: Any) -> Any:
        is_first = arith.cmpi(arith.CmpIPredicate.eq, utils.thread_idx(), _i32(0))
        utils.warpgroup_barrier()  # The previous contents have been read.
        for i in range(len(values)):
            _put(found, _i32(i), _i32(0), is_first)
        utils.warpgroup_barrier()
        for i, x in enumerate(values):
            for is_here, each in zip(*_runs(here), *_runs(x), strict=True):
                _put(found, _i32(i), each, is_here)
        utils.warpgroup_barrier()
        return tuple(_scalar(llvm.load(_i32(0).type, _address(found, _i32(i)))) for i in range(len(values)))

    return find(found, here, *values)


def _before(runs: list[Any], sums: Any) -> tuple[list[Any], Any]:
    """Return, from the sum of each run of this thread, the sum of all runs before each, and the total.

    The first runs of all threads come first, then the second runs. The sums of a warp's runs share one
    integer. Four of them, at most 128 each, are separated before those of all warps are added.
    """
    assert len(runs) in (1, 2, 4)
    bits, are_four = 32 // len(runs), len(runs) == 4
    own = functools.reduce(arith.addi, [arith.shli(x, _i32(bits * i)) for i, x in enumerate(runs)])
    upto = _warp_sums(own)

    def fields(x):
        return _pairs(x) if are_four else [x]

    before, total = fields(arith.subi(upto, own)), fields(_i32(0))
    thread = utils.thread_idx()
    warp = arith.shrui(thread, _i32(5))
    utils.warpgroup_barrier()  # The sums of the previous call have been read.
    is_last = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(thread, _i32(31)), _i32(31))
    _put(sums, warp, upto, is_last)
    utils.warpgroup_barrier()
    for w in range(WARPS):
        of_warp = fields(llvm.load(own.type, _address(sums, _i32(w))))
        is_before = arith.cmpi(arith.CmpIPredicate.ugt, warp, _i32(w))
        added = [arith.select(is_before, x, _i32(0)) for x in of_warp]
        before, total = (list(map(arith.addi, x, y)) for x, y in ((before, added), (total, of_warp)))
    if len(runs) == 1:
        return before, total[0]

    def of_run(x, i):
        return arith.andi(arith.shrui(x[i % len(x)], _i32(i // len(x) * 16)), _i32(0xFFFF))

    upto_runs = list(itertools.accumulate([of_run(total, i) for i in range(len(runs))], arith.addi))
    starts = [_i32(0), *upto_runs[:-1]]
    return [arith.addi(start, of_run(before, i)) for i, start in enumerate(starts)], upto_runs[-1]


def _pairs(x: Any) -> list[Any]:
    """Split an integer into bytes 0 and 2, and bytes 1 and 3, each pair as halves of an integer."""
    return [arith.andi(y, _i32(0x00FF00FF)) for y in (x, arith.shrui(x, _i32(8)))]


def _warp_sums(x: Any) -> Any:
    """Return the inclusive prefix sum over the lanes of a warp."""
    steps = "".join(
        f"shfl.sync.up.b32 t|p, $0, {distance}, 0, -1; @p add.u32 $0, $0, t; "
        for distance in (1, 2, 4, 8, 16)
    )
    text = "{ .reg .pred p; .reg .b32 t; mov.b32 $0, $1; " + steps + "}"
    return utils.inline_ptx(text, x, result_types=x.type, has_side_effects=True, convergent=True)


def _runs(x: Any) -> list[list[Any]]:
    """Return a thread's elements of an array in `layout`, one by one."""

    def at(i):
        return ir.DenseI64ArrayAttr.get([i])

    def element(register, i):
        return vector.extract(register, dynamic_position=[], static_position=at(i))

    return [[element(register, i) for i in range(x.layout.vec_size)] for register in x.registers]


def _array(runs: list[list[Any]], placed: Any, is_signed: bool | None) -> Any:
    """Build an array from a thread's elements."""
    registers = np.empty(len(runs), object)
    for i, run in enumerate(runs):
        registers[i] = vector.from_elements(ir.VectorType.get((len(run),), run[0].type), run)
    return mgpu.FragmentedArray(_registers=registers, _layout=placed, _is_signed=is_signed)


def _scalar(x: Any) -> Any:
    return mgpu.FragmentedArray.splat(x, (), is_signed=True)


def _put(ref: Any, index: Any, value: Any, predicate: Any) -> None:
    """Store into a buffer in shared memory where `predicate` is true."""
    utils.inline_ptx("st.shared.u32 [$0], $1;", _address(ref, index), value, predicate=predicate)


def _address(ref: Any, index: Any) -> Any:
    return utils.getelementptr(utils.memref_ptr(ref), [index], ir.IntegerType.get_signless(32))


def _i32(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))
