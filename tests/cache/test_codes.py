"""Levels packed in bytes, and the codes without blocks: float8 and int8."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.cache.codes.code import (
    Float8,
    Int8,
    Split,
    empty_blocks,
    empty_tokens,
    encode_tokens,
    pack,
    unpack,
)
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.codes.integers import ChannelIntegers, TokenIntegers
from zdc_jax.cache.codes.residual import Gear

SEEDS = st.integers(0, 2**32 - 1)
EXPONENTS = st.integers(-45, 36)
"""Exponents of ten, from below the least float32 to the largest size that codes support."""
SHAPE = (2, 3, 1, 48)


def vectors(seed: int, exponent: int) -> np.ndarray:
    """Return Gaussian float32 vectors, one of zeros and one with an outlier."""
    x = np.random.default_rng(seed).normal(size=SHAPE)
    x[0, 0], x[1, 2, :, 5] = 0, 60
    return (x * 10.0 ** (exponent - 2)).astype(np.float32)


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_packed_into_as_many_bits_as_they_have(bits):
    levels = np.random.default_rng(bits).integers(0, 2**bits, (2, 5, 48)).astype(np.uint8)
    packed = pack(jnp.asarray(levels), bits)
    assert packed.dtype == jnp.uint8
    assert packed.nbytes * 8 == levels.size * bits
    np.testing.assert_array_equal(unpack(packed, bits), levels)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_first_level_is_lowest_in_its_byte(bits):
    levels = np.random.default_rng(bits).integers(0, 2**bits, 16).astype(np.uint8)
    number = sum(int(level) << (bits * place) for place, level in enumerate(levels))
    assert bytes(np.asarray(pack(jnp.asarray(levels), bits))) == number.to_bytes(2 * bits, "little")


def test_three_bits_are_two_and_one():
    levels = np.arange(8, dtype=np.uint8)
    high, low = [0b01010000, 0b11111010], [0b10101010]
    assert list(np.asarray(pack(jnp.asarray(levels), 3))) == [*high, *low]


@settings(deadline=None, max_examples=50)
@given(seed=SEEDS, exponent=EXPONENTS)
def test_float8_is_the_nearest_float8(seed, exponent):
    x = vectors(seed, exponent)
    coded = Float8().encode(jnp.asarray(x))
    assert coded.shape == x.shape
    assert coded.dtype == jnp.uint8
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(Float8().decode(coded, 48), expected)


@settings(deadline=None, max_examples=50)
@given(seed=SEEDS, exponent=EXPONENTS)
def test_int8_errs_by_half_a_step(seed, exponent):
    x = vectors(seed, exponent)
    levels, scale = coded = Int8().encode(jnp.asarray(x))
    assert levels.dtype == jnp.int8
    assert scale.shape == (*SHAPE[:-1], 1)
    assert scale.dtype.itemsize == 2
    step = np.abs(x.astype(np.float64)).max(-1, keepdims=True) / 127
    error = np.abs(np.asarray(Int8().decode(coded, 48), np.float64) - x)
    # The scale is rounded to 8 bits, and values below the least normal number may become zero.
    assert (error <= step / 2 * (1 + 2**-7) + 127 * np.finfo(np.float32).tiny).all()


@pytest.mark.parametrize("code", [Float8(), Int8()])
def test_zeros_can_be_read(code):
    empty = empty_blocks(code, SHAPE[:2], 48, "float32")
    np.testing.assert_array_equal(code.decode(empty, 48), np.zeros(SHAPE))


SINGLE = (
    Float8(),
    Int8(),
    TokenIntegers(4, 16),
    FittedIntegers(3),
    Split(16, FittedIntegers(6), FittedIntegers(4)),
)
"""Codes of single tokens."""


def shapes(tree: object) -> list[tuple[tuple[int, ...], str]]:
    return [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "code", [*SINGLE, ChannelIntegers(2, 8), Gear(2, 8, rank=2, outliers=0.1, by_channel=True)]
)
def test_empty_blocks_are_as_coded_ones(code):
    # Shapes of all blocks follow from one block.
    coded = jax.eval_shape(code.encode, jax.ShapeDtypeStruct((2, 3, code.block, 48), "bfloat16"))
    assert shapes(empty_blocks(code, (2, 3), 48, "bfloat16")) == shapes(coded)


@pytest.mark.parametrize("code", SINGLE)
def test_empty_tokens_are_as_coded_ones(code):
    tokens = jax.ShapeDtypeStruct((2, 3, 5, 48), "bfloat16")
    coded = jax.eval_shape(partial(encode_tokens, code), tokens)
    assert shapes(empty_tokens(code, (2, 3, 5), 48, "bfloat16")) == shapes(coded)
