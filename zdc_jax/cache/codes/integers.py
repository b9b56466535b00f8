"""Integers with a scale and a zero point, as in KIVI (Liu et al. 2024) and in methods that refine it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, UInt8

from zdc_jax.axes import Array
from zdc_jax.cache.codes.code import SCALE_DTYPE, Coded, PackedCode, pack, unpack


@dataclass(frozen=True)
class ChannelIntegers(PackedCode):
    """Integers 0 … 2^bits - 1 with a scale and zero point per channel of `group` tokens: KIVI's keys.

    Coded: levels uint8 [*batch, group, C·bits/8]; scale and zero point [*batch, 1, C].
    """

    bits: int
    group: int

    @property
    def block(self) -> int:
        return self.group

    def encode(self, x: Array) -> Coded:
        levels, scale, zero = quantise(x.astype(jnp.float32), self.bits, axis=-2)
        return pack(levels, self.bits), scale, zero

    def decode(self, coded: Coded, C: int) -> Array:
        levels, scale, zero = coded
        return dequantise(unpack(levels, self.bits), scale, zero)


@dataclass(frozen=True)
class TokenIntegers(PackedCode):
    """Integers 0 … 2^bits - 1 with a scale and zero point per token and group of channels: KIVI's values.

    A group has as many channels as the largest divisor of C that is at most `group`. Coded: levels uint8
    [*batch, 1, C·bits/8]; scale and zero point [*batch, 1, C/group].
    """

    bits: int
    group: int

    def encode(self, x: Array) -> Coded:
        C = x.shape[-1]
        groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, self._choose_group(C))
        levels, scale, zero = quantise(groups, self.bits, axis=-1)
        return pack(levels.reshape(x.shape), self.bits), scale[..., 0], zero[..., 0]

    def decode(self, coded: Coded, C: int) -> Array:
        levels, scale, zero = coded
        levels = unpack(levels, self.bits)
        groups = levels.reshape(*levels.shape[:-1], -1, self._choose_group(C))
        return dequantise(groups, scale[..., None], zero[..., None]).reshape(levels.shape)

    def _choose_group(self, C: int) -> int:
        return max(width for width in range(1, min(self.group, C) + 1) if C % width == 0)


@dataclass(frozen=True)
class ScaledChannelIntegers(ChannelIntegers):
    """`ChannelIntegers` of vectors of length 1, with the lengths in 16 bits: OScaR's keys (Su et al. 2026).

    A token that is much longer or shorter than others then does not stretch the scales that they share.
    Coded: the arrays of `ChannelIntegers`; length [*batch, group, 1].
    """

    def encode(self, x: Array) -> Coded:
        x, tiny = x.astype(jnp.float32), jnp.finfo(jnp.float32).tiny
        # Squares of the coordinates themselves could overflow.
        largest = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), tiny)
        length = jnp.sqrt(jnp.square(x / largest).sum(-1, keepdims=True)) * largest
        length = length.astype(SCALE_DTYPE)
        unit = x / jnp.maximum(length.astype(jnp.float32), tiny)
        return *super().encode(unit), length

    def decode(self, coded: Coded, C: int) -> Array:
        *integers, length = coded
        return super().decode(integers, C) * length.astype(jnp.float32)


@dataclass(frozen=True)
class ClippedIntegers(TokenIntegers):
    """`TokenIntegers` of clipped vectors, in interleaved groups: OSCAR's keys and values (Zhou et al. 2026).

    Coordinates are clipped at ±|x|_i, with i = min(⌊clip·C⌋, C - 1) in the ascending order of absolute values
    from 0; `clip` is in (0, 1], and 1 clips nothing. Of n groups, coordinate j belongs to group j mod n. The
    bit-reversal permutation of the paper forms the same groups where C and `group` are powers of two.
    """

    clip: float

    def encode(self, x: Array) -> Coded:
        C = x.shape[-1]
        x = x.astype(jnp.float32)
        limit = jnp.sort(jnp.abs(x), axis=-1)[..., min(int(self.clip * C), C - 1), None]
        clipped = jnp.clip(x, -limit, limit).reshape(*x.shape[:-1], self._choose_group(C), -1)
        return super().encode(clipped.swapaxes(-1, -2).reshape(x.shape))

    def decode(self, coded: Coded, C: int) -> Array:
        x = super().decode(coded, C)
        return x.reshape(*x.shape[:-1], -1, self._choose_group(C)).swapaxes(-1, -2).reshape(x.shape)


def quantise(
    x: Float[Array, "..."], bits: int, axis: int, among: Bool[Array, "..."] | None = None
) -> tuple[UInt8[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Quantize x along an axis to levels 0 … 2^bits - 1, with |x - zero - level·scale| ≤ scale/2.

    The zero point and the last level enclose all x. Rounding the zero point down and the scale up guarantees
    this in 16 bits too. With `among`, they enclose only the x where `among` is true; the others take the
    nearest level.

    Returns:
      Levels, scale and zero point.
    """
    last_level = 2**bits - 1
    zero = -_round_up(-x.min(axis, keepdims=True, where=among, initial=jnp.inf))
    smallest = zero.astype(jnp.float32)
    largest = x.max(axis, keepdims=True, where=among, initial=-jnp.inf)
    scale = _round_up((largest - smallest) / last_level)
    levels = (x - smallest) / jnp.maximum(scale.astype(jnp.float32), jnp.finfo(jnp.float32).tiny)
    return jnp.clip(jnp.round(levels), 0, last_level).astype(jnp.uint8), scale, zero


def dequantise(
    levels: UInt8[Array, "..."], scale: Float[Array, "..."], zero: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return the values of the levels from `quantise`, in float32."""
    return zero.astype(jnp.float32) + levels.astype(jnp.float32) * scale.astype(jnp.float32)


def _round_up(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Round x up to the nearest bfloat16, which is float32 without the last 16 bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # Truncation rounds towards zero, which is up where x is negative.
    bits = jnp.where(x > 0, bits + jnp.uint32(0xFFFF), bits) >> 16
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), SCALE_DTYPE)
