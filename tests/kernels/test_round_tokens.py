"""Kernel that quantizes tokens and returns what they read as; on a CPU, Pallas' interpreter runs it."""

import compiled_codes
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import round_tokens, round_tokens_refusal
from kernels_pallas.quantized.encode import lengthen
from kernels_pallas.quantized.round_tokens import TOKENS
from zdc_jax.cache.codes.fitted_integers import FittedIntegers

B, K = 2, 3


def draw(T, *widths, dtype=jnp.bfloat16):
    rng = np.random.default_rng(T)
    sizes = np.exp(2 * rng.normal(size=(B, T, K, 1)))
    return [jnp.asarray(rng.normal(size=(B, T, K, C)) * sizes, dtype) for C in widths]


def check(bits, T, *widths, dtype=jnp.bfloat16, **options):
    """Assert that errors equal the quantizer's, and that values are those of the levels."""
    code, tokens = FittedIntegers(bits), draw(T, *widths, dtype=dtype)
    for x, found in zip(tokens, round_tokens(tokens, bits, **options), strict=True):
        C, exact = x.shape[-1], lengthen(np.float64(x), bits)
        best = compiled_codes.encode(code, x[..., None, :])
        read = [
            np.float64(compiled_codes.decode(code, coded, C))[..., 0, :]
            for coded in (best, (found.levels[..., None, :], found.reach[..., None, None]))
        ]
        errors = [np.square(each - exact).sum(-1) for each in read]
        # Another scale may be chosen where errors of the lengthened vectors are equal.
        np.testing.assert_allclose(*errors, rtol=1e-4)
        np.testing.assert_array_equal(np.asarray(found.values), read[1].astype(found.values.dtype))
        assert found.values.dtype == dtype


@pytest.mark.parametrize("bits", [8, 3])
@pytest.mark.parametrize("T", [2, TOKENS + 9])
@pytest.mark.matrix
def test_rounds_as_the_code_does(bits, T):
    check(bits, T, 128, 64, interpret=True)


@pytest.mark.full
def test_widths_that_are_no_power_of_two():
    check(5, 20, 96, 80, dtype=jnp.float32, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("T", [1, 2, 700])
def test_rounds_on_the_device(bits, T):
    check(bits, T, 128, 96)
    check(bits, T, 256, 256, dtype=jnp.float32)


def test_values_that_are_not_finite_become_nan():
    (x,) = draw(5, 32)
    (found,) = round_tokens([x.at[1, 2, 0, 7].set(jnp.inf)], 8, interpret=True)
    broken = np.isnan(np.asarray(found.values, np.float32))
    assert broken[1, 2, 0].all()
    assert broken.sum() == 32


def test_refusals_name_the_argument():
    (x,) = draw(2, 40)
    assert round_tokens_refusal([x], 8) == "x[0] has 40 coordinates: must be a multiple of 16"
    assert round_tokens_refusal(draw(2, 32), 7) == "bits=7: must be one of (2, 3, 4, 5, 6, 8)"
    assert "must be a float dtype" in round_tokens_refusal([x[..., :32].astype(jnp.int32)], 8)
