"""Loads of packed integers into registers, from a block in shared memory or from selected slots (ours).

In the wgmma layout a row of 64 belongs to four threads. Each thread loads its own quarter of the coordinates,
in loads of up to 16 bytes. These are consecutive coordinates, where the layout has columns 8 apart:
`unpack.columns` maps columns to coordinates. A product does not depend on the order, if both factors have the
same.
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

from kernels_pallas.quantized.unpack import QUAD, asm, bit_planes, words_of

PIECES = (16, 8, 4, 2, 1)
"""Sizes of a load, in bytes."""
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def block_rows(block: Any, M: int, C: int, bits: int) -> Array:
    """Load all M rows of C levels from consecutive bytes of shared memory, as input of `unpacked`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_raw(M, C, bits))
    def read(_: Any, block: Any) -> Any:
        thread = mgpu.utils.thread_idx()
        # Each of the four warps has sixteen rows.
        warp, quad = arith.divui(thread, _int(32)), arith.remui(arith.divui(thread, _int(QUAD)), _int(8))
        first = arith.addi(_times(warp, 16), quad)
        rows = [first, arith.addi(first, _int(8))]
        return _read(mgpu.utils.memref_ptr(block), rows, M, C, bits)

    return read(block)


def gathered_rows(store: Any, slots: Array, C: int, bits: int) -> Array:
    """Load rows `slots` [M] of levels uint8 [S, C·bits/8] from global memory, as input of `unpacked`."""
    M = slots.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_ROW), return_type=_raw(M, C, bits))
    def gather(_: Any, store: Any, slots: Any) -> Any:
        rows = [_wide(_scalar(slots.registers[0, 0, half, 0, 0])) for half in range(2)]
        return _read(_global(store), rows, M, C, bits)

    return gather(store, slots)


def gathered_bytes(store: Any, slots: Array) -> Array:
    """Load the bytes `slots` [M] of uint8 [S] from global memory, one per row of the wgmma layout."""
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


def gathered_gains(store: Any, rows: Array, columns: int) -> Array:
    """Load `rows` [M] of float32 [n, columns] from global memory, in the wgmma layout."""
    out = plgpu.ShapeDtypeStruct((rows.shape[0], columns), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_ROW), return_type=out)
    def gather(_: Any, store: Any, rows: Any) -> Any:
        layout, pair = plgpu.Layout.WGMMA.to_mgpu(), ir.VectorType.get((2,), ir.F32Type.get())
        registers = np.empty(layout.registers_shape(out.shape), dtype=object)
        thread = arith.remui(mgpu.utils.thread_idx(), _int(QUAD))
        first = _at(_global(store), _times(thread, 8))
        for half in range(2):
            row = _at(first, _times(_wide(_scalar(rows.registers[0, 0, half, 0, 0])), 4 * columns))
            for tile in range(columns // 8):
                registers[0, tile, 0, 0, half, 0, 0, 0, 0] = llvm.load(pair, _at(row, _int(32 * tile)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return gather(store, rows)


def _raw(M: int, C: int, bits: int) -> plgpu.ShapeDtypeStruct:
    """Describe the loaded words: each takes eight columns, two 16-bit elements for each of four threads."""
    return plgpu.ShapeDtypeStruct((M, 8 * words_of(C, bits)), jnp.uint16, layout=plgpu.Layout.WGMMA)


def _read(store: Any, rows: list[Any], M: int, C: int, bits: int) -> Any:
    """Load this thread's quarters of its two rows, each bit plane in whole words."""
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
    """Load this thread's share of a plane's row, `bits` bits; the rest of the last word is arbitrary."""
    thread = arith.remui(mgpu.utils.thread_idx(), _int(QUAD))
    begin, size = arith.divui(_times(thread, bits), _int(8)), -(-bits // 8)
    if bits % 8 == 0:
        return _words(_at(row, begin), size, next(piece for piece in PIECES if size % piece == 0))
    # In one-bit planes every second share begins in the middle of a byte.
    words = [*_words(_at(row, begin), size, 1), _int(0)]
    shift = _times(arith.remui(thread, _int(2)), 4)
    return [asm("shf.r.clamp.b32 $0, $1, $2, $3;", *two, shift) for two in itertools.pairwise(words)]


def _words(begin: Any, size: int, piece: int) -> list[Any]:
    """Load `size` bytes as 32-bit words; each load has as many bytes as the last argument."""
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
    """Return a pointer to the beginning of an array in global memory."""
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(store))


def _at(pointer: Any, offset: Any) -> Any:
    """Advance a pointer by `offset` bytes."""
    return mgpu.utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def _scalar(register: Any) -> Any:
    return llvm.extractelement(register, _int(0)) if isinstance(register.type, ir.VectorType) else register


def _wide(x: Any) -> Any:
    return arith.extui(ir.IntegerType.get_signless(64), x)


def _int(value: int) -> Any:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))
