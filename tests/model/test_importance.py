"""Importance of tokens, compared with brute force."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.ops.importance import received_attention, token_importance


def brute_force(q, k, scale):
    """Compute scores [B, N, T, T] in float64, with -inf for masked keys."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    _, T, N, _ = q.shape
    k = np.repeat(k, N // k.shape[2], axis=2)
    logits = scale * np.einsum("btnh,bsnh->bnts", q, k)
    return np.where(np.tri(T, dtype=bool), logits, -np.inf)


@settings(deadline=None, max_examples=5)
@given(
    T=st.sampled_from([1, 7, 40]),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    block=st.sampled_from([8, 64]),
)
def test_importance_equals_brute_force(T, heads, block):
    rng = np.random.default_rng(T)
    q, k = (jnp.asarray(rng.normal(size=(2, T, n, 16)), jnp.float32) for n in heads)
    logits = brute_force(q, k, 0.25)
    lse = np.logaddexp.reduce(logits, axis=-1)
    weights = np.exp(logits - lse[..., None])
    ours = jnp.asarray(lse, jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(T), (2, T))
    sums = received_attention(q, k, ours, positions, scale=0.25, block=block)
    by_head = weights.reshape(2, heads[1], -1, T, T)
    np.testing.assert_allclose(sums, by_head.sum((2, 3)), rtol=1e-5, atol=1e-6)
    expected = np.log(np.exp(logits).sum((1, 3)))
    np.testing.assert_allclose(token_importance(ours), expected, rtol=1e-5, atol=1e-6)
