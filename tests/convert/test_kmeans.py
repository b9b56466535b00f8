"""K-means: exact on separated clusters, conserving sums, and converging to the exact moments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.calibrate import collect_moments
from convert.kmeans import kmeans, kmeans_moments, pruned
from zdc_jax.errors import CalibrationError


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_sizes_and_sums_are_conserved(seed):
    points = np.random.default_rng(seed).normal(size=(200, 8)).astype(np.float32)
    centroids, sizes = kmeans(jax.random.key(seed), jnp.asarray(points), 16)
    assert sizes.sum() == 200
    np.testing.assert_allclose(centroids.T @ sizes, points.sum(0), atol=1e-3)


def test_more_clusters_than_groups_find_every_group():
    centres = 100 * np.eye(4, dtype=np.float32)
    points = np.repeat(centres, [5, 10, 15, 20], axis=0)
    centroids, sizes = kmeans(jax.random.key(0), jnp.asarray(points), 32)
    gram = np.einsum("MH,MI,M->HI", centroids, centroids, sizes)
    np.testing.assert_allclose(gram, points.T @ points, rtol=1e-5)


def test_iterations_never_raise_the_cost():
    points = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)

    def cost(iterations):
        centroids, _ = kmeans(jax.random.key(1), jnp.asarray(points), 12, iterations)
        return np.square(points[:, None] - np.asarray(centroids)).sum(-1).min(1).sum()

    costs = [cost(n) for n in (1, 2, 5, 20)]
    assert costs == sorted(costs, reverse=True)


def test_pruning_keeps_a_share_of_every_topic():
    topics = ["a"] * 10 + ["b"] * 4 + ["c"]
    kept = [topics[i] for i in pruned(topics, 0.5, seed=0)]
    assert {t: kept.count(t) for t in "abc"} == {"a": 5, "b": 2, "c": 1}
    assert (pruned(topics, 0.5, seed=0) == pruned(topics, 0.5, seed=0)).all()


def test_centroids_converge_to_the_exact_moments(tiny: TinyModel):
    tokens = tiny.tokens(4, 32)
    exact = collect_moments(tiny.dense, tokens, fingerprint="x")

    def error(clusters):
        options = {"prune": 0.0, "clusters": clusters, "seed": 0, "fingerprint": "x"}
        moments = kmeans_moments(tiny.dense, tokens, ["a"] * 4, **options)
        np.testing.assert_allclose(moments.o, exact.o, atol=2e-5 * np.abs(exact.o).max())
        np.testing.assert_allclose(moments.k_sum, exact.k_sum, atol=1e-4 * np.abs(exact.k_sum).max())
        return [np.linalg.norm(getattr(moments, n) - getattr(exact, n)) for n in "qkv"]

    few, more, all_keys = error(4), error(48), error(128)
    assert all(a > b for a, b in zip(few, more, strict=True))
    assert all_keys[1] < 0.2 * few[1]


def test_too_few_tokens_are_refused(tiny_llama: TinyModel):
    with pytest.raises(CalibrationError, match="clusters=100 exceeds the 32 tokens"):
        kmeans_moments(
            tiny_llama.dense,
            tiny_llama.tokens(2, 32),
            ["a", "a"],
            prune=0.5,
            clusters=100,
            seed=0,
            fingerprint="x",
        )
