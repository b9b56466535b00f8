"""Rows of planes of packed integers into registers, of a block in shared memory or of any slots (ours).

A row of 64 belongs to four threads in the layout of wgmma. Each reads its own quarter of the coordinates, in
loads of up to 16 bytes: consecutive ones, where the layout has columns 8 apart. `unpack.columns` says which
coordinate each column is then. To a product order does not matter, if both factors have the same.
"""

import itertools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from kernels_pallas.unpack import QUAD, asm, bit_planes, words_of

PIECES = (16, 8, 4, 2, 1)
"""Bytes of a load."""
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def block_rows(block: Any, M: int, C: int, bits: int) -> Array:
    """All M rows of C levels, in bytes of shared memory one after another: what `unpacked` takes."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_raw(M, C, bits))
    def read(_: Any, block: Any) -> Any:
        thread = mgpu.utils.thread_idx()
        # Each of four warps has sixteen rows.
        warp, quad = arith.divui(thread, _int(32)), arith.remui(arith.divui(thread, _int(QUAD)), _int(8))
        first = arith.addi(_times(warp, 16), quad)
        rows = [first, arith.addi(first, _int(8))]
        return _read(mgpu.utils.memref_ptr(block), rows, M, C, bits)

    return read(block)


def gathered_rows(store: Any, slots: Array, C: int, bits: int) -> Array:
    """Rows `slots` [M] of levels uint8 [S, C·bits/8] in global memory: what `unpacked` takes."""
    M = slots.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_ROW), return_type=_raw(M, C, bits))
    def gather(_: Any, store: Any, slots: Any) -> Any:
        rows = [_wide(_scalar(slots.registers[0, 0, half, 0, 0])) for half in range(2)]
        return _read(_global(store), rows, M, C, bits)

    return gather(store, slots)


def gathered_bytes(store: Any, slots: Array) -> Array:
    """Entries `slots` [M] of bytes uint8 [S] in global memory, one a row of the layout of wgmma."""
    out = plgpu.ShapeDtypeStruct(slots.shape, jnp.uint8, layout=PER_ROW)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_ROW), return_type=out)
    def gather(_: Any, store: Any, slots: Any) -> Any:
        i8 = ir.IntegerType.get_signless(8)
        registers = np.empty_like(slots.registers)
        for index, slot in np.ndenumerate(slots.registers):
            byte = llvm.load(i8, _at(_global(store), _wide(_scalar(slot))))
            registers[index] = mgpu.utils.bitcast(byte, ir.VectorType.get((1,), i8))
        return mgpu.FragmentedArray(_registers=registers, _layout=slots.layout, _is_signed=False)

    return gather(store, slots)


def _raw(M: int, C: int, bits: int) -> plgpu.ShapeDtypeStruct:
    """Words of 32 bits stand as two of 16, in eight columns for the four threads."""
    return plgpu.ShapeDtypeStruct((M, 8 * words_of(C, bits)), jnp.uint16, layout=plgpu.Layout.WGMMA)


def _read(store: Any, rows: list[Any], M: int, C: int, bits: int) -> Any:
    """This thread's quarters of its two rows, of each bit plane in whole words."""
    layout, pair = plgpu.Layout.WGMMA.to_mgpu(), ir.VectorType.get((2,), ir.IntegerType.get_signless(16))
    registers = np.empty(layout.registers_shape((M, 8 * words_of(C, bits))), dtype=object)
    for half, row in enumerate(rows):
        plane, found = _at(store, _times(row, C * bits // 8)), []
        for of_plane in bit_planes(bits):
            found += _quarter(plane, C * of_plane // QUAD)
            plane = _at(plane, _int(C * of_plane // 8))
        for i, word in enumerate(found):
            registers[0, i, 0, 0, half, 0, 0, 0, 0] = mgpu.utils.bitcast(word, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=False)


def _quarter(row: Any, bits: int) -> list[Any]:
    """Words with this thread's share of a plane's row, so many bits; what follows them is anything."""
    thread = arith.remui(mgpu.utils.thread_idx(), _int(QUAD))
    begin, size = arith.divui(_times(thread, bits), _int(8)), -(-bits // 8)
    if bits % 8 == 0:
        return _words(_at(row, begin), size, next(piece for piece in PIECES if size % piece == 0))
    # Of planes of one bit every second share begins in the middle of a byte.
    words = [*_words(_at(row, begin), size, 1), _int(0)]
    shift = _times(arith.remui(thread, _int(2)), 4)
    return [asm("shf.r.clamp.b32 $0, $1, $2, $3;", *two, shift) for two in itertools.pairwise(words)]


def _words(begin: Any, size: int, piece: int) -> list[Any]:
    """`size` bytes as words of 32 bits, loaded piece by piece; all rows and shares begin at whole pieces."""
    i32 = ir.IntegerType.get_signless(32)
    if piece >= 4:
        vector = ir.VectorType.get((piece // 4,), i32)
        loads = [llvm.load(vector, _at(begin, _int(at))) for at in range(0, size, piece)]
        return [llvm.extractelement(load, _int(i)) for load in loads for i in range(piece // 4)]
    narrow = ir.IntegerType.get_signless(8 * piece)
    words = [_int(0)] * -(-size // 4)
    for at in range(0, size, piece):
        load = arith.extui(i32, llvm.load(narrow, _at(begin, _int(at))))
        words[at // 4] = arith.ori(words[at // 4], arith.shli(load, _int(8 * (at % 4))))
    return words


def _times(x: Any, factor: int) -> Any:
    return arith.muli(x, mgpu.utils.c(factor, x.type))


def _global(store: Any) -> Any:
    """Pointer to the begin of an array in global memory."""
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(store))


def _at(pointer: Any, offset: Any) -> Any:
    """Pointer so many bytes behind."""
    return mgpu.utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def _scalar(register: Any) -> Any:
    return llvm.extractelement(register, _int(0)) if isinstance(register.type, ir.VectorType) else register


def _wide(x: Any) -> Any:
    return arith.extui(ir.IntegerType.get_signless(64), x)


def _int(value: int) -> Any:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))
