"""Float64 reference for caches that evict: one sequence, token by token, from the definitions.

It keeps the attention of all queries and derives scores from it on demand.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cache, as plans and their settings define them."""

    block: int
    kept: int
    sinks: int
    window: int
    R: int
    Z: int


def attend(q, k, v, scale: float, sizes: Sizes, score, prompt: int = 0):
    """Compute the attention of q [T, N, H] to k and v [T, K, H].

    score: a scoring function of this file.
    prompt: number of first tokens that see all others before them.

    Returns o [T, N, H] and the positions that the far slots of each KV head hold at the end, ascending.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (T, N, _), K = q.shape, k.shape[1]
    weights, o = np.zeros((N, T, T)), np.zeros_like(q)
    far = [[] for _ in range(K)]
    for t in range(T):
        begins = t // sizes.block * sizes.block - sizes.window
        for n in range(N):
            head, logits = n // (N // K), np.full(T, -np.inf)
            near = [j for j in range(t + 1) if j < sizes.sinks or j >= begins or t < prompt]
            for j in near:
                logits[j] = scale * (q[t, n] @ k[j, head])
            for j in far[head]:
                assert j not in near
                logits[j] = scale * (q[t, n, : sizes.R] @ k[j, head, : sizes.R])
            weights[n, t] = np.exp(logits - logits.max())
            weights[n, t] /= weights[n, t].sum()
            o[t, n] = weights[n, t, near] @ v[near, head]
            o[t, n, : sizes.Z] += weights[n, t, far[head]] @ v[far[head], head, : sizes.Z]
        length = t + 1
        if length == prompt or (length > prompt and length % sizes.block == 0):
            out = length // sizes.block * sizes.block - sizes.window
            before = out - sizes.block if length > prompt else sizes.sinks
            leaving = range(max(before, sizes.sinks), max(out, sizes.sinks))
            for head, held in enumerate(far):
                candidates = [*held, *leaving]
                found = score(weights[:, :length, :length].reshape(K, N // K, length, length), k, candidates)
                best = sorted(zip(found[head], candidates, strict=True))[-sizes.kept :]
                far[head] = sorted(j for _, j in best)
    return o, far


def h2o(weights, k, candidates):
    """Return scores [K, candidates] of weights [K, G, t, j]: summed over queries, averaged over groups."""
    return weights.sum(2).mean(1)[:, candidates]


def h2o_mean(weights, k, candidates):
    length = weights.shape[2]
    return h2o(weights, k, candidates) / [length - j for j in candidates]


def snapkv(weights, k, candidates, observed=5, pool=3, combine=max):
    last = weights[:, :, -observed:].mean((1, 2))[:, candidates]
    reach, count = pool // 2, len(candidates)
    return [[combine(head[max(0, i - reach) : i + reach + 1]) for i in range(count)] for head in last]


def snapkv_average(weights, k, candidates):
    return snapkv(weights, k, candidates, observed=8, pool=5, combine=lambda x: sum(x) / 5)


def tova(weights, k, candidates):
    shared = weights[:, :, -1].mean((0, 1))[candidates]
    return [shared] * len(weights)


def knorm(weights, k, candidates):
    return [-np.linalg.norm(k[candidates, head], axis=-1) for head in range(k.shape[1])]
