"""K-means: exact on separated clusters, with sums conserved, and converging to the exact moments."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.calibration import kmeans as module
from convert.calibration.calibrate import collect_moments
from convert.calibration.kmeans import choose_windows, kmeans, kmeans_moments
from zdc_jax.errors import CalibrationError

clustered = jax.jit(kmeans, static_argnums=2)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def gram(centroids, sizes) -> np.ndarray:
    return np.einsum("MH,MI,M->HI", centroids, centroids, sizes)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), spread=st.sampled_from([0.0, 1e-3, 1.0, 100.0]))
@pytest.mark.full
def test_sizes_and_sums_are_conserved(seed, spread):
    # With equal points, spare clusters stay empty.
    points = spread * normal(200, 8, seed=seed) + 1
    centroids, sizes = clustered(jax.random.key(seed), jnp.asarray(points), 16)
    assert sizes.sum() == 200
    np.testing.assert_allclose(centroids.T @ sizes, points.sum(0), rtol=1e-4, atol=1e-3 * (1 + spread))


@pytest.mark.parametrize("block", [8192, 7])
@pytest.mark.matrix
def test_separated_clusters_are_found(monkeypatch, block):
    # The four groups are far apart, and each has one start. The size of blocks does not matter.
    monkeypatch.setattr(module, "_POINTS_PER_BLOCK", block)
    counts = np.array([5, 10, 15, 20])
    groups = [100 * np.eye(4, dtype=np.float32)[i] + normal(n, 4, seed=i) for i, n in enumerate(counts)]
    points = np.concatenate(groups)
    starts = [0, 5, 15, 30]
    monkeypatch.setattr(jax.random, "choice", lambda key, points, *_, **__: points[np.array(starts)])
    centroids, sizes = kmeans(jax.random.key(0), jnp.asarray(points), 4)
    np.testing.assert_array_equal(sizes, counts)
    np.testing.assert_allclose(centroids, [group.mean(0) for group in groups], rtol=1e-5, atol=1e-5)


def test_more_clusters_than_groups_find_every_group():
    points = np.repeat(100 * np.eye(4, dtype=np.float32), [5, 10, 15, 20], axis=0)
    moments = gram(*clustered(jax.random.key(0), jnp.asarray(points), 32))
    np.testing.assert_allclose(moments, points.T @ points, rtol=1e-5)


def test_a_cluster_for_every_point_is_exact():
    points = normal(40, 8)
    centroids, sizes = clustered(jax.random.key(0), jnp.asarray(points), 40)
    np.testing.assert_array_equal(sizes, 1)
    exact = points.T @ points
    np.testing.assert_allclose(gram(centroids, sizes), exact, atol=1e-5 * np.abs(exact).max())


def test_iterations_never_raise_the_cost(monkeypatch):
    points = normal(300, 4)

    def cost(iterations):
        monkeypatch.setattr(module, "ITERATIONS", iterations)
        centroids, _ = kmeans(jax.random.key(1), jnp.asarray(points), 12)
        return np.square(points[:, None] - np.asarray(centroids)).sum(-1).min(1).sum()

    costs = [cost(n) for n in (1, 2, 5, 20)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    prune=st.floats(0, 0.99),
    seed=st.integers(0, 99),
)
def test_pruning_keeps_a_share_of_every_topic(sizes, prune, seed):
    topics = np.random.default_rng(seed).permutation(np.repeat([f"t{i}" for i in range(len(sizes))], sizes))
    kept = choose_windows(list(topics), prune, seed)
    assert (np.diff(kept) > 0).all()
    for i, size in enumerate(sizes):
        count = np.sum(topics[kept] == f"t{i}")
        assert count >= 1
        assert abs(count - size * (1 - prune)) <= 0.5 or count == 1
    np.testing.assert_array_equal(kept, choose_windows(list(topics), prune, seed))


def test_pruning_depends_on_the_seed():
    draws = {tuple(choose_windows(["a"] * 20, 0.5, seed)) for seed in range(5)}
    assert len(draws) == 5


@pytest.mark.full
def test_centroids_converge_to_the_exact_moments(tiny: TinyModel):
    tokens = tiny.tokens(4, 32)
    exact = collect_moments(tiny.dense, tokens, fingerprint="x")
    options = {"prune": 0.0, "seed": 0, "fingerprint": "x"}

    def errors(clusters):
        moments = kmeans_moments(tiny.dense, tokens, ["a"] * 4, clusters=clusters, **options)
        assert (moments.num_tokens, moments.group_size) == (128, tiny.config.group_size)
        # o is not clustered, and centroids preserve every sum.
        for name in ("o", "o_sum", "q_sum", "k_sum", "v_sum"):
            ours, theirs = getattr(moments, name), getattr(exact, name)
            np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())

        def relative(a, b):
            return np.linalg.norm(a - b) / np.linalg.norm(b)

        return np.array([relative(getattr(moments, n), getattr(exact, n)) for n in "qkv"])

    few, more, every_token = errors(8), errors(64), errors(128)
    assert (few > more).all()
    assert (more > every_token).all()
    assert every_token[1:].max() < 1e-5  # Keys and values have one centroid each; queries share theirs.


@pytest.mark.full
def test_pruned_windows_are_left_out(tiny_llama: TinyModel):
    tokens, topics = tiny_llama.tokens(4, 16), ["a", "b", "a", "b"]
    kept = choose_windows(topics, 0.5, 3)
    cluster = partial(kmeans_moments, clusters=32, seed=3, fingerprint="x")
    half = cluster(tiny_llama.dense, tokens, topics, prune=0.5)
    exact = collect_moments(tiny_llama.dense, tokens[kept], fingerprint="x")
    assert half.num_tokens == exact.num_tokens == 32
    np.testing.assert_allclose(half.o, exact.o, atol=1e-4 * np.abs(exact.o).max())
    np.testing.assert_allclose(half.k, exact.k, atol=1e-4 * np.abs(exact.k).max())


def test_too_few_tokens_are_refused(tiny_llama: TinyModel):
    tokens = tiny_llama.tokens(2, 32)
    with pytest.raises(CalibrationError, match="clusters=100: exceeds the 32 tokens"):
        kmeans_moments(tiny_llama.dense, tokens, ["a", "a"], prune=0.5, clusters=100, seed=0, fingerprint="x")
