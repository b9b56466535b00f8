"""Quantizer of `coded`, compared with plain loops in float64 and with even levels of one scale."""

import jax.numpy as jnp
import numpy as np
import pytest
from compiled_codes import decode, encode

from kernels_pallas.quantized.encode import LONGER, reaches_tried
from zdc_jax.cache.codes.code import pack
from zdc_jax.cache.codes.fitted_integers import FittedIntegers

BITS = (2, 3, 4, 5, 6, 8)
REACHES = np.array([0.0, *[2.0 ** (e - 16) * (1 + m / 8) for e in range(32) for m in range(8)][1:-1]])
"""The scales of codes 0 to 254."""
ONE_STEP = {2: 0.1188, 3: 0.03744, 4: 0.01154, 5: 0.003495}
"""Mean square error of a unit Gaussian with even levels of the best scale (Max 1960, table II)."""


def rounded(x: np.ndarray, reach: float, bits: int) -> np.ndarray:
    """Round each coordinate to the nearest of 2^bits levels, evenly spaced from -reach to reach."""
    levels = reach * (2 * np.arange(2**bits) + 1 - 2**bits) / 2**bits
    return np.array([levels[np.argmin(np.abs(levels - value))] for value in x])


def fitted(x: np.ndarray, bits: int) -> np.ndarray:
    """Return the vector rounded with the best of the scales that are tried."""
    largest = np.abs(x).max().astype(np.float32).view(np.int32)
    tried = [rounded(x, REACHES[code], bits) for code in reaches_tried(largest, bits, len(x))]
    return min(tried, key=lambda found: ((found - x) ** 2).sum())


def there_and_back(x: np.ndarray, bits: int) -> np.ndarray:
    code = FittedIntegers(bits)
    return np.asarray(decode(code, encode(code, jnp.asarray(x)), x.shape[-1]), np.float64)


@pytest.mark.parametrize(("bits", "C"), [(2, 48), (3, 64), (4, 80), (5, 24), (6, 16), (8, 16)])
@pytest.mark.matrix
def test_vectors_err_as_in_loops(bits, C):
    # If two scales have equal errors, either may be chosen, so errors are compared, not levels.
    x = np.random.default_rng(bits).standard_t(df=5, size=(60, 1, C)).astype(np.float32) * 3.1
    levels, reach = encode(FittedIntegers(bits), jnp.asarray(x))
    assert levels.nbytes * 8 == x.size * bits
    assert (reach.shape, reach.dtype) == ((60, 1, 1), jnp.uint8)
    longer = x.astype(np.float64) * LONGER.get(bits, 1)
    errors = ((there_and_back(x, bits) - longer) ** 2).sum((1, 2))
    loops = [((fitted(row, bits) - row) ** 2).sum() for row in longer[:, 0]]
    np.testing.assert_allclose(errors, loops, rtol=1e-3)


@pytest.mark.parametrize("bits", BITS)
def test_vectors_keep_their_length(bits):
    x = np.random.default_rng(bits).normal(size=(4000, 1, 128)).astype(np.float32)
    kept = (there_and_back(x, bits) ** 2).mean() / (x.astype(np.float64) ** 2).mean()
    assert kept == pytest.approx(1, abs=0.008)


@pytest.mark.parametrize("bits", ONE_STEP)
@pytest.mark.matrix
def test_a_step_of_its_own_pays(bits):
    # The gain is least for many bits and few coordinates, and one scale for all is never better.
    rng, error = np.random.default_rng(7), {}
    for C in (16, 64, 512):
        x = rng.normal(size=(2000, 1, C)).astype(np.float32)
        error[C] = ((there_and_back(x, bits) / LONGER.get(bits, 1) - x) ** 2).mean() / ONE_STEP[bits]
    assert error[16] < error[64] < error[512] < 1.02
    assert error[64] < {2: 0.98, 3: 0.92, 4: 0.81, 5: 0.70}[bits]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("C", [32, 128])
@pytest.mark.matrix
def test_more_reaches_would_not_pay(bits, C):
    # Gaussian and heavy-tailed vectors, compared with all scales from 9 below the widest to 3 above it.
    rng = np.random.default_rng(C)
    x = np.concatenate([rng.normal(size=(200, C)), rng.standard_t(df=4, size=(200, C))]).astype(np.float32)
    found = there_and_back(x[:, None], bits)[:, 0]
    x = x * np.float32(LONGER.get(bits, 1))
    error = ((found - x) ** 2).sum(-1)
    widest = np.abs(REACHES - np.abs(x).max(1, keepdims=True)).argmin(1)
    half, all_errors = 2 ** (bits - 1), []
    for offset in range(-9, 4):
        step = REACHES[widest + offset][:, None] / half
        near = (np.minimum(np.floor(np.abs(x) / step), half - 1) + 0.5) * step
        all_errors.append(((near - np.abs(x)) ** 2).sum(-1))
    best = np.min(all_errors, axis=0)
    for part in (slice(200), slice(200, None)):
        assert error[part].sum() < {2: 1.3}.get(bits, 1.04) * best[part].sum()


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_what_integers_score(bits):
    # q · x is scale/2^bits times an integer product, the sum of (2l + 1 - 2^bits) q.
    levels = np.random.default_rng(bits).integers(0, 2**bits, 32)
    packed = pack(jnp.asarray(levels, jnp.uint8), bits)[None, None]
    back = FittedIntegers(bits).decode((packed, jnp.full((1, 1, 1), 128, jnp.uint8)), 32)
    np.testing.assert_array_equal(back[0, 0], (2 * levels + 1 - 2**bits) / 2**bits * REACHES[128])


def test_zeros_outliers_and_what_is_no_number():
    x = np.zeros((5, 1, 16), np.float32)
    x[1, 0, 3], x[2, 0], x[3, 0, 5], x[4] = 1e30, 1e-30, np.nan, 1e4
    back = there_and_back(x, 4)
    np.testing.assert_array_equal(back[[0, 2]], 0)
    assert back[1, 0, 3] == pytest.approx(REACHES[-1] * 15 / 16)
    assert np.isnan(back[3]).all()
    x[3, 0, 5] = np.inf
    assert np.isnan(there_and_back(x, 4)[3]).all()
    np.testing.assert_allclose(back[4], 1e4, rtol=0.06)
