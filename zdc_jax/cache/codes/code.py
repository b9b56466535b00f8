"""Quantization formats of keys and values: fewer bits per coordinate, and what decoding needs.

A `Code` is a quantization format. It encodes vectors into `Coded` arrays, and decodes these arrays.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, UInt8

from kernels_pallas.quantized.byte_levels import bit_planes
from zdc_jax.axes import Array

Coded = Any
"""Quantized arrays [*batch, …] of one block of tokens [*batch, block, C]; zeros decode to finite numbers."""


@dataclass(frozen=True)
class Code(ABC):
    """Quantization format of vectors of C coordinates. Hashable.

    All arithmetic is float32, and scales are stored in `SCALE_DTYPE`. Coordinates must be finite and below
    1e37.
    """

    @property
    def block(self) -> int:
        """Number of consecutive tokens that are quantized together."""
        return 1

    def refusal(self, C: int) -> str | None:
        """Return why vectors of C coordinates cannot be quantized, or None if they can."""
        return None

    @abstractmethod
    def encode(self, x: Float[Array, "*batch block C"]) -> Coded:
        """Quantize blocks of tokens into arrays with the same leading axes."""

    @abstractmethod
    def decode(self, coded: Coded, C: int) -> Float[Array, "*batch block {C}"]:
        """Decode blocks of tokens with C coordinates into float32 vectors."""


CodedParts = Sequence[tuple[Code, Coded]]
"""Codes of consecutive parts of a vector's coordinates, each with its arrays."""


def encode_tokens(code: Code, x: Float[Array, "*batch C"]) -> Coded:
    """Quantize vectors one by one, with a code of `block` 1, into arrays [*batch, …]."""
    return jax.tree.map(lambda leaf: leaf.reshape(*x.shape[:-1], -1), code.encode(x[..., None, :]))


def decode_tokens(code: Code, coded: Coded, C: int) -> Float[Array, "*batch {C}"]:
    """Decode the arrays of `encode_tokens` into float32 vectors."""
    return code.decode(jax.tree.map(lambda leaf: leaf[..., None, :], coded), C)[..., 0, :]


@lru_cache(maxsize=1024)  # A search counts the bytes of many plans, and tracing a code is slow.
def coded_shapes(code: Code, C: int, dtype: str) -> Coded:
    """Return the shapes and dtypes of one quantized block [block, C]."""
    return jax.eval_shape(code.encode, jax.ShapeDtypeStruct((code.block, C), dtype))


def empty_blocks(code: Code, batch: tuple[int, ...], C: int, dtype: str) -> Coded:
    """Return zeros with the shapes of quantized blocks [*batch, block, C]."""
    shapes = coded_shapes(code, C, dtype)
    return jax.tree.map(lambda leaf: jnp.zeros((*batch, *leaf.shape), leaf.dtype), shapes)


def empty_tokens(code: Code, batch: tuple[int, ...], C: int, dtype: str) -> Coded:
    """Return zeros with the shapes that `encode_tokens` returns for vectors [*batch, C]."""
    shapes = coded_shapes(code, C, dtype)
    return jax.tree.map(lambda leaf: jnp.zeros((*batch, leaf.size), leaf.dtype), shapes)


SCALE_DTYPE = jnp.bfloat16
"""Dtype of scales and zero points: 16 bits with the range of float32, so that large keys do not overflow."""


def pack(levels: UInt8[Array, "*batch C"], bits: int) -> UInt8[Array, "*batch C*{bits}//8"]:
    """Pack levels below 2^bits into bytes, the first level in the lowest bits.

    A byte stores 8/bits levels if `bits` is 1, 2, 4 or 8. Other widths are split by `bit_planes`: the high
    bits of all levels come first, then their low bits. C must be a multiple of 8.
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
    """Return the levels that `pack` packed."""
    high, *others = bit_planes(bits)
    if others:
        low = sum(others)
        split = packed.shape[-1] // bits * high
        return (unpack(packed[..., :split], high) << low) | unpack(packed[..., split:], low)
    each = 8 // bits
    shifts = jnp.arange(each, dtype=jnp.uint8) * bits
    levels = (packed[..., None] >> shifts) & jnp.uint8(2**bits - 1)
    return levels.reshape(*packed.shape[:-1], packed.shape[-1] * each)


def packing_refusal(C: int) -> str | None:
    """Return `Code.refusal` for codes that pack levels along C."""
    return None if C % 8 == 0 else f"rank {C} must be a multiple of 8, because levels are packed into bytes"


class PackedCode(Code):
    """Code whose levels fill whole bytes."""

    def refusal(self, C: int) -> str | None:
        return packing_refusal(C)


@dataclass(frozen=True)
class Split(Code):
    """Code for the first `index` coordinates and another code for the rest. Coded: a pair of their arrays."""

    index: int
    first: Code
    rest: Code

    def refusal(self, C: int) -> str | None:
        if not 0 < self.index < C:
            return f"index={self.index} must be from 1 to {C - 1}, below the rank {C}"
        return self.first.refusal(self.index) or self.rest.refusal(C - self.index)

    def encode(self, x: Array) -> Coded:
        return self.first.encode(x[..., : self.index]), self.rest.encode(x[..., self.index :])

    def decode(self, coded: Coded, C: int) -> Array:
        first, rest = coded
        parts = self.first.decode(first, self.index), self.rest.decode(rest, C - self.index)
        return jnp.concatenate(parts, axis=-1)


@dataclass(frozen=True)
class Float8(Code):
    """float8 e4m3 without a scale, which serving systems call an fp8 cache. Clips values at ±448."""

    def encode(self, x: Array) -> Coded:
        largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
        coded = jnp.clip(x.astype(jnp.float32), -largest, largest).astype(jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(coded, jnp.uint8)

    def decode(self, coded: Coded, C: int) -> Array:
        return jax.lax.bitcast_convert_type(coded, jnp.float8_e4m3fn).astype(jnp.float32)


@dataclass(frozen=True)
class Int8(Code):
    """Integers from -127 to 127 with one scale per token and head, set by the largest coordinate."""

    def encode(self, x: Array) -> Coded:
        x = x.astype(jnp.float32)
        scale = (jnp.abs(x).max(-1, keepdims=True) / 127).astype(SCALE_DTYPE)
        levels = x / jnp.maximum(scale.astype(jnp.float32), jnp.finfo(jnp.float32).tiny)
        return jnp.clip(jnp.round(levels), -127, 127).astype(jnp.int8), scale

    def decode(self, coded: Coded, C: int) -> Array:
        levels, scale = coded
        return levels.astype(jnp.float32) * scale.astype(jnp.float32)
