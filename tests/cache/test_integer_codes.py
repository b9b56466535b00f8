"""KIVI's quantizers, compared with the paper in float64 loops and with the errors that their scales allow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_codes import decode, encode
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.cache.codes.integers import (
    ChannelIntegers,
    ClippedIntegers,
    ScaledChannelIntegers,
    TokenIntegers,
    dequantise,
    quantise,
)

BLOCK, C = 16, 48
MORE = {2: 1.02, 3: 1.02, 4: 1.02, 8: 1.1}
"""Error relative to the paper's, whose scales and zeros are exact here instead of 16 bits."""


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """Round a vector by the formulas of KIVI's section 3: round((x - min) / scale) · scale + min."""
    least, scale = x.min(), (x.max() - x.min()) / (2**bits - 1)
    return np.round((x - least) / scale) * scale + least if scale else x


def kivi_keys(x: np.ndarray, bits: int) -> np.ndarray:
    """Round keys [block, C], one channel at a time."""
    return np.stack([rounded(x[:, channel], bits) for channel in range(x.shape[1])], axis=1)


def kivi_values(x: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Round values [block, C], one token and group of channels at a time."""
    out = np.empty_like(x)
    for token in range(x.shape[0]):
        for first in range(0, x.shape[1], group):
            out[token, first : first + group] = rounded(x[token, first : first + group], bits)
    return out


def blocks(seed: int = 0, tokens: int = BLOCK) -> np.ndarray:
    """Return blocks [3, 2, tokens, C] whose tokens and channels vary in size, some channels far from zero."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(size=(tokens, 1))) * np.exp(rng.normal(size=C))
    return (rng.normal(size=(3, 2, tokens, C)) * sizes + 5 * (np.arange(C) % 7 == 0)).astype(np.float32)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.matrix
def test_keys_are_those_of_the_paper(bits):
    x, code = blocks(), ChannelIntegers(bits, BLOCK)
    paper = np.array([[kivi_keys(head, bits) for head in row] for row in x.astype(np.float64)])
    decoded = decode(code, encode(code, jnp.asarray(x)), C)
    assert relative_error(decoded, x) <= MORE[bits] * relative_error(paper, x)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.matrix
def test_values_are_those_of_the_paper(bits):
    x, code = blocks(1, tokens=1), TokenIntegers(bits, 16)
    paper = np.array([[kivi_values(head, bits, 16) for head in row] for row in x.astype(np.float64)])
    decoded = decode(code, encode(code, jnp.asarray(x)), C)
    assert relative_error(decoded, x) <= MORE[bits] * relative_error(paper, x)


def oscar(x: np.ndarray, bits: int, groups: int, clip: float) -> np.ndarray:
    """Round a vector as OSCAR's kernels do: clip by its sorted absolute values, then permute, then round."""
    width = len(x)
    limit = np.sort(np.abs(x))[min(int(clip * width), width - 1)]
    digits = int(np.log2(width))
    reversal = [int(f"{i:0{digits}b}"[::-1], 2) for i in range(width)]
    turned = np.empty(width)
    turned[reversal] = np.clip(x, -limit, limit)
    parts = [rounded(part, bits) for part in np.split(turned, groups)]
    return np.concatenate(parts)[reversal]


@pytest.mark.parametrize(("bits", "group", "clip"), [(2, 128, 0.96), (2, 16, 0.92), (3, 32, 1.0)])
@pytest.mark.matrix
def test_clipped_integers_are_those_of_oscar(bits, group, clip):
    x = np.random.default_rng(2).standard_t(df=4, size=(3, 2, 1, 64)).astype(np.float32)
    code = ClippedIntegers(bits, group, clip)
    found = np.asarray(decode(code, encode(code, jnp.asarray(x)), 64), np.float64)
    paper = np.apply_along_axis(oscar, -1, x.astype(np.float64), bits, max(1, 64 // group), clip)
    # Levels may differ only where rounding the scale and the minimum to 16 bits moved them.
    assert np.mean(np.abs(found - paper) <= 2**-6 * np.abs(x).max(-1, keepdims=True)) > 0.97
    assert relative_error(found, x) <= MORE[bits] * relative_error(paper, x)


def test_clipping_takes_the_largest_coordinates():
    x = jnp.asarray([[*range(-4, 4)]], jnp.float32)
    # Of the absolute values 0, 1, 1, 2, 2, 3, 3, 4 the one with index ⌊0.7 · 8⌋ = 5 is 3.
    decoded = decode(ClippedIntegers(8, 8, 0.7), encode(ClippedIntegers(8, 8, 0.7), x), 8)
    np.testing.assert_allclose(decoded, np.clip(x, -3, 3), atol=0.05)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.matrix
def test_scaled_keys_are_those_of_oscar_free(bits):
    x, code = blocks(3), ScaledChannelIntegers(bits, BLOCK)
    length = np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)
    unit = x / length
    paper = length * np.array([[kivi_keys(head, bits) for head in row] for row in unit])
    decoded = decode(code, encode(code, jnp.asarray(x)), C)
    # Lengths have 16 bits, too.
    assert relative_error(decoded, x) <= 1.01 * MORE[bits] * relative_error(paper, x)


@pytest.mark.parametrize("scale", [0.0, 1e-36, 1e36])
def test_scaled_keys_neither_overflow_nor_vanish(scale):
    x, code = scale * blocks(4) / np.abs(blocks(4)).max(), ScaledChannelIntegers(8, BLOCK)
    decoded = np.asarray(decode(code, encode(code, jnp.asarray(x, jnp.float32)), C), np.float64)
    np.testing.assert_allclose(decoded, x, atol=0.02 * np.abs(x).max())


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from([2, 4]),
    exponent=st.integers(-36, 34),
    offset=st.sampled_from([0.0, 1.0, -30.0, 1e4]),
    axis=st.sampled_from([-1, -2]),
)
def test_no_coordinate_errs_by_more_than_half_a_step(seed, bits, exponent, offset, axis):
    x = np.random.default_rng(seed).standard_t(df=2, size=(2, 8, 24))
    x[0, :, 3], x[1, 2] = 0, 7
    x = (np.clip(x, -50, 50) * 10.0**exponent + offset * 10.0**exponent).astype(np.float32)
    levels, scale, zero = quantise(jnp.asarray(x), bits, axis)
    assert levels.max() < 2**bits
    assert scale.dtype.itemsize == zero.dtype.itemsize == 2
    wide, least = np.asarray(scale, np.float64), x.min(axis, keepdims=True)
    tiny = 2**bits * np.finfo(np.float32).tiny  # Scales below the least normal number may become zero.
    error = np.abs(np.asarray(dequantise(levels, scale, zero), np.float64) - x)
    assert (error <= wide / 2 + 2**-22 * np.abs(x) + tiny).all()
    # The scale is the paper's, except that the zero is rounded down and the scale itself up.
    widest = x.max(axis, keepdims=True).astype(np.float64) - least + 2**-7 * np.abs(least)
    assert (wide * (2**bits - 1) <= widest * (1 + 2**-7) + tiny).all()


@pytest.mark.parametrize("value", [0.0, 7.123, -7.123, 3e-39, -1e30])
def test_vectors_of_one_value_keep_it(value):
    x = jnp.full((2, 8, 24), value, jnp.float32)
    decoded = dequantise(*quantise(x, 2, -1))
    np.testing.assert_allclose(decoded, x, rtol=2**-9, atol=1.2e-38)


def test_others_stretch_no_step():
    # Coordinates that are not read get the nearest level.
    x = jnp.asarray([[1.0, 2.0, 1e6, 4.0, -1e6]])
    levels, scale, _ = quantise(x, 2, -1, jnp.asarray([[True, True, False, True, False]]))
    assert list(levels[0]) == [0, 1, 3, 3, 0]
    assert scale == 1


@pytest.mark.parametrize(
    ("width", "group", "groups"), [(48, 32, 2), (80, 32, 4), (96, 32, 3), (16, 32, 1), (128, 32, 4)]
)
def test_groups_of_values_divide_the_rank(width, group, groups):
    coded = jax.eval_shape(TokenIntegers(4, group).encode, jax.ShapeDtypeStruct((5, 1, width), "float32"))
    assert [leaf.shape for leaf in coded] == [(5, 1, width // 2), (5, 1, groups), (5, 1, groups)]


def test_ranks_that_fill_no_bytes_are_refused():
    assert "rank 20 must be a multiple of 8" in ChannelIntegers(4, 32).refusal(20)
    assert "rank 20 must be a multiple of 8" in TokenIntegers(4, 32).refusal(20)
    assert ChannelIntegers(4, 32).refusal(48) is None
