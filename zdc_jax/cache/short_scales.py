"""Scales in 8 bits: 5 of exponent and 3 of mantissa, without a sign."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer, UInt8

from zdc_jax.axes import Array

NAN = 255
"""The code of what is no number; 0 is that of zero."""
_DROPPED = 20
"""Bits of float32's mantissa that a short scale has not."""
_LOWEST = (127 - 16) << 3
"""Exponent and three bits of mantissa of 2^-16 in float32."""


def to_e5m3(x: Float[Array, "*batch"]) -> UInt8[Array, "*batch"]:
    """The nearest of 2^-16 · 9/8 to 2^15 · 7/4, which larger sizes become; smaller ones become 0."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    code = jnp.clip(((bits + (1 << _DROPPED - 1)) >> _DROPPED) - _LOWEST, 0, NAN - 1)
    return jnp.where(jnp.isnan(x), NAN, code).astype(jnp.uint8)


def from_e5m3(code: Integer[Array, "*batch"]) -> Float[Array, "*batch"]:
    """What `to_e5m3` stored, float32."""
    bits = (code.astype(jnp.int32) + _LOWEST) << _DROPPED
    size = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(code == NAN, jnp.nan, jnp.where(code == 0, 0, size))
