"""Scales in 8 bits: 5 bits of exponent and 3 of mantissa, without a sign (ours).

They are the bits 7 to 14 of a float16, so one shift and one conversion decode them.
"""

import jax
import jax.numpy as jnp
from jax import Array

NAN_CODE, LARGEST_CODE = 255, 247
"""Code of a NaN, for tokens with a coordinate that is not finite, and of the largest scale. 0 is zero."""
E5M3_BIAS, E5M3_SHIFT = (127 - 15) << 3, 20
"""Conversion to the bits of float32: bias of the exponent (2^-15), and number of dropped bits."""


def from_e5m3(codes: Array) -> Array:
    """Return the values of codes of any integer dtype, in float32.

    They are 0, sizes from 2^-17 to 2^15 · 15/8, or NaN. Those below 2^-14 are multiples of 2^-17.
    """
    bits = codes.astype(jnp.int16) << 7
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
