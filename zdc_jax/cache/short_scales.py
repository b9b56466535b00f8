"""Scales in 8 bits: 5 of exponent and 3 of mantissa, without a sign."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer

from kernels_pallas.unpack import E5M3_BIAS, E5M3_SHIFT, NAN_CODE
from zdc_jax.axes import Array

NAN = NAN_CODE
"""The code of what is no number; 0 is that of zero."""


def from_e5m3(code: Integer[Array, "*batch"]) -> Float[Array, "*batch"]:
    """What codes stand for, float32: 0, sizes from 2^-16 · 9/8 to 2^15 · 7/4, or NaN."""
    bits = (code.astype(jnp.int32) + E5M3_BIAS) << E5M3_SHIFT
    size = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(code == NAN, jnp.nan, jnp.where(code == 0, 0, size))
