"""Scales in 8 bits: 5 bits of exponent and 3 of mantissa, without a sign (ours)."""

import jax
import jax.numpy as jnp
from jax import Array

NAN_CODE = 255
"""Code of a NaN, for tokens with a coordinate that is not finite. Code 0 is zero."""
E5M3_BIAS, E5M3_SHIFT = (127 - 16) << 3, 20
"""Conversion to the bits of float32: bias of the exponent (2^-16), and number of dropped bits."""


def from_e5m3(codes: Array) -> Array:
    """Return the values of codes of any integer dtype, in float32.

    They are 0, sizes from 2^-16 · 9/8 to 2^15 · 7/4, or NaN.
    """
    codes = codes.astype(jnp.int32)
    size = jax.lax.bitcast_convert_type((codes + E5M3_BIAS) << E5M3_SHIFT, jnp.float32)
    return jnp.where(codes == 0, 0.0, jnp.where(codes == NAN_CODE, jnp.nan, size))
