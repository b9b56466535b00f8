"""Rows of a store, at any slots, into registers (ours).

The four threads that hold a row in the layout of wgmma read it as one piece of consecutive bytes, a quarter
each, in loads of up to 16 bytes. So a thread gets consecutive words where the layout has columns 8 apart:
`columns` says which word each column is. To a product order does not matter, if both factors have the same.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

QUAD = 4
"""Threads that share a row; each has two columns of every eight."""
PIECES = (16, 8, 4)
"""Bytes of a load."""
ROWS = plgpu.Layout.WGMMA.reduce(1)


def columns(count: int) -> np.ndarray:
    """Which of `count` words each column of `gathered_words` is."""
    tile, thread, pair = np.unravel_index(np.arange(count), (count // 8, QUAD, 2))
    return thread * (count // QUAD) + 2 * tile + pair


def gathered_words(store: Any, slots: Array) -> Array:
    """Rows `slots` [M] of the words uint16 [S, W] in global memory, [M, W] in the layout of wgmma."""
    M, W = slots.shape[0], store.shape[-1]
    out = plgpu.ShapeDtypeStruct((M, W), jnp.uint16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROWS), return_type=out)
    def gather(_: Any, store: Any, slots: Any) -> Any:
        layout = plgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(layout.registers_shape((M, W)), dtype=object)
        for half in range(2):
            row = _row(slots, half)
            for tile, word in enumerate(_quarter(store, row, W)):
                registers[0, tile, 0, 0, half, 0, 0, 0, 0] = word
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=False)

    return gather(store, slots)


def gathered_bytes(store: Any, slots: Array) -> Array:
    """Entries `slots` [M] of bytes uint8 [S] in global memory, one a row of the layout of wgmma."""
    out = plgpu.ShapeDtypeStruct(slots.shape, jnp.uint8, layout=ROWS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROWS), return_type=out)
    def gather(_: Any, store: Any, slots: Any) -> Any:
        i8 = ir.IntegerType.get_signless(8)
        registers = np.empty_like(slots.registers)
        for index, slot in np.ndenumerate(slots.registers):
            byte = llvm.load(i8, _at(store, _wide(_scalar(slot))))
            registers[index] = mgpu.utils.bitcast(byte, ir.VectorType.get((1,), i8))
        return mgpu.FragmentedArray(_registers=registers, _layout=slots.layout, _is_signed=False)

    return gather(store, slots)


def _quarter(store: Any, row: Any, W: int) -> list[Any]:
    """This thread's quarter of a row of W words, two words each."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    each = 2 * W // QUAD
    thread = arith.andi(mgpu.utils.thread_idx(), mgpu.utils.c(QUAD - 1, i32))
    start = arith.addi(
        arith.muli(_wide(row), mgpu.utils.c(2 * W, i64)), _wide(arith.muli(thread, mgpu.utils.c(each, i32)))
    )
    piece = next(size for size in PIECES if each % size == 0)
    found = []
    for offset in range(0, each, piece):
        address = _at(store, arith.addi(start, mgpu.utils.c(offset, i64)))
        words = llvm.load(ir.VectorType.get((piece // 4,), i32), address)
        found += [llvm.extractelement(words, mgpu.utils.c(i, i32)) for i in range(piece // 4)]
    pair = ir.VectorType.get((2,), ir.IntegerType.get_signless(16))
    return [mgpu.utils.bitcast(each, pair) for each in found]


def _at(store: Any, offset: Any) -> Any:
    """Pointer into global memory, `offset` bytes behind the begin."""
    pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(store))
    return mgpu.utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def _row(slots: Any, half: int) -> Any:
    """The slot of this thread's row in the upper or lower eight of its warp's sixteen."""
    return _scalar(slots.registers[0, 0, half, 0, 0])


def _scalar(register: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    if isinstance(register.type, ir.VectorType):
        return llvm.extractelement(register, mgpu.utils.c(0, i32))
    return register


def _wide(x: Any) -> Any:
    return arith.extui(ir.IntegerType.get_signless(64), x)
