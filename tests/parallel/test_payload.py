"""Messages in float8 and in quantized form, compared with their definitions, and their scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from payload_codes import emulated

from benchmarks.mesh.traffic import row_bytes
from zdc_jax.errors import CalibrationError
from zdc_jax.parallel.payload import (
    BITS,
    EXACT,
    FIRST_BITS,
    HEADROOM,
    PAYLOADS,
    Formats,
    RotatedIntegers,
    ScaledFloat8,
    check_basis,
    coded_blocks,
    scale_for,
)

SCALES = 2.0 ** np.array([[5, -7, -20, -3, 0, 9]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.matrix
def test_numbers_in_range_keep_four_bits(dtype):
    # 3 bits of mantissa give half a unit, 2^-4 of a number; below 2^-6 half of 2^-9, all times the scale.
    rng = np.random.default_rng(0)
    magnitude = 2.0 ** rng.uniform(-12, np.log2(448), (1, 500, 1, 6)) * SCALES
    x = jnp.asarray(np.where(rng.random(magnitude.shape) < 0.5, -1, 1) * magnitude, dtype)
    scales = jnp.asarray(SCALES, dtype)
    form = ScaledFloat8(scales)
    halves = form.pack(x)
    assert sum(half[0, 0, 0].nbytes for half in halves) == row_bytes(
        "q", 6, "float8", jnp.dtype(dtype).itemsize
    )
    back = jax.jit(lambda *halves: form.unpack(*halves, dtype=x.dtype))(*halves)
    assert back.dtype == dtype
    x, back = np.asarray(x, np.float64), np.asarray(back, np.float64)
    np.testing.assert_array_equal(back[..., :EXACT], x[..., :EXACT])
    assert np.all(np.abs(back - x) <= np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * SCALES))
    rounded = np.clip(x / SCALES, -448, 448).astype(jnp.float8_e4m3fn) * SCALES
    np.testing.assert_array_equal(back[..., EXACT:], rounded[..., EXACT:])


def test_what_is_beyond_the_range_saturates():
    x = jnp.array([3e9, -jnp.inf, 449, 470, -1e6, jnp.inf, -jnp.inf, jnp.nan])[None, None, None]
    form = ScaledFloat8(jnp.ones((1, 8)))
    got = form.unpack(*form.pack(x), dtype=x.dtype)[0, 0, 0]
    np.testing.assert_array_equal(got, [3e9, -np.inf, 448, 448, -448, 448, -448, np.nan])


def test_bytes_of_a_row():
    assert [row_bytes("k", width, "float8", 2) for width in (0, 1, 2, 3, 32)] == [0, 2, 4, 5, 34]
    assert [row_bytes("o", width, "native", 2) for width in (0, 1, 32)] == [0, 2, 64]


def test_scales_are_powers_of_two_with_headroom():
    rms = np.concatenate([10.0 ** np.linspace(-8, 8, 400), [0.0]])
    scales = scale_for(rms)
    assert np.all(np.frexp(scales)[0] == 0.5)
    np.testing.assert_array_equal(scales.astype(jnp.bfloat16).astype(np.float64), scales)
    assert np.all(HEADROOM * rms <= 448 * scales)
    assert np.all(448 * scales[:-1] < 2 * HEADROOM * rms[:-1])
    assert scales[-1] == 1


@pytest.mark.parametrize("kind", ["q", "k", "v", "o"])
@pytest.mark.parametrize("width", [1, 8, 20, 32, 64, 80])
@pytest.mark.full
def test_codes_arrive_as_in_float64(kind, width):
    # Exceptions are numbers midway between two levels, and scales with equal errors.
    form = getattr(Formats.coded(width, width), kind)
    x = np.random.default_rng(width).standard_t(4, (1, 300, 2, width)).astype(np.float32) * 3.1
    parts = form.pack(jnp.asarray(x))
    assert {part.dtype for part in parts} == {jnp.dtype(jnp.uint8)}
    assert sum(part[0, 0, 0].nbytes for part in parts) == row_bytes(kind, width, "coded", 2)
    got = jax.jit(lambda *parts: form.unpack(*parts, dtype=jnp.float32))(*parts)
    expected = emulated(x, coded_blocks(kind, width))
    differs = np.abs(got - expected).max(-1) > 1e-4
    assert differs.mean() < 0.01

    def wrong(found):
        return np.mean((np.asarray(found) - x) ** 2)

    np.testing.assert_allclose(wrong(got), wrong(expected), rtol=1e-3)


@pytest.mark.full
def test_what_is_zero_or_no_number():
    # Zeros arrive as zeros, and NaN stays within its block of its token and head.
    form, x = Formats.coded(32, 32).q, np.random.default_rng(0).normal(size=(1, 5, 2, 32)).astype(np.float32)
    x[0, 1, 0], x[0, 2, 1, 0], x[0, 3, 0, 31] = 0, np.inf, np.nan
    got = np.asarray(form.unpack(*form.pack(jnp.asarray(x, jnp.bfloat16)), dtype=jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[0, 1, 0], 0)
    lost = np.zeros(x.shape, bool)
    lost[0, 2, 1, :8] = lost[0, 3, 0, 8:] = True
    np.testing.assert_array_equal(np.isnan(got), lost)
    assert np.sqrt(np.mean((got - x)[~lost].astype(np.float64) ** 2)) < 0.1


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_what_arrives_is_no_shorter(bits):
    # Products of vectors with what arrives are unbiased; with the nearest levels, they lose 4 % at 3 bits.
    x = np.random.default_rng(0).normal(size=(1, 4000, 1, 64)).astype(np.float32)
    form = RotatedIntegers(64, ((64, bits),))
    got = np.asarray(form.unpack(*form.pack(jnp.asarray(x)), dtype=jnp.float32))
    assert np.mean(got * x) / np.mean(x * x) == pytest.approx(1, abs=2e-3)


def test_bytes_of_codes():
    # A vector has levels in whole bytes and a scale, and a second scale if its first quarter has its own.
    bits, first = BITS, FIRST_BITS
    quarter = 16 * first // 8 + 1
    assert row_bytes("q", 64, "coded", 2) == quarter + 48 * bits // 8 + 1
    assert row_bytes("k", 61, "coded", 2) == quarter + 48 * bits // 8 + 1
    assert [row_bytes("v", width, "coded", 2) for width in (0, 1, 8, 64)] == [
        0,
        bits + 1,
        bits + 1,
        8 * bits + 1,
    ]
    assert row_bytes("o", 64, "coded", 4) == 8 * bits + 1
    assert row_bytes("q", 24, "coded", 2) == 3 * first + 1


def test_payloads_that_round_need_a_basis():
    check_basis("native", None)
    for payload in PAYLOADS[1:]:
        with pytest.raises(
            CalibrationError, match=f"payload='{payload}': needs a calibrated basis; pass plan="
        ):
            check_basis(payload, None)
