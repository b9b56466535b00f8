"""Codes of integers with a scale and a zero point: those of KIVI (Liu et al. 2024)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, UInt8

from zdc_jax.axes import Array
from zdc_jax.cache.codes import SCALE_DTYPE, Code, Coded, pack, packing_refusal, unpack


@dataclass(frozen=True)
class ChannelIntegers(Code):
    """Integers 0 … 2^bits - 1 with a scale and zero point a channel of `group` tokens: KIVI's keys.

    Coded: levels uint8 [*batch, group, C·bits/8], scale and zero [*batch, 1, C].
    """

    bits: int
    group: int

    @property
    def block(self) -> int:
        return self.group

    def refusal(self, C: int) -> str | None:
        return packing_refusal(C)

    def encode(self, x: Array) -> Coded:
        levels, scale, zero = quantise(x.astype(jnp.float32), self.bits, axis=-2)
        return pack(levels, self.bits), scale, zero

    def decode(self, coded: Coded, C: int) -> Array:
        levels, scale, zero = coded
        return dequantise(unpack(levels, self.bits), scale, zero)


@dataclass(frozen=True)
class TokenIntegers(Code):
    """Integers 0 … 2^bits - 1 with a scale and zero point a token and group of channels: KIVI's values.

    A group is the largest divisor of C that is at most `group`. Coded: levels uint8 [*batch, 1, C·bits/8],
    scale and zero [*batch, 1, C/group].
    """

    bits: int
    group: int

    def refusal(self, C: int) -> str | None:
        return packing_refusal(C)

    def encode(self, x: Array) -> Coded:
        C = x.shape[-1]
        groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, self._channels(C))
        levels, scale, zero = quantise(groups, self.bits, axis=-1)
        return pack(levels.reshape(x.shape), self.bits), scale[..., 0], zero[..., 0]

    def decode(self, coded: Coded, C: int) -> Array:
        levels, scale, zero = coded
        levels = unpack(levels, self.bits)
        groups = levels.reshape(*levels.shape[:-1], -1, self._channels(C))
        return dequantise(groups, scale[..., None], zero[..., None]).reshape(levels.shape)

    def _channels(self, C: int) -> int:
        return max(width for width in range(1, min(self.group, C) + 1) if C % width == 0)


def quantise(
    x: Float[Array, "..."], bits: int, axis: int, among: Bool[Array, "..."] | None = None
) -> tuple[UInt8[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Levels 0 … 2^bits - 1 along an axis, their scale and zero: |x - zero - level·scale| ≤ scale/2.

    Zero and the last level enclose all x (of those `among` which are to be read: the others take the nearest
    level). Rounding the zero down and the scale up sees to that in 16 bits too.
    """
    most = 2**bits - 1
    least = x.min(axis, keepdims=True, where=among, initial=jnp.inf)
    zero = -_rounded_up(-least)
    low = zero.astype(jnp.float32)
    scale = _rounded_up((x.max(axis, keepdims=True, where=among, initial=-jnp.inf) - low) / most)
    steps = (x - low) / jnp.maximum(scale.astype(jnp.float32), jnp.finfo(jnp.float32).tiny)
    return jnp.clip(jnp.round(steps), 0, most).astype(jnp.uint8), scale, zero


def dequantise(
    levels: UInt8[Array, "..."], scale: Float[Array, "..."], zero: Float[Array, "..."]
) -> Float[Array, "..."]:
    """What levels of `quantise` say, in float32."""
    return zero.astype(jnp.float32) + levels.astype(jnp.float32) * scale.astype(jnp.float32)


def _rounded_up(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The least bfloat16 that is no smaller than x: float32 of which the last 16 bits are cut off."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # Cutting rounds towards zero, which is up where x is negative.
    bits = jnp.where(x > 0, bits + jnp.uint32(0xFFFF), bits) >> 16
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), SCALE_DTYPE)
