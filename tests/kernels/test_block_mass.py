"""Attention mass by block of keys, compared with a float64 softmax; Pallas' interpreter runs the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import f64

from kernels_pallas import block_mass

BF16 = jnp.bfloat16


def draw(seed, *shape, dtype=BF16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def truth(q, at, k, *, scale, keys):
    """Compute the mass [B, K, nq, blocks], one block of queries at a time."""
    q, k, at = f64(q), f64(k), np.asarray(at)
    (B, K, nq, _, _), S = q.shape, k.shape[2]
    found = np.zeros((B, K, nq, -(-S // keys)))
    for b, h, i in np.ndindex(B, K, nq):
        there = at[b, i] >= 0
        if not there.any():
            continue
        scores = scale * q[b, h, i][there] @ k[b, h].T
        scores = np.where(np.arange(S) <= at[b, i][there, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        shares = (weights / weights.sum(1, keepdims=True)).mean(0)
        found[b, h, i] = np.add.reduceat(shares, np.arange(0, S, keys))
    return found


def check(m, R, keys, *, S=500, nq=5, dtype=BF16, **options):
    B, K = 2, 2
    q, k = 2 * draw(0, B, K, nq, m, R, dtype=dtype), draw(1, B, K, S, R, dtype=dtype)
    at = np.random.default_rng(0).integers(-40, S, (B, nq, m))
    at[0, 1], at[1, nq - 1] = -1, S - 1
    found = block_mass(q, jnp.asarray(at), k, scale=0.3, keys=keys, **options)
    expected = truth(q, at, k, scale=0.3, keys=keys)
    np.testing.assert_allclose(found, expected, atol=2e-6, rtol=2e-5)
    assert not np.asarray(found)[0, :, 1].any()


@pytest.mark.parametrize(("m", "R", "keys"), [(8, 32, 128), (32, 16, 64), (128, 64, 32), (1, 16, 128)])
@pytest.mark.matrix
def test_is_a_softmax_by_blocks(m, R, keys):
    check(m, R, keys, interpret=True)


@pytest.mark.parametrize("past", [0, 300])
def test_queries_past_all_keys_see_those_that_there_are(past):
    q, k = draw(0, 1, 1, 9, 8, 16), draw(1, 1, 1, 100, 16)
    at = jnp.full((1, 9, 8), 99)
    found = block_mass(q, at + past + 1, k, scale=0.3, keys=32, interpret=True)
    np.testing.assert_array_equal(found, block_mass(q, at, k, scale=0.3, keys=32, interpret=True))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 64, 128])
@pytest.mark.parametrize(("R", "keys"), [(16, 64), (32, 128), (64, 128), (128, 32)])
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_on_a_gpu(m, R, keys, dtype):
    check(m, R, keys, S=3000, nq=37, dtype=dtype)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": draw(0, 1, 1, 2, 8, 24), "k": draw(0, 1, 1, 9, 24)}, "R=24: must be one of"),
        ({"q": draw(0, 1, 1, 2, 12, 16), "at": jnp.zeros((1, 2, 12), int)}, "m=12 queries of a block"),
        ({"q": draw(0, 1, 1, 2, 256, 16), "at": jnp.zeros((1, 2, 256), int)}, "m=256 queries of a block"),
        ({"at": jnp.zeros((1, 2, 4), int)}, "at has shape"),
        ({"k": draw(0, 1, 2, 9, 16)}, "k has shape"),
        ({"k": draw(0, 1, 1, 9, 16, dtype=jnp.float16)}, "k has dtype float16"),
        ({"keys": 96}, "keys=96: must be one of"),
        ({"scale": -1.0}, "scale=-1.0: must be above 0"),
        ({"k": jax.ShapeDtypeStruct((1, 1, 2**26 + 1, 16), BF16)}, "k has 2147483680 bytes: must be at most"),
        (
            {
                "q": jax.ShapeDtypeStruct((1, 1, 2**15, 8, 16), BF16),
                "at": jax.ShapeDtypeStruct((1, 2**15, 8), jnp.int32),
                "k": jax.ShapeDtypeStruct((1, 1, 2**21 + 1, 16), BF16),
            },
            "the result has 2147614720 bytes",
        ),
    ],
)
def test_refuses(change, message):
    given = {"q": draw(0, 1, 1, 2, 8, 16), "at": jnp.zeros((1, 2, 8), int), "k": draw(0, 1, 1, 9, 16)}
    with pytest.raises(ValueError, match=message):
        block_mass(**{"scale": 1.0} | given | change)
