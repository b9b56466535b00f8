"""TurboQuant's quantizer, compared with the paper in float64 loops and with known errors of its levels."""

from math import sqrt
from statistics import NormalDist

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compiled_codes import decode, encode
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.cache.codes.gaussian import (
    TurnedGaussian,
    gaussian_distortion,
    gaussian_levels,
    turn,
)

MAX = {
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}
"""Positive levels, to four digits (Max 1960, table I)."""
DISTORTION = {2: 0.1175, 3: 0.03454, 4: 0.009497, 8: 2.7207 / 256**2}
"""Mean square error of a unit Gaussian (Max 1960); of eight bits, the limit (Panter and Dite 1951)."""


def by_the_paper(x: np.ndarray, bits: int) -> np.ndarray:
    """Round vectors [n, C] by the paper: rotate, take the nearest levels, rotate back; scales in 16 bits."""
    matrix, levels, out = turn(x.shape[1]).astype(np.float64), gaussian_levels(bits), np.empty_like(x)
    for row, vector in enumerate(x):
        size = sqrt(sum(value * value for value in vector) / len(vector))
        nearest = [levels[np.argmin(np.abs(levels - value / size))] for value in vector @ matrix]
        out[row] = matrix @ nearest * float(ml_dtypes.bfloat16(size))
    return out


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_those_of_max(bits):
    levels = gaussian_levels(bits)
    np.testing.assert_allclose(levels[len(levels) // 2 :], MAX[bits], rtol=5e-4)
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-12)


@pytest.mark.parametrize("bits", DISTORTION)
def test_levels_err_as_little_as_they_can(bits):
    # The error in closed form: a level l between a and b contributes ∫(x - l)² φ.
    normal, levels, error = NormalDist(), gaussian_levels(bits), 0.0
    middles = [-40.0, *(levels[1:] + levels[:-1]) / 2, 40.0]
    for level, a, b in zip(levels, middles, middles[1:], strict=False):
        mass = normal.cdf(b) - normal.cdf(a)
        first = normal.pdf(a) - normal.pdf(b)
        second = mass + a * normal.pdf(a) - b * normal.pdf(b)
        error += second - 2 * level * first + level**2 * mass
    assert error == pytest.approx(DISTORTION[bits], rel=2e-3 if bits < 8 else 1e-2)
    assert gaussian_distortion(bits) == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("C", [16, 48, 64, 80, 96, 112, 128])
def test_the_turn_is_orthogonal_and_flat(C):
    matrix = turn(C).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(C), atol=1e-6)
    assert np.abs(matrix).max() <= sqrt(2 / C) * (1 + 1e-6)


@pytest.mark.parametrize("C", [16, 128])
def test_powers_of_two_are_turned_by_hadamard(C):
    sign = np.array([[(-1) ** (row & column).bit_count() for column in range(C)] for row in range(C)])
    matrix = turn(C) * sqrt(C)
    np.testing.assert_allclose(matrix * matrix[:, :1], sign, atol=1e-6)


@pytest.mark.parametrize(("bits", "C"), [(2, 48), (3, 64), (4, 80), (8, 16)])
@pytest.mark.matrix
def test_vectors_are_those_of_the_paper(bits, C):
    x = np.random.default_rng(bits).standard_t(df=3, size=(2, 40, 1, C)).astype(np.float32)
    code = TurnedGaussian(bits)
    levels, size = coded = encode(code, jnp.asarray(x))
    assert levels.nbytes * 8 == x.size * bits
    assert size.dtype.itemsize == 2
    paper = by_the_paper(x.reshape(-1, C).astype(np.float64), bits).reshape(x.shape)
    np.testing.assert_allclose(decode(code, coded, C), paper, atol=1e-5 * np.abs(x).max())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gaussians_err_as_theory_says(bits):
    x = np.random.default_rng(7).normal(size=(500, 1, 512)).astype(np.float32)
    code = TurnedGaussian(bits)
    error = np.asarray(decode(code, encode(code, jnp.asarray(x)), 512), np.float64) - x
    # Few coordinates, relative to their own length, have lighter tails: at 64 the error is 3 % smaller.
    assert (error**2).mean() == pytest.approx(DISTORTION[bits], rel=0.01)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-45, 36))
def test_vectors_of_any_size_can_be_read(seed, exponent):
    # Vectors include zeros and one with a single nonzero coordinate. Errors stay below their norms.
    x = np.random.default_rng(seed).normal(size=(4, 1, 48)) * 10.0 ** (exponent - 1)
    x[0], x[1, :, 1:] = 0, 0
    x = x.astype(np.float32)
    code = TurnedGaussian(4)
    decoded = np.asarray(decode(code, encode(code, jnp.asarray(x)), 48), np.float64)
    assert not decoded[0].any()
    tiny = 48 * np.finfo(np.float32).tiny
    norm = np.linalg.norm(x.astype(np.float64), axis=-1)
    assert (np.linalg.norm(decoded - x, axis=-1) <= 0.3 * norm + tiny).all()
