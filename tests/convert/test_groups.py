"""Importance of tokens and groups of layers, compared with brute force."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.calibration.groups import layer_groups, layer_importance, repetition_ratios
from zdc_jax.errors import CalibrationError
from zdc_jax.ops.importance import column_sums, token_importance


def brute_force(q, k, scale):
    """Compute scores [B, N, T, T] in float64, with -inf for masked keys."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    _, T, N, _ = q.shape
    k = np.repeat(k, N // k.shape[2], axis=2)
    logits = scale * np.einsum("btnh,bsnh->bnts", q, k)
    return np.where(np.tri(T, dtype=bool), logits, -np.inf)


@settings(deadline=None, max_examples=15)
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
    sums = column_sums(q, k, ours, scale=0.25, block=block)
    np.testing.assert_allclose(sums, weights.sum((1, 2)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        token_importance(ours), np.log(np.exp(logits).sum((1, 3))), rtol=1e-5, atol=1e-6
    )
    visible = np.broadcast_to(np.arange(1, T + 1), (2, T))
    means = np.log(np.exp(logits).sum((1, 3)) / visible)
    np.testing.assert_allclose(token_importance(ours, jnp.asarray(visible)), means, rtol=1e-5, atol=1e-5)


@pytest.mark.matrix
def test_importance_of_every_layer(tiny: TinyModel):
    tokens = tiny.tokens(2, 33)
    found = {
        m: layer_importance(tiny.dense, tokens, m)
        for m in ("denominator", "detrended", "column_sum", "column_mean")
    }
    shape = (tiny.config.num_layers, 2, 33)
    assert all(x.shape == shape and np.all(np.isfinite(x)) for x in found.values())
    # Every query gives each head weight 1 to the keys.
    np.testing.assert_allclose(found["column_sum"].sum(-1), 33 * tiny.config.num_heads, rtol=1e-4)
    np.testing.assert_allclose(found["column_mean"] * (33 - np.arange(33)), found["column_sum"], rtol=1e-5)
    np.testing.assert_allclose(found["detrended"] + np.log(np.arange(1, 34)), found["denominator"], rtol=1e-5)


@given(seed=st.integers(0, 1000), share=st.floats(0.05, 0.5), most=st.booleans())
def test_repetition_ratio_counts_common_tokens(seed, share, most):
    importance = np.random.default_rng(seed).normal(size=(3, 2, 20)).astype(np.float32)
    ratios = repetition_ratios(importance, share=share, most=most)
    count = max(1, round(share * 20))
    sets = [
        [set(np.argsort(row)[-count:] if most else np.argsort(row)[:count]) for row in layer]
        for layer in importance
    ]
    for a in range(3):
        for b in range(3):
            common = [len(x & y) / count for x, y in zip(sets[a], sets[b], strict=True)]
            assert ratios[a, b] == pytest.approx(np.mean(common))


def test_groups_begin_where_the_leader_is_no_longer_repeated():
    ratios = np.array([[1, 0.97, 0.9, 0.9], [0.97, 1, 0.99, 0.9], [0.9, 0.99, 1, 0.96], [0.9, 0.9, 0.96, 1]])
    assert layer_groups(ratios, ratios) == (0, 2)
    assert layer_groups(ratios, np.minimum(ratios, np.eye(4))) == (0, 1, 2, 3)
    assert layer_groups(ratios, ratios, threshold=0.9) == (0,)


@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_arguments_are_named(tiny: TinyModel):
    with pytest.raises(CalibrationError, match="method='lse'"):
        layer_importance(tiny.dense, tiny.tokens(1, 4), "lse")
    for share in (0.0, 0.6, float("nan")):
        with pytest.raises(CalibrationError, match=f"share={share}"):
            repetition_ratios(np.zeros((1, 1, 4)), share=share)
    for threshold in (0.0, 1.1, float("nan")):
        with pytest.raises(CalibrationError, match=f"threshold={threshold}"):
            layer_groups(np.eye(2), np.eye(2), threshold=threshold)
