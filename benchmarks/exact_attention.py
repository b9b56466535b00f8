"""Attention of a few queries in float64 on the host, written plainly, to compare timed attention with."""

import numpy as np

from zdc_jax.plan import LayerRanks


def exact_rows(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    positions: np.ndarray,
    *,
    scale: float,
    ranks: LayerRanks,
    near: tuple[int, int],
) -> np.ndarray:
    """o [S, n, H], float64, of queries [S, n, H] at `positions` [S] that share one KV head.

    Args:
      k, v: of all tokens in order, [T, H].
      scale: factor on the scores. ranks: coordinates that far keys count with.
      near: sinks and window, whose keys count with all H; those of a far key beyond its rank count as zero.
    """
    k, v = k.astype(np.float64), v.astype(np.float64)
    (sinks, window), (R, Z) = near, (ranks.qk, ranks.v)
    t, j = positions[:, None], np.arange(len(k))[None]
    is_near = (j < sinks) | (j > t - window)
    o = np.zeros(q.shape)
    for head in range(q.shape[1]):
        rows = q[:, head].astype(np.float64)
        far_scores = rows[:, :R] @ k[:, :R].T
        scores = np.where(is_near, far_scores + rows[:, R:] @ k[:, R:].T, far_scores) * scale
        scores = np.where(j <= t, scores, -np.inf)
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        o[:, head, :Z] = p @ v[:, :Z]
        o[:, head, Z:] = np.where(is_near, p, 0) @ v[:, Z:]
    return o
