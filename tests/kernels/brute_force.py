"""Float64 reference for the attention kernels: one row and head at a time, from the definitions."""

import jax.numpy as jnp
import numpy as np

LOST = {jnp.bfloat16: 6e-3, jnp.float16: 9e-4}
"""Largest rounding error of weights and results in each dtype, relative to the norm of one head's results."""


def f64(x):
    return np.asarray(x).astype(np.float32).astype(np.float64)


def attend(scores, visible, values):
    """Return one head's output and natural log-sum-exp of scores [T, S].

    Rows that see nothing give 0 and -inf.
    """
    scores = np.where(visible, scores, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        highest = np.where(visible.any(1), scores.max(1, initial=-1e300), 0)[:, None]
        weights = np.where(visible, np.exp(scores - highest), 0)
        total = weights.sum(1, keepdims=True)
        o = [np.where(total > 0, (weights * mask) @ v / total, 0) for v, mask in values]
        return np.concatenate(o, 1), np.where(total > 0, np.log(total) + highest, -np.inf)[:, 0]


def prefill(q, k, v, *, scale, starts, lengths, sinks=0, window=0, tail=None, keys="all"):
    """Return outputs [B, T, N, ·] and log-sum-exp [B, N, T].

    Keys without width are visible only if they are near.

    tail: k, v [B, K, positions, ·] with row = position, or None.
    """
    q, k, v = f64(q), f64(k), f64(v)
    (B, T, N, _), (K, S, R) = q.shape, k.shape[1:]
    o, lse = [], []
    for b in range(B):
        t = starts[b] + np.arange(T)[:, None]
        j = np.arange(S)[None]
        near = (j < sinks) | (j > t - window)
        visible = (j <= t) & (t < lengths[b])
        if R == 0:
            visible = visible & near
        if keys == "far":
            visible = visible & ~near
        for n in range(N):
            h = n // (N // K)
            scores = q[b, :, n, :R] @ k[b, h].T
            values = [(v[b, h], np.ones_like(near))]
            if tail is not None:
                k_tail, v_tail = f64(tail[0])[b, h, :S], f64(tail[1])[b, h, :S]
                scores = scores + np.where(near, q[b, :, n, R:] @ k_tail.T, 0)
                values.append((v_tail, near))
            head, head_lse = attend(scores * scale, visible, values)
            o.append(head)
            lse.append(head_lse)
    return np.stack(o).reshape(B, N, T, -1).transpose(0, 2, 1, 3), np.stack(lse).reshape(B, N, T)


def prefill_near_and_far(q, far, near, *, scale, starts, lengths, sinks, window, gains=None):
    """Return what `prefill` does for far keys and near keys from arrays of their own, row = position.

    far, near: k, v [B, K, positions, ·].
    gains: what scaled scores gain in each block of 64 positions, [B, T, N, blocks].
    """
    (B, T, N, _), (K, S, _) = q.shape, far[0].shape[1:]
    o, lse, q = [], [], f64(q)
    for b in range(B):
        t, j = starts[b] + np.arange(T)[:, None], np.arange(S)[None]
        is_near = (j < sinks) | (j > t - window)
        seen = (j <= t) & (t < lengths[b])
        for n in range(N):
            k, v = (
                np.concatenate([f64(x)[b, n // (N // K)] for x in pair])
                for pair in zip(far, near, strict=True)
            )
            scores = q[b, :, n] @ k.T * scale
            if gains is not None:
                scores = scores + np.tile(np.repeat(f64(gains)[b, :, n], 64, axis=1)[:, :S], 2)
            visible = np.concatenate([seen & ~is_near, seen & is_near], 1)
            head, head_lse = attend(scores, visible, [(v, np.ones_like(visible))])
            o.append(head)
            lse.append(head_lse)
    return np.stack(o).reshape(B, N, T, -1).transpose(0, 2, 1, 3), np.stack(lse).reshape(B, N, T)


def decode(q, k, v, lengths, *, scale, sinks=0, window=0, ring=None):
    """Return outputs [B, N, ·] and log-sum-exp [B, N].

    ring: slot p mod window holds position p, and sinks follow.
    """
    tail = None
    if ring is not None:
        j = np.arange(k.shape[2])

        def rows(length):
            return np.where(j < sinks, window + j, j % window)

        tail = [np.stack([f64(x)[b][:, rows(n)] for b, n in enumerate(lengths)]) for x in ring]
    o, lse = prefill(
        np.asarray(q)[:, None],
        k,
        v,
        scale=scale,
        starts=np.asarray(lengths) - 1,
        lengths=lengths,
        sinks=sinks,
        window=window,
        tail=tail,
    )
    return o[:, 0], lse[..., 0]


def check(o, lse, truth, truth_lse, dtype):
    """Assert that outputs [B, N, ·] or [B, T, N, ·] and log-sum-exp are exact.

    Each head of each row is checked by itself; log-sum-exp must have float32 precision.
    """
    o, tokens = f64(o), tuple(range(1, np.ndim(truth) - 2))
    error, size = (np.sqrt((x**2).sum((*tokens, -1))) for x in (o - truth, truth))
    assert (error <= LOST[dtype] * size).all(), (error / np.maximum(size, 1e-30)).max()
    seen = np.isfinite(truth_lse)
    assert np.array_equal(np.isfinite(np.asarray(lse)), seen)
    np.testing.assert_allclose(np.asarray(lse)[seen], truth_lse[seen], atol=2e-5)
    assert not o[~(np.moveaxis(seen, 1, 2) if tokens else seen)].any()
