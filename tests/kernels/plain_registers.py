"""Instructions of `registers` in jax.numpy: a register is an array of 128 numbers, one for each thread.

Integers are uint32. Memory is read as bytes when a function begins, and written when it ends.
"""

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.registers import PIECES, THREADS

WARPS, ROWS, QUADS = 4, 8, 4


class Memory:
    """Bytes of a reference."""

    def __init__(self, ref: Any) -> None:
        self.ref, value = ref, ref[...]
        self.shape, self.dtype, self.is_changed = value.shape, value.dtype, False
        self.content = (
            value if value.dtype == jnp.uint8 else lax.bitcast_convert_type(value, jnp.uint8)
        ).ravel()

    def write_back(self) -> None:
        """Write the bytes to the reference if they have changed."""
        if self.is_changed:
            size = jnp.dtype(self.dtype).itemsize
            x = self.content.reshape(*self.shape, size)
            self.ref[...] = lax.bitcast_convert_type(x, self.dtype)


class Pointer(NamedTuple):
    """A byte of a memory for each thread."""

    memory: Memory
    offset: Any


def inline(function, refs, scalars, arrays, out):
    """Run a function of registers."""
    memories = [Memory(ref) for ref in refs]
    pointers = [Pointer(memory, jnp.zeros(THREADS, jnp.int32)) for memory in memories]
    numbers = [jnp.full(THREADS, x, jnp.int32).astype(jnp.uint32) for x in scalars]
    given = [[_in_type(row) for row in x.reshape(-1, THREADS)] for x in arrays]
    found = function(pointers, numbers, given)
    for memory in memories:
        memory.write_back()
    return [
        jnp.concatenate([_of_type(x, dtype) for x in each])
        for each, (_, dtype) in zip(found, out, strict=True)
    ]


def _in_type(x: Any) -> Any:
    return x if x.dtype == jnp.float32 else lax.bitcast_convert_type(x, jnp.uint32)


def _of_type(x: Any, dtype: Any) -> Any:
    x = _of(x)
    return x if dtype == jnp.float32 else lax.bitcast_convert_type(x, dtype)


def _of(x: Any) -> Any:
    if isinstance(x, int):
        return jnp.full(THREADS, x % 2**32, jnp.uint32)
    return jnp.full(THREADS, x, jnp.float32) if isinstance(x, float) else x


def _binary(operation):
    return lambda a, b: operation(_of(a), _of(b))


def _signed(x: Any) -> Any:
    return lax.bitcast_convert_type(_of(x), jnp.int32)


def _bytes(x: Any) -> Any:
    return lax.bitcast_convert_type(_of(x), jnp.uint8)


def _prmt(a: Any, b: Any, selector: Any) -> Any:
    pool, selector = jnp.concatenate([_bytes(a), _bytes(b)], axis=1), _of(selector)
    index = selector[:, None] >> 4 * jnp.arange(4, dtype=jnp.uint32) & 7
    return lax.bitcast_convert_type(jnp.take_along_axis(pool, index.astype(jnp.int32), axis=1), jnp.uint32)


def _funnel(low: Any, high: Any, shift: Any) -> Any:
    low, high, shift = map(_of, (low, high, shift))
    return jnp.where(shift == 0, low, low >> shift | high << (32 - shift) % 32)


def _mma(signed_a: bool, a: Any, b: Any, c: Any) -> Any:
    def rows(*quads):
        each = [_bytes(x).reshape(WARPS, ROWS, 16) for x in quads]
        return jnp.concatenate(each, axis=2)

    matrix = jnp.concatenate([rows(a[0], a[2]), rows(a[1], a[3])], axis=1)
    matrix = lax.bitcast_convert_type(matrix, jnp.int8) if signed_a else matrix
    product = jnp.einsum("wmk,wnk->wmn", matrix.astype(jnp.int32), rows(*b).astype(jnp.int32))
    pairs = product.reshape(WARPS, 2, ROWS, QUADS, 2)
    found = [pairs[:, half, :, :, e].reshape(THREADS) for half in range(2) for e in range(2)]
    return [lax.bitcast_convert_type(_signed(x) + y, jnp.uint32) for x, y in zip(c, found, strict=True)]


def _branch(condition: Any, then: Any, otherwise: Any) -> Any:
    return [jnp.where(condition, _of(x), _of(y)) for x, y in zip(then(), otherwise, strict=True)]


def _at_row(pointer: Pointer, row: Any, size: int) -> Pointer:
    return _at(pointer, _of(row) * np.uint32(size))


def _at(pointer: Pointer, offset: Any) -> Pointer:
    return Pointer(pointer.memory, pointer.offset + _signed(offset))


def _load_words(pointer: Pointer, size: int, aligned: int = PIECES[0]) -> Any:
    if not isinstance(pointer.offset, jax.core.Tracer):
        piece = next(piece for piece in PIECES if math.gcd(size, aligned) % piece == 0)
        assert (pointer.offset % piece == 0).all()
        assert (pointer.offset >= 0).all()
        assert (pointer.offset + size <= pointer.memory.content.size).all()
    index = pointer.offset[:, None] + jnp.arange(size)
    loaded = jnp.take(pointer.memory.content, index, mode="clip")
    loaded = jnp.pad(loaded, ((0, 0), (0, -size % 4))).reshape(THREADS, -1, 4)
    words = lax.bitcast_convert_type(loaded, jnp.uint32)
    return [words[:, i] for i in range(words.shape[1])]


def _load_floats(pointer: Pointer, count: int) -> Any:
    return [lax.bitcast_convert_type(x, jnp.float32) for x in _load_words(pointer, 4 * count)]


def _store(pointer: Pointer, values: Any, condition: Any) -> None:
    memory = pointer.memory
    written = jnp.stack([_bytes(x) for x in values], axis=1).reshape(THREADS, -1)
    index = pointer.offset[:, None] + jnp.arange(written.shape[1])
    index = jnp.where(condition[:, None], index, memory.content.size)
    memory.content, memory.is_changed = memory.content.at[index].set(written, mode="drop"), True


PLAIN = SimpleNamespace(
    THREADS=THREADS,
    thread=lambda: jnp.arange(THREADS, dtype=jnp.uint32),
    add=_binary(lambda a, b: a + b),
    sub=_binary(lambda a, b: a - b),
    mul=_binary(lambda a, b: a * b),
    shl=_binary(lambda a, b: a << b),
    shr=_binary(lambda a, b: a >> b),
    shr_signed=lambda a, by: lax.bitcast_convert_type(_signed(a) >> by, jnp.uint32),
    and_=_binary(lambda a, b: a & b),
    or_=_binary(lambda a, b: a | b),
    and_or=lambda a, mask, b: _of(a) & _of(mask) | _of(b),
    prmt=_prmt,
    funnel=_funnel,
    less=_binary(lambda a, b: a < b),
    equal=_binary(lambda a, b: a == b),
    differ=_binary(lambda a, b: a != b),
    both=lambda a, b: a & b,
    divided=_binary(lambda a, b: a // b),
    remainder=_binary(lambda a, b: a % b),
    select=lambda condition, a, b: jnp.where(condition, _of(a), _of(b)),
    fadd=_binary(lambda a, b: a + b),
    fsub=_binary(lambda a, b: a - b),
    fmul=_binary(lambda a, b: a * b),
    fma=lambda a, b, c: _of(a).astype(jnp.float32) * _of(b) + _of(c),
    fmax=_binary(lambda a, b: jnp.where(jnp.isnan(a), b, jnp.where(jnp.isnan(b), a, jnp.maximum(a, b)))),
    fabs=lambda a: jnp.abs(_of(a)),
    ex2=lambda a: jnp.exp2(_of(a)),
    lg2=lambda a: jnp.log2(_of(a)),
    rcp=lambda a: 1 / _of(a),
    to_float=lambda a: _signed(a).astype(jnp.float32),
    as_float=lambda a: lax.bitcast_convert_type(_of(a), jnp.float32),
    as_int=lambda a: lax.bitcast_convert_type(_of(a), jnp.uint32),
    mma=_mma,
    across=lambda a, distance: jnp.take(_of(a), jnp.arange(THREADS) ^ distance),
    of_lane=lambda a, lane: jnp.take(_of(a), jnp.arange(THREADS) // 32 * 32 + _signed(lane) % 32),
    branch=_branch,
    when=lambda condition, function: function(),
    at=_at,
    at_row=_at_row,
    load_words=_load_words,
    load_float=lambda pointer: _load_floats(pointer, 1)[0],
    load_floats=_load_floats,
    store=_store,
    synchronize=lambda: None,
)
