"""Scales in 8 bits: all 256 codes."""

import jax.numpy as jnp
import numpy as np

from kernels_pallas.quantized.short_scales import from_e5m3

SMALL = np.arange(1, 8) * 2.0**-17
SIZES = np.array([2.0 ** (e - 15) * (1 + m / 8) for e in range(1, 31) for m in range(8)])
"""Scales of the codes 1 to 7, and 8 to 247."""


def test_short_scales_are_exponents_and_mantissas():
    found = from_e5m3(jnp.arange(256, dtype=jnp.uint8))
    np.testing.assert_array_equal(found[:248], [0, *SMALL, *SIZES])
    assert np.isnan(found[255])
