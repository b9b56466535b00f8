"""Attention to listed blocks of keys: random lists and a float64 reference."""

import jax.numpy as jnp
import numpy as np
from brute_force import attend, f64

from kernels_pallas import BlockLists


def lists_of(rng, K, starts, ends, T, S, blocks, share):
    """Return which blocks of keys each block of queries sees [B, K, nq, nk], and the same as lists.

    The choice is random, but includes the blocks of the queries themselves. Lists have room for two entries
    more than the longest, filled with -1.
    """
    (Q, P), B = blocks, len(starts)
    nq, nk = -(-T // Q), -(-S // P)
    listed = np.zeros((B, K, nq, nk), bool)
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for i in range(nq):
            first, last = start + i * Q, min(start + (i + 1) * Q, start + T, end) - 1
            if last < first:
                continue
            listed[b, :, i, : first // P] = rng.random((K, first // P)) < share
            listed[b, :, i, first // P : last // P + 1] = True
    counts = listed.sum(-1)
    found = np.full((B, K, nq, counts.max() + 2), -1)
    for at in np.ndindex(B, K, nq):
        found[at][: counts[at]] = np.flatnonzero(listed[at])
    return listed, BlockLists(jnp.asarray(found, jnp.int32), jnp.asarray(counts, jnp.int32))


def truth(q, k, v, listed, *, scale, starts, lengths, blocks):
    """Return outputs [B, T, N, Z] and log-sum-exp [B, N, T]."""
    (B, T, N, _), (K, S, R), (Q, P) = q.shape, k.shape[1:], blocks
    q, k, v, o, lse = f64(q), f64(k), f64(v), [], []
    for b, n in np.ndindex(B, N):
        t, h = starts[b] + np.arange(T)[:, None], n // (N // K)
        inside = listed[b, h][np.arange(T) // Q][:, np.arange(S) // P]
        visible = inside & (np.arange(S) <= t) & (t < lengths[b])
        head = attend(scale * q[b, :, n, :R] @ k[b, h].T, visible, [(v[b, h], np.ones((T, S)))])
        o.append(head[0])
        lse.append(head[1])
    return np.stack(o).reshape(B, N, T, -1).transpose(0, 2, 1, 3), np.stack(lse).reshape(B, N, T)
