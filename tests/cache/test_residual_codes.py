"""GEAR's quantizer, compared with the paper in float64 loops, and its low rank with singular values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_codes import decode, encode
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zdc_jax.cache.codes.residual import Gear, low_rank

TOKENS = 16


def by_the_paper(vectors: np.ndarray, bits: int, rank: int, each: int) -> np.ndarray:
    """Encode one head's vectors [n, m] by the paper.

    The result has `each` outliers per side, integers, and singular vectors of the rest.
    """
    outlier, integers = np.zeros(vectors.shape, bool), np.empty_like(vectors)
    for row, vector in enumerate(vectors):
        ascending = np.argsort(vector)
        for place in [*ascending[:each], *ascending[len(vector) - each :]]:
            outlier[row, place] = True
        rest = vector[~outlier[row]]
        scale = (rest.max() - rest.min()) / (2**bits - 1)
        integers[row] = np.round((vector - rest.min()) / scale) * scale + rest.min()
    u, size, w = np.linalg.svd(np.where(outlier, 0, vectors - integers))
    return np.where(outlier, vectors, integers + (u[:, :rank] * size[:rank]) @ w[:rank])


def blocks(C: int, seed: int = 0) -> np.ndarray:
    """Return blocks [2, 3, TOKENS, C]: channels of many sizes, a pattern of rank one and a few outliers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 3, TOKENS, C)) * np.exp(rng.normal(size=C)) + rng.normal(size=(TOKENS, 1))
    return np.where(rng.random(x.shape) < 0.02, 20 * x, x).astype(np.float32)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize(("C", "bits", "rank", "each"), [(16, 2, 2, 1), (48, 4, 3, 2), (32, 3, 0, 0)])
@pytest.mark.matrix
def test_blocks_are_those_of_the_paper(C, bits, rank, each, by_channel):
    x = blocks(C)
    m = TOKENS if by_channel else C
    code = Gear(bits, TOKENS, rank, 2 * each / m, by_channel)

    def turned(block):
        return block.T if by_channel else block

    paper = np.array(
        [[turned(by_the_paper(turned(head), bits, rank, each)) for head in row] for row in x.astype(float)]
    )
    decoded = decode(code, encode(code, jnp.asarray(x)), C)
    assert relative_error(decoded, x) <= 1.05 * relative_error(paper, x)
    # Values rounded to the other side of a level differ from the paper's, but are no worse in total.
    assert relative_error(decoded, x) >= 0.9 * relative_error(paper, x)


def test_outliers_cost_others_nothing():
    # Other coordinates are as exact as without the huge one.
    x = np.random.default_rng(3).normal(size=(1, TOKENS, 32)).astype(np.float32)
    code = Gear(4, TOKENS, 0, 2 / TOKENS, by_channel=True)
    plain = np.asarray(decode(code, encode(code, jnp.asarray(x)), 32))
    for channel, token in enumerate(x[0].argmax(0)):
        x[0, token, channel] *= 1e4
    found = np.asarray(decode(code, encode(code, jnp.asarray(x)), 32))
    same = x < 100
    np.testing.assert_array_equal(found[same], plain[same])
    np.testing.assert_allclose(found, x, rtol=2**-8, atol=0.3)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.matrix
def test_low_rank_is_nearly_the_best(rank):
    rng = np.random.default_rng(rank)
    decaying = (rng.normal(size=(5, 24, 6)) * 2.0 ** -np.arange(6)) @ rng.normal(size=(5, 6, 16))
    A, B = low_rank(jnp.asarray(decaying, jnp.float32), rank)
    assert A.shape == (5, 24, rank)
    assert B.shape == (5, rank, 16)
    assert A.dtype.itemsize == B.dtype.itemsize == 2
    left = decaying - np.asarray(A, np.float64) @ np.asarray(B, np.float64)
    best = np.sqrt((np.linalg.svd(decaying)[1][:, rank:] ** 2).sum(-1))
    assert (np.linalg.norm(left, axis=(1, 2)) <= 1.05 * best).all()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-45, 36), kind=st.integers(0, 3))
@example(seed=469, exponent=-1, kind=2)  # After one column, the remainder is tiny but not zero.
@pytest.mark.full
def test_low_rank_never_makes_it_worse(seed, exponent, kind):
    # Inputs are noise, zeros, one row, and a matrix of lower rank than requested, of any size.
    x = np.random.default_rng(seed).normal(size=(2, 8, 24)) * 10.0 ** (exponent - 1)
    x = (x, 0 * x, x * (np.arange(8) == 3)[:, None], x[:, :1] * np.arange(8)[:, None] / 8)[kind]
    x = x.astype(np.float32)
    A, B = (np.asarray(part, np.float64) for part in low_rank(jnp.asarray(x), 3))
    norm = np.linalg.norm(x.astype(np.float64), axis=(1, 2))
    left = np.linalg.norm(x - A @ B, axis=(1, 2))
    share = 1.0 if kind == 0 else 2**-7
    assert (left <= share * norm + 1e-36).all()


@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("value", [0.0, 7.123, -1e30, 1e-40])
@pytest.mark.matrix
def test_blocks_of_one_value_keep_it(value, by_channel):
    x = jnp.full((1, TOKENS, 16), value, jnp.float32)
    code = Gear(4, TOKENS, 2, 0.2, by_channel)
    np.testing.assert_allclose(decode(code, encode(code, x), 16), x, rtol=2**-8, atol=1e-37)


def test_zeros_can_be_read():
    code = Gear(4, TOKENS, 2, 0.2, by_channel=True)
    coded = jax.eval_shape(code.encode, jax.ShapeDtypeStruct((3, TOKENS, 48), "float32"))
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), coded)
    np.testing.assert_array_equal(code.decode(empty, 48), np.zeros((3, TOKENS, 48)))


def test_ranks_that_are_refused():
    assert "rank=17 must be at most 16, for blocks [16, 32]" in Gear(4, 16, 17, 0, True).refusal(32)
    assert "rank 288 must be at most 256" in Gear(4, 16, 2, 0.02, False).refusal(288)
    assert "rank 20 must be a multiple of 8" in Gear(4, 16, 2, 0.02, False).refusal(20)
    assert Gear(4, 16, 2, 0.02, False).refusal(48) is None
