"""Scales in 8 bits: all 256 codes."""

import jax.numpy as jnp
import numpy as np

from kernels_pallas.quantized.short_scales import from_e5m3

SIZES = np.array([2.0 ** (e - 16) * (1 + m / 8) for e in range(32) for m in range(8)][1:-1])
"""Scales of the codes 1 to 254."""


def test_short_scales_are_exponents_and_mantissas():
    found = from_e5m3(jnp.arange(256, dtype=jnp.uint8))
    np.testing.assert_array_equal(found, [0, *SIZES, np.nan])
