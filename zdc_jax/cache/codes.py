"""Codes of keys and values: fewer bits a coordinate, with whatever is needed to read them back."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, UInt8

from kernels_pallas.unpack import bit_planes
from zdc_jax.axes import Array

Coded = Any
"""Arrays [*batch, …] that take the place of [*batch, block, C]; zeros can be read, as finite numbers."""


@dataclass(frozen=True)
class Code(ABC):
    """How vectors of C coordinates are stored, `block` consecutive tokens together. Hashable.

    All arithmetic is float32; scales are stored in `SCALE_DTYPE`. Coordinates are finite and below 1e37.
    """

    @property
    def block(self) -> int:
        """Tokens that are coded together."""
        return 1

    def refusal(self, C: int) -> str | None:
        """Why vectors of C coordinates cannot be coded so, None where they can."""
        return None

    @abstractmethod
    def encode(self, x: Float[Array, "*batch block C"]) -> Coded:
        """Arrays with the same leading axes."""

    @abstractmethod
    def decode(self, coded: Coded, C: int) -> Float[Array, "*batch block {C}"]:
        """What the arrays say, in float32."""


def encode_tokens(code: Code, x: Float[Array, "*batch C"]) -> Coded:
    """Arrays [*batch, …] of vectors that a code of single tokens takes one by one."""
    return jax.tree.map(lambda leaf: leaf.reshape(*x.shape[:-1], -1), code.encode(x[..., None, :]))


def decode_tokens(code: Code, coded: Coded, C: int) -> Float[Array, "*batch {C}"]:
    """What `encode_tokens` was given, as the code says it."""
    return code.decode(jax.tree.map(lambda leaf: leaf[..., None, :], coded), C)[..., 0, :]


@lru_cache(maxsize=1024)  # A search counts the bytes of many plans, and tracing a code takes tens of ms.
def coded_shapes(code: Code, C: int, dtype: str) -> Coded:
    """Shapes and dtypes of what a code makes of one block of tokens [block, C]."""
    return jax.eval_shape(code.encode, jax.ShapeDtypeStruct((code.block, C), dtype))


def empty_blocks(code: Code, batch: tuple[int, ...], C: int, dtype: str) -> Coded:
    """Zeros in place of the codes of blocks [*batch, block, C]."""

    def make(leaf):
        return jnp.zeros((*batch, *leaf.shape), leaf.dtype)

    return jax.tree.map(make, coded_shapes(code, C, dtype))


def empty_tokens(code: Code, batch: tuple[int, ...], C: int, dtype: str) -> Coded:
    """Zeros in place of what `encode_tokens` gives of vectors [*batch, C]."""

    def make(leaf):
        return jnp.zeros((*batch, leaf.size), leaf.dtype)

    return jax.tree.map(make, coded_shapes(code, C, dtype))


SCALE_DTYPE = jnp.bfloat16
"""Of scales and zero points: 16 bits, with the range of float32, so that no key of a model overflows."""


def pack(levels: UInt8[Array, "*batch C"], bits: int) -> UInt8[Array, "*batch C*{bits}//8"]:
    """Levels below 2^bits, 8/bits a byte where bits is 1, 2, 4 or 8; else their high bits so and then their
    low bits, as `bit_planes` parts them.

    C is a multiple of 8. Within a byte the first level is lowest.
    """
    high, *others = bit_planes(bits)
    if others:
        low = sum(others)
        return jnp.concatenate([pack(levels >> low, high), pack(levels & (2**low - 1), low)], axis=-1)
    each = 8 // bits
    parts = levels.reshape(*levels.shape[:-1], levels.shape[-1] // each, each)
    shifts = jnp.arange(each, dtype=jnp.uint8) * bits
    return (parts.astype(jnp.uint8) << shifts).sum(-1, dtype=jnp.uint8)


def unpack(packed: UInt8[Array, "*batch P"], bits: int) -> UInt8[Array, "*batch P*8//{bits}"]:
    """What `pack` was given."""
    high, *others = bit_planes(bits)
    if others:
        low = sum(others)
        begin = packed.shape[-1] // bits * high
        return (unpack(packed[..., :begin], high) << low) | unpack(packed[..., begin:], low)
    each = 8 // bits
    shifts = jnp.arange(each, dtype=jnp.uint8) * bits
    levels = (packed[..., None] >> shifts) & jnp.uint8(2**bits - 1)
    return levels.reshape(*packed.shape[:-1], packed.shape[-1] * each)


def packing_refusal(C: int) -> str | None:
    """`Code.refusal` of codes that pack levels along C."""
    return None if C % 8 == 0 else f"rank {C} must be a multiple of 8, to be packed into bytes"


@dataclass(frozen=True)
class Split(Code):
    """The first `index` coordinates in a code of their own. Coded: a pair of what the two codes give."""

    index: int
    first: Code
    rest: Code

    def refusal(self, C: int) -> str | None:
        if not 0 < self.index < C:
            return f"index={self.index} must be 1 to below {C}, the coordinates that are kept"
        return self.first.refusal(self.index) or self.rest.refusal(C - self.index)

    def encode(self, x: Array) -> Coded:
        return self.first.encode(x[..., : self.index]), self.rest.encode(x[..., self.index :])

    def decode(self, coded: Coded, C: int) -> Array:
        first, rest = coded
        parts = self.first.decode(first, self.index), self.rest.decode(rest, C - self.index)
        return jnp.concatenate(parts, axis=-1)


@dataclass(frozen=True)
class Float8(Code):
    """float8 e4m3 without a scale: what serving systems call an fp8 cache. Larger than 448 is clipped."""

    def encode(self, x: Array) -> Coded:
        most = float(jnp.finfo(jnp.float8_e4m3fn).max)
        coded = jnp.clip(x.astype(jnp.float32), -most, most).astype(jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(coded, jnp.uint8)

    def decode(self, coded: Coded, C: int) -> Array:
        return jax.lax.bitcast_convert_type(coded, jnp.float8_e4m3fn).astype(jnp.float32)


@dataclass(frozen=True)
class Int8(Code):
    """Integers -127 … 127 times a scale a token and head, its largest coordinate's."""

    def encode(self, x: Array) -> Coded:
        x = x.astype(jnp.float32)
        scale = (jnp.abs(x).max(-1, keepdims=True) / 127).astype(SCALE_DTYPE)
        steps = x / jnp.maximum(scale.astype(jnp.float32), jnp.finfo(jnp.float32).tiny)
        return jnp.clip(jnp.round(steps), -127, 127).astype(jnp.int8), scale

    def decode(self, coded: Coded, C: int) -> Array:
        levels, scale = coded
        return levels.astype(jnp.float32) * scale.astype(jnp.float32)
