"""Scales in 8 bits: 5 of exponent and 3 of mantissa, without a sign."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer, UInt8

from kernels_pallas.unpack import E5M3_BIAS, E5M3_SHIFT, NAN_CODE
from zdc_jax.axes import Array

NAN = NAN_CODE
"""The code of what is no number; 0 is that of zero."""


def to_e5m3(x: Float[Array, "*batch"]) -> UInt8[Array, "*batch"]:
    """The nearest of 2^-16 · 9/8 to 2^15 · 7/4, which larger sizes become; smaller ones become 0."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    code = jnp.clip(((bits + (1 << E5M3_SHIFT - 1)) >> E5M3_SHIFT) - E5M3_BIAS, 0, NAN - 1)
    return jnp.where(jnp.isnan(x), NAN, code).astype(jnp.uint8)


def from_e5m3(code: Integer[Array, "*batch"]) -> Float[Array, "*batch"]:
    """What `to_e5m3` stored, float32."""
    bits = (code.astype(jnp.int32) + E5M3_BIAS) << E5M3_SHIFT
    size = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(code == NAN, jnp.nan, jnp.where(code == 0, 0, size))
