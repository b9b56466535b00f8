"""The paper's calibration: prune the sequences of each topic, cluster the vectors of each head (ZDC §5.1)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from convert.calibration.moments import Moments
from zdc_jax.axes import Array
from zdc_jax.errors import CalibrationError
from zdc_jax.model.block import Block
from zdc_jax.model.observe import Seen, observe_layer
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.contract import einsum_f32

ITERATIONS = 10
"""Iterations of Lloyd's algorithm."""
_POINTS_PER_BLOCK = 8192


def kmeans_moments(
    network: Transformer,
    windows: np.ndarray,
    topics: list[str],
    *,
    prune: float,
    clusters: int,
    seed: int,
    fingerprint: str,
) -> Moments:
    """Compute moments of the centroids of q, k and v, weighted by cluster size; the moments of o are exact.

    K-means needs all vectors of a head together. So each layer runs over all windows at once, with the
    residual stream and one layer's q, k and v in memory.

    Args:
      network: unmodified model.
      windows: token windows [W, T].
      topics: topic of each window.
      prune: share of each topic's windows to drop at random.
      clusters: centroids per KV head and kind of vector.
      seed: seed of pruning and of the starting centroids.
      fingerprint: fingerprint of the model, which the moments record.

    Raises:
      CalibrationError: fewer tokens are left than clusters.
    """
    windows = windows[choose_windows(topics, prune, seed)]
    if windows.size < clusters:
        raise CalibrationError(
            f"{clusters=}: exceeds the {windows.size} tokens left after pruning; give more text"
        )
    positions = jnp.arange(windows.shape[1])[None]
    x = jax.lax.map(lambda row: network.embeddings.embed(row[None], positions)[0], jnp.asarray(windows))
    sums: list[dict[str, np.ndarray]] = []
    for index, block in enumerate(network.layers):
        x, vectors, exact = _run_layer(network, block, x)
        key = jax.random.fold_in(jax.random.key(seed), index)
        layer = {name: np.asarray(value, np.float64) for name, value in exact.items()}
        for offset, (name, points) in enumerate(vectors.items()):
            keys = jax.random.split(jax.random.fold_in(key, offset), points.shape[0])
            gram, total = _centroid_moments(keys, points, clusters)
            layer |= {name: np.asarray(gram, np.float64), f"{name}_sum": np.asarray(total, float)}
        sums.append(layer)
    return Moments(
        **{name: np.stack([layer[name] for layer in sums]) for name in sums[0]},
        num_tokens=windows.size,
        context_length=windows.shape[1],
        group_size=network.config.group_size,
        fingerprint=fingerprint,
    )


def choose_windows(topics: list[str], prune: float, seed: int) -> np.ndarray:
    """Return the sorted indices of windows left after pruning; every topic keeps at least one."""
    rng = np.random.default_rng(seed)
    kept: list[int] = []
    for topic in sorted(set(topics)):
        members = np.flatnonzero(np.array(topics) == topic)
        keep = max(1, round(len(members) * (1 - prune)))
        kept.extend(rng.choice(members, keep, replace=False))
    return np.sort(np.array(kept))


@partial(jax.jit, donate_argnums=2)
def _run_layer(
    network: Transformer, block: Block, x: Float[Array, "W T D"]
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """Run a layer; return its output, the vectors of q, k and v [K, P, H], and the exact sums of o."""
    K = network.config.num_kv_heads

    def collect_vectors(seen: Seen) -> dict[str, Array]:
        return {name: _split_by_head(getattr(seen, name), K) for name in "qkvo"}

    def run_window(window: Array) -> tuple[Array, dict[str, Array], Array, Array]:
        out, vectors = observe_layer(block, window[None], collect_vectors)
        o = vectors.pop("o")
        with jax.default_matmul_precision("highest"):
            gram = einsum_f32("KPH,KPI->KHI", o, o)
        return out[0], vectors, gram, o.sum(1, dtype=jnp.float32)

    x, vectors, gram, total = jax.lax.map(run_window, x)
    flat = {name: value.swapaxes(0, 1).reshape(K, -1, value.shape[-1]) for name, value in vectors.items()}
    return x, flat, {"o": gram.sum(0), "o_sum": total.sum(0)}


def _split_by_head(x: Array, num_kv_heads: int) -> Array:
    """Reshape [1, T, N or K, H] to [K, T·G, H]."""
    _, T, _, H = x.shape
    return x.reshape(T, num_kv_heads, -1, H).swapaxes(0, 1).reshape(num_kv_heads, -1, H)


@partial(jax.jit, static_argnames="clusters")
def _centroid_moments(keys: Array, points: Float[Array, "K P H"], clusters: int) -> tuple[Array, Array]:
    def cluster_head(head: tuple[Array, Array]) -> tuple[Array, Array]:
        centroids, sizes = kmeans(head[0], head[1], clusters)
        weighted = centroids * sizes[:, None]
        with jax.default_matmul_precision("highest"):
            return jnp.einsum("MH,MI->HI", weighted, centroids), weighted.sum(0)

    return jax.lax.map(cluster_head, (keys, points))


def kmeans(
    key: Array, points: Float[Array, "P H"], clusters: int
) -> tuple[Float[Array, "M H"], Float[Array, " M"]]:
    """Run Lloyd's algorithm from random points and return centroids, float32, and cluster sizes.

    The centroids are the means of the last assignment, whose sizes are returned. An empty cluster keeps its
    centroid with size 0.
    """
    count, dim = points.shape
    start = jax.random.choice(key, points, (clusters,), replace=False).astype(jnp.float32)
    blocks = -(-count // _POINTS_PER_BLOCK)
    pad = blocks * _POINTS_PER_BLOCK - count
    padded = jnp.pad(points, ((0, pad), (0, 0))).reshape(blocks, _POINTS_PER_BLOCK, dim)
    valid = (jnp.arange(blocks * _POINTS_PER_BLOCK) < count).reshape(blocks, -1)

    def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        centroids = carry[0]
        half_norm = 0.5 * jnp.square(centroids).sum(1)

        def assign(total: tuple[Array, Array], block: tuple[Array, Array]) -> tuple[Any, None]:
            x, mask = block
            score = einsum_f32("PH,MH->PM", x, centroids.astype(x.dtype))
            chosen = jax.nn.one_hot(jnp.argmax(score - half_norm, 1), clusters, dtype=x.dtype)
            chosen *= mask[:, None].astype(x.dtype)
            with jax.default_matmul_precision("highest"):
                sums = einsum_f32("PM,PH->MH", chosen, x)
            return (total[0] + sums, total[1] + chosen.sum(0, dtype=jnp.float32)), None

        empty = (jnp.zeros((clusters, dim), jnp.float32), jnp.zeros(clusters, jnp.float32))
        (sums, sizes), _ = jax.lax.scan(assign, empty, (padded, valid))
        filled = sizes[:, None] > 0
        means = jnp.where(filled, sums / jnp.maximum(sizes, 1)[:, None], centroids)
        return (means, sizes), None

    (centroids, sizes), _ = jax.lax.scan(
        step, (start, jnp.zeros(clusters, jnp.float32)), None, length=ITERATIONS
    )
    return centroids, sizes
