"""Instructions on single registers of a warp, for kernels that place their own (ours).

A register is an MLIR value of 32 bits, integer or float32. Integers may also be given as Python numbers.
Functions with the name of a PTX instruction are that instruction. `inline` runs a function of registers in a
Pallas kernel: arrays of R·128 elements are R registers of each thread of a warpgroup.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

THREADS = utils.WARPGROUP_SIZE
PIECES = (16, 8, 4, 2, 1)
"""Sizes of a load, in bytes."""
_AND_OR = 0xEA
"""Table of lop3 for (a & b) | c."""

type Register = Any
type Registers = list[Register]


def inline(
    function: Callable[..., list[Registers]],
    refs: Sequence[Any],
    scalars: Sequence[Array],
    arrays: Sequence[Array],
    out: Sequence[tuple[int, Any]],
) -> list[Array]:
    """Run `function(pointers, scalars, arrays)` with registers in a kernel.

    Args:
      function: returns one list of registers per result.
      refs: references to shared or global memory, passed as pointers.
      scalars: int32 scalars.
      arrays: int32 or float32 arrays [R·128], passed as lists of R registers.
      out: registers and dtype of each result.
    """
    placed = [_layout(x.shape[0]) for x in arrays]
    results = tuple(
        plgpu.ShapeDtypeStruct((count * THREADS,), dtype, layout=_layout(count * THREADS))
        for count, dtype in out
    )

    @plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * len(refs), *[plgpu.Layout.WG_SPLAT(())] * len(scalars), *placed),
        return_type=results if len(results) > 1 else results[0] if results else None,
    )
    def run(_: Any, *given: Any) -> Any:
        pointers = [_pointer(ref) for ref in given[: len(refs)]]
        rest = given[len(refs) :]
        numbers = [x.registers.item() for x in rest[: len(scalars)]]
        registers = [[_first(x) for x in each.registers] for each in rest[len(scalars) :]]
        found = function(pointers, numbers, registers)
        made = [_array(x, each) for x, each in zip(found, results, strict=True)]
        return tuple(made) if len(made) > 1 else made[0] if made else None

    found = run(*refs, *scalars, *arrays)
    return list(found) if len(results) > 1 else [found] if results else []


def _layout(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((count,), vec_size=1)


def _first(x: Any) -> Any:
    return llvm.extractelement(x, _int(0)) if isinstance(x.type, ir.VectorType) else x


def _array(registers: Registers, out: Any) -> Any:
    made = np.empty(len(registers), object)
    for i, x in enumerate(registers):
        x = _of(x)
        made[i] = vector.from_elements(ir.VectorType.get((1,), x.type), [x])
    is_signed = None if out.dtype == jnp.float32 else True
    return mgpu.FragmentedArray(_registers=made, _layout=out.layout.to_mgpu(), _is_signed=is_signed)


def _pointer(ref: Any) -> Any:
    found = utils.memref_ptr(ref)
    if utils.is_smem_ref(ref):
        return found
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), found)


def _int(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _float(value: float) -> Any:
    return utils.c(value, ir.F32Type.get())


def _of(x: Any) -> Any:
    return _int(x) if isinstance(x, int) else _float(x) if isinstance(x, float) else x


def _asm(text: str, *operands: Any, is_float: bool = False, convergent: bool = False) -> Any:
    kind = ir.F32Type.get() if is_float else ir.IntegerType.get_signless(32)
    return utils.inline_ptx(text, *map(_of, operands), result_types=kind, convergent=convergent)


def thread() -> Register:
    """Return the number of the thread in its warpgroup."""
    return utils.thread_idx()


def add(a: Register, b: Register) -> Register:
    return arith.addi(_of(a), _of(b))


def sub(a: Register, b: Register) -> Register:
    return arith.subi(_of(a), _of(b))


def mul(a: Register, b: Register) -> Register:
    return arith.muli(_of(a), _of(b))


def divided(a: Register, by: int) -> Register:
    """Divide an unsigned integer, without the remainder."""
    return arith.divui(_of(a), _of(by))


def remainder(a: Register, by: int) -> Register:
    """Return the remainder of an unsigned division."""
    return arith.remui(_of(a), _of(by))


def shl(a: Register, by: int) -> Register:
    return arith.shli(_of(a), _of(by)) if by else a


def shr(a: Register, by: Register) -> Register:
    """Shift to the right, filled with zeros."""
    return arith.shrui(_of(a), _of(by))


def shr_signed(a: Register, by: int) -> Register:
    """Shift to the right, filled with the sign."""
    return arith.shrsi(_of(a), _of(by))


def and_(a: Register, b: Register) -> Register:
    return arith.andi(_of(a), _of(b))


def or_(a: Register, b: Register) -> Register:
    return arith.ori(_of(a), _of(b))


def and_or(a: Register, mask: int, b: Register) -> Register:
    """Return (a & mask) | b."""
    return _asm(f"lop3.b32 $0, $1, {mask}, $2, {_AND_OR};", a, b)


def prmt(a: Register, b: Register, selector: Register) -> Register:
    """Choose bytes by four hexadecimal digits, the lowest first: 0 to 3 are those of `a`, 4 to 7 of `b`."""
    return _asm("prmt.b32 $0, $1, $2, $3;", a, b, selector)


def funnel(low: Register, high: Register, shift: Register) -> Register:
    """Return the lower half of 64 bits after a shift to the right by at most 32."""
    return _asm("shf.r.clamp.b32 $0, $1, $2, $3;", low, high, shift)


def less(a: Register, b: Register) -> Register:
    """Return whether a < b, unsigned."""
    return arith.cmpi(arith.CmpIPredicate.ult, _of(a), _of(b))


def equal(a: Register, b: Register) -> Register:
    """Return whether two integers are equal."""
    return arith.cmpi(arith.CmpIPredicate.eq, _of(a), _of(b))


def differ(a: Register, b: Register) -> Register:
    """Return whether two floats differ."""
    return arith.cmpf(arith.CmpFPredicate.UNE, _of(a), _of(b))


def both(a: Register, b: Register) -> Register:
    """Return whether two conditions hold."""
    return arith.andi(a, b)


def select(condition: Register, a: Register, b: Register) -> Register:
    return arith.select(condition, _of(a), _of(b))


def fadd(a: Register, b: Register) -> Register:
    return arith.addf(_of(a), _of(b))


def fsub(a: Register, b: Register) -> Register:
    return arith.subf(_of(a), _of(b))


def fmul(a: Register, b: Register) -> Register:
    return arith.mulf(_of(a), _of(b))


def fma(a: Register, b: Register, c: Register) -> Register:
    return _asm("fma.rn.f32 $0, $1, $2, $3;", a, b, c, is_float=True)


def fmax(a: Register, b: Register) -> Register:
    """Return the larger number, ignoring a NaN."""
    return _asm("max.f32 $0, $1, $2;", a, b, is_float=True)


def fabs(a: Register) -> Register:
    return _asm("abs.f32 $0, $1;", a, is_float=True)


def ex2(a: Register) -> Register:
    return _asm("ex2.approx.ftz.f32 $0, $1;", a, is_float=True)


def lg2(a: Register) -> Register:
    return _asm("lg2.approx.ftz.f32 $0, $1;", a, is_float=True)


def rcp(a: Register) -> Register:
    return _asm("rcp.approx.ftz.f32 $0, $1;", a, is_float=True)


def to_float(a: Register) -> Register:
    """Convert a signed integer to float32."""
    return arith.sitofp(ir.F32Type.get(), _of(a))


def as_float(a: Register) -> Register:
    """Return the float32 with these bits."""
    return utils.bitcast(_of(a), ir.F32Type.get())


def as_int(a: Register) -> Register:
    """Return the bits of a float32."""
    return utils.bitcast(_of(a), ir.IntegerType.get_signless(32))


def mma(signed_a: bool, a: Registers, b: Registers, c: Registers) -> Registers:
    """Add a product of 16 × 32 and 32 × 8 bytes to 16 × 8 integers, on tensor cores.

    Thread t of a warp has, with row r = t / 4 and quad i = t % 4:
      a: bytes of rows r, r + 8, r, r + 8 at columns 4i (twice) and 16 + 4i (twice); int8, or uint8.
      b: bytes of rows 4i and 16 + 4i of column r; uint8.
      c: columns 2i and 2i + 1 of row r, then of row r + 8.
    """
    kind = "s8" if signed_a else "u8"
    text = (
        f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.u8.s32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    i32 = ir.IntegerType.get_signless(32)
    operands = [_of(x) for x in itertools.chain(a, b, c)]
    return list(utils.inline_ptx(text, *operands, result_types=[i32] * 4, convergent=True))


def across(a: Register, distance: int) -> Register:
    """Return the register of the thread whose number differs by one bit."""
    is_float = isinstance(a.type, ir.F32Type)
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
    return _asm(text, a, is_float=is_float, convergent=True)


def of_lane(a: Register, lane: Register) -> Register:
    """Return the register of another thread of the warp."""
    is_float = isinstance(a.type, ir.F32Type)
    return _asm("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", a, lane, is_float=is_float, convergent=True)


def branch(condition: Register, then: Callable[[], Registers], otherwise: Registers) -> Registers:
    """Return what `then` gives where the condition holds; it has no instruction of several threads."""
    otherwise = [_of(x) for x in otherwise]
    op: Any = scf.IfOp(condition, [x.type for x in otherwise], has_else=True)  # type: ignore[call-arg]
    with ir.InsertionPoint(op.then_block):
        scf.YieldOp([_of(x) for x in then()])
    with ir.InsertionPoint(op.else_block):
        scf.YieldOp(otherwise)
    return list(op.results)


def when(condition: Register, function: Callable[[], None]) -> None:
    """Run a function in the warps where the condition holds, which is the same for all threads of a warp."""
    with utils.when(condition):
        function()


def at(pointer: Any, offset: Register) -> Any:
    """Advance a pointer by `offset` bytes."""
    return utils.getelementptr(pointer, [_of(offset)], ir.IntegerType.get_signless(8))


def at_row(pointer: Any, row: Register, size: int) -> Any:
    """Advance a pointer by `row` rows of `size` bytes, which may be more than 2 GiB."""
    i64 = ir.IntegerType.get_signless(64)
    offset = arith.muli(arith.extui(i64, row), utils.c(size, i64))
    return utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def load_words(pointer: Any, size: int, aligned: int = PIECES[0]) -> Registers:
    """Load `size` bytes as words, in the largest loads that divide the size and `aligned`.

    The pointer is aligned to such a load. Bytes of the last word that are not loaded are zeros.
    """
    i32 = ir.IntegerType.get_signless(32)
    piece = next(piece for piece in PIECES if math.gcd(size, aligned) % piece == 0)
    if piece >= 4:
        several = ir.VectorType.get((piece // 4,), i32)
        loads = [llvm.load(several, at(pointer, begin)) for begin in range(0, size, piece)]
        return [llvm.extractelement(load, _int(i)) for load in loads for i in range(piece // 4)]
    narrow = ir.IntegerType.get_signless(8 * piece)
    words: list[Any] = [0] * -(-size // 4)
    for begin in range(0, size, piece):
        load = arith.extui(i32, llvm.load(narrow, at(pointer, begin)))
        words[begin // 4] = or_(words[begin // 4], shl(load, 8 * (begin % 4)))
    return words


def load_float(pointer: Any) -> Register:
    return llvm.load(ir.F32Type.get(), pointer)


def store(pointer: Any, values: Registers, condition: Register) -> None:
    """Store consecutive numbers of one type where the condition holds."""
    values = [_of(x) for x in values]
    packed = vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)
    with utils.when(condition):
        llvm.store(packed, pointer)


def load_floats(pointer: Any, count: int) -> Registers:
    """Load consecutive float32, aligned to all of them."""
    load = llvm.load(ir.VectorType.get((count,), ir.F32Type.get()), pointer)
    return [llvm.extractelement(load, _int(i)) for i in range(count)]


def synchronize() -> None:
    """Wait until all warps have arrived, and see what they have stored in shared memory."""
    utils.warpgroup_barrier()
