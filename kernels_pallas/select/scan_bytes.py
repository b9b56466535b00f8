"""Inline code of the scan of an index: loads into registers, and products of bytes (ours).

A thread has whole tokens: their words, and their scores for all query heads.
"""

from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from kernels_pallas.select.scan_inputs import THREADS

MOST_KEPT = 16
"""Query words that a thread may keep in registers; more are read again in each step."""
WORDS = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS, 4), (32, 4))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)
"""Layout of [tokens, words]: a thread holds whole tokens, in vectors of 16 bytes."""
HEADS = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS, 1), (32, 1))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)
"""Layout of [tokens, heads]: a thread holds all heads of its tokens."""
TOKENS, EACH_HEAD = HEADS.reduce(1), HEADS.reduce(0)


def read_levels(rows: Any) -> Array:
    """Load words uint32 [block, W] from global memory."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(rows.shape, jnp.uint32, layout=WORDS),
    )
    def read(_: Any, rows: Any) -> Any:
        tokens, words = ir.MemRefType(rows.type).shape
        vector = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
        registers = np.empty((tokens // THREADS, words // 4, 1, 1, 1, 1), dtype=object)
        for i, j in np.ndindex(registers.shape[:2]):
            registers[i, j] = llvm.load(vector, _at(rows, 4 * words, i, 16 * j))
        return mgpu.FragmentedArray(_registers=registers, _layout=WORDS.to_mgpu(), _is_signed=False)

    return read(rows)


def read_codes(codes: Any) -> Array:
    """Load bytes [block] from global memory as int32."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.int32, layout=TOKENS),
    )
    def read(_: Any, codes: Any) -> Any:
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        layout = TOKENS.to_mgpu()
        registers = np.empty(layout.registers_shape(codes.type.shape), dtype=object)
        for i in range(registers.size):
            code = arith.extui(i32, llvm.load(i8, _at(codes, 1, i)))
            registers.flat[i] = mgpu.utils.bitcast(code, ir.VectorType.get((1,), i32))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return read(codes)


def _at(rows: Any, size: int, i: int, offset: int = 0) -> Any:
    """Return a pointer into global memory, to byte `offset` of this thread's i-th row of `size` bytes."""
    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(rows))
    own = arith.muli(mgpu.utils.thread_idx(), mgpu.utils.c(size, i32))
    begin = mgpu.utils.getelementptr(pointer, [own], i8)
    return mgpu.utils.getelementptr(begin, [mgpu.utils.c(i * THREADS * size + offset, i32)], i8)


def dots(fields: Sequence[Array], queries: Any, starts: Array) -> Array:
    """Compute products int32 [M, G] of F times bytes uint32 [M, W] with W·F query words per head.

    The queries are in shared memory. `starts` [128, G] are the initial values for the rows of each thread.
    """
    (M, W), F, G = fields[0].shape, len(fields), starts.shape[1]

    @plgpu.inline_mgpu(
        arg_types=([WORDS] * F, plgpu.RefType(), HEADS),
        return_type=plgpu.ShapeDtypeStruct((M, G), jnp.int32, layout=HEADS),
    )
    def multiply(_: Any, fields: Any, queries: Any, starts: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        four, one = (ir.VectorType.get((n,), i32) for n in (4, 1))
        pointer, zero = mgpu.utils.memref_ptr(queries), mgpu.utils.c(0, i32)
        registers = np.empty((M // THREADS, G, 1, 1, 1, 1), dtype=object)
        for g in range(G):
            found = [llvm.extractelement(starts.registers[0, g, 0, 0, 0, 0], zero)] * (M // THREADS)
            for vector, field in np.ndindex(W // 4, F):
                begin = mgpu.utils.c(g * W * F + (vector * F + field) * 4, i32)
                place = mgpu.utils.getelementptr(pointer, [begin], i32)
                taken = llvm.load(four, place, volatile_=G * W * F > MOST_KEPT)
                for i, e in np.ndindex(M // THREADS, 4):
                    word = fields[field].registers[i, vector, 0, 0, 0, 0]
                    own, other = (llvm.extractelement(x, mgpu.utils.c(e, i32)) for x in (word, taken))
                    found[i] = _dp4a(own, other, found[i])
            for i, value in enumerate(found):
                registers[i, g, 0, 0, 0, 0] = mgpu.utils.bitcast(value, one)
        return mgpu.FragmentedArray(_registers=registers, _layout=HEADS.to_mgpu(), _is_signed=True)

    return multiply(list(fields), queries, starts)


def _dp4a(levels: Any, queries: Any, so_far: Any) -> Any:
    """Add the four products of unsigned bytes with signed bytes."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [levels, queries, so_far], "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r")
