"""Scales in 8 bits: 5 of exponent and 3 of mantissa, without a sign (ours)."""

import jax
import jax.numpy as jnp
from jax import Array

NAN_CODE = 255
"""Of a reach: the token holds what is no number. 0 is that of zero."""
E5M3_BIAS, E5M3_SHIFT = (127 - 16) << 3, 20
"""From 8 bits to those of float32: exponent and three bits of 2^-16, bits that are dropped."""


def from_e5m3(codes: Array) -> Array:
    """What codes of any integers stand for, float32: 0, sizes from 2^-16 · 9/8 to 2^15 · 7/4, or NaN."""
    codes = codes.astype(jnp.int32)
    size = jax.lax.bitcast_convert_type((codes + E5M3_BIAS) << E5M3_SHIFT, jnp.float32)
    return jnp.where(codes == 0, 0.0, jnp.where(codes == NAN_CODE, jnp.nan, size))
