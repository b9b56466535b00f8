"""The float8 message against the definition of e4m3, and scales against what they promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zdc_jax.parallel.payload import EXACT, HEADROOM, packed, row_bytes, scale_for, unpacked

SCALES = 2.0 ** np.array([[5, -7, -20, -3, 0, 9]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_numbers_in_range_keep_four_bits(dtype):
    """Half a unit of 3 bits of mantissa, 2^-4 of a number; below 2^-6 half of 2^-9. All times the scale."""
    rng = np.random.default_rng(0)
    magnitude = 2.0 ** rng.uniform(-12, np.log2(448), (1, 500, 1, 6)) * SCALES
    x = jnp.asarray(np.where(rng.random(magnitude.shape) < 0.5, -1, 1) * magnitude, dtype)
    scales = jnp.asarray(SCALES, dtype)
    halves = packed(x, scales)
    assert sum(half[0, 0, 0].nbytes for half in halves) == row_bytes(6, "float8", jnp.dtype(dtype).itemsize)
    back = jax.jit(lambda *halves: unpacked(*halves, scales))(*halves)
    assert back.dtype == dtype
    x, back = np.asarray(x, np.float64), np.asarray(back, np.float64)
    np.testing.assert_array_equal(back[..., :EXACT], x[..., :EXACT])
    assert np.all(np.abs(back - x) <= np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * SCALES))
    rounded = np.clip(x / SCALES, -448, 448).astype(jnp.float8_e4m3fn) * SCALES
    np.testing.assert_array_equal(back[..., EXACT:], rounded[..., EXACT:])


def test_what_is_beyond_the_range_saturates():
    x = jnp.array([3e9, -jnp.inf, 449, 470, -1e6, jnp.inf, -jnp.inf, jnp.nan])[None, None, None]
    ones = jnp.ones((1, 8))
    got = unpacked(*packed(x, ones), ones)[0, 0, 0]
    np.testing.assert_array_equal(got, [3e9, -np.inf, 448, 448, -448, 448, -448, np.nan])


def test_bytes_of_a_row():
    assert [row_bytes(width, "float8", 2) for width in (0, 1, 2, 3, 32)] == [0, 2, 4, 5, 34]
    assert [row_bytes(width, "native", 2) for width in (0, 1, 32)] == [0, 2, 64]


def test_scales_are_powers_of_two_with_headroom():
    rms = np.concatenate([10.0 ** np.linspace(-8, 8, 400), [0.0]])
    scales = scale_for(rms)
    assert np.all(np.frexp(scales)[0] == 0.5)
    np.testing.assert_array_equal(scales.astype(jnp.bfloat16).astype(np.float64), scales)
    assert np.all(HEADROOM * rms <= 448 * scales)
    assert np.all(448 * scales[:-1] < 2 * HEADROOM * rms[:-1])
    assert scales[-1] == 1
