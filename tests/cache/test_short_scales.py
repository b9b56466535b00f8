"""Scales in 8 bits against all 254 of them."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.cache.short_scales import from_e5m3, to_e5m3

SIZES = np.array([2.0 ** (e - 16) * (1 + m / 8) for e in range(32) for m in range(8)][1:-1])
"""Of the codes 1 to 254."""


@settings(deadline=None)
@given(exponent=st.floats(-17, 17))
def test_short_scales_are_the_nearest(exponent):
    size = np.float32(2.0**exponent)
    nearest = SIZES[np.abs(SIZES - size).argmin()]
    found = float(from_e5m3(to_e5m3(jnp.asarray(size))))
    assert found == pytest.approx(0 if size < SIZES[0] - 2.0**-20 else nearest, rel=1e-6) or (
        abs(found - size) == pytest.approx(abs(nearest - size), rel=1e-3)
    )


def test_short_scales_of_no_size():
    given = [0.0, 1e-30, 2.0**-17, 1e9, np.inf, np.nan]
    codes = to_e5m3(jnp.asarray(given, jnp.float32))
    assert codes.tolist() == [0, 0, 0, 254, 254, 255]
    np.testing.assert_array_equal(from_e5m3(codes), [0, 0, 0, SIZES[-1], SIZES[-1], np.nan])
    np.testing.assert_allclose(from_e5m3(jnp.arange(1, 255, dtype=jnp.uint8)), SIZES, rtol=1e-7)
