"""Token classes: attention over contiguous segments compared with float64, and the merge by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import attend, check, f64
from test_prefill import draw

from kernels_pallas import merge_partial
from zdc_jax.methods.token_classes.attention import Segment, segment_attention

RANKS = [(64, 96), (32, 64)]


def classes(T, share, seed):
    """Return the positions of important and other tokens in each of two rows."""
    rng = np.random.default_rng(seed)
    count = int(share * T)
    rows = [rng.permutation(T) for _ in range(2)]
    return [np.stack([np.sort(row[cut]) for row in rows]) for cut in (slice(count), slice(count, None))]


ALL = {"sinks": 0, "window": 0}


def test_merge_is_one_softmax():
    # One part, or both, may see nothing.
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(6, 40)), rng.normal(size=(40, 8))
    visible = rng.random((6, 40)) < 0.3
    visible[0], visible[1, :20], visible[2, 20:] = False, False, False
    whole = attend(scores, visible, [(values, 1.0)])
    cut = [attend(scores[:, s], visible[:, s], [(values[s], 1.0)]) for s in (slice(20), slice(20, 40))]
    parts = [(jnp.asarray(o)[None, :, None], jnp.asarray(lse)[None, None]) for o, lse in cut]
    o, lse = merge_partial(parts)
    np.testing.assert_allclose(o[0, :, 0], whole[0], atol=1e-6)
    np.testing.assert_allclose(lse[0, 0], whole[1], atol=1e-6)


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("near", [ALL, {"sinks": 4, "window": 64}])
@pytest.mark.parametrize("queries", ["first class", "second class", "class order", "one"])
@pytest.mark.matrix
def test_classes(share, near, queries):
    # Both classes have empty slots, and decoding fills some slots out of order.
    T, N, K, H, rng = 400, 4, 2, 64, np.random.default_rng(1)
    held = classes(T, share, 0)
    for p in held:
        p[:, -60:-20] = rng.permuted(p[:, -60:-20], axis=1)
        p[rng.random(p.shape) < 0.05] = -1
    segments = [
        Segment(draw(3 * i, 2, K, p.shape[1], R), draw(3 * i + 1, 2, K, p.shape[1], Z), jnp.asarray(p))
        for i, (p, (R, Z)) in enumerate(zip(held, RANKS, strict=True))
    ]
    both = classes(T, share, 0)
    t = {
        "first class": both[0],
        "second class": both[1],
        "class order": np.concatenate(both, 1),
        "one": np.array([[T - 7], [150]]),
    }[queries]
    q = draw(9, 2, t.shape[1], N, H)

    def f(q, t, segments):
        return segment_attention(q, t, segments, scale=H**-0.5, **near)

    o, lse = jax.jit(f)(q, jnp.asarray(t), segments)
    rows = [[one_head(q[b, :, n], t[b], segments, b, n // 2, **near) for n in range(N)] for b in range(2)]
    truth, truth_lse = (np.stack([np.stack([head[i] for head in heads]) for heads in rows]) for i in range(2))
    check(o, lse, truth.transpose(0, 2, 1, 3), truth_lse, jnp.bfloat16)


def one_head(q, t, segments, b, kv, sinks=0, window=0):
    """Compute float64 attention of one head over all slots of all segments."""
    wide = max(s.v.shape[-1] for s in segments)
    scores = [f64(q)[:, : s.k.shape[-1]] @ f64(s.k[b, kv]).T for s in segments]
    values = [np.pad(f64(s.v[b, kv]), ((0, 0), (0, wide - s.v.shape[-1]))) for s in segments]
    j, t = np.concatenate([np.asarray(s.positions[b]) for s in segments]), t[:, None]
    visible = (j >= sinks) & (j <= t - window)
    return attend(q.shape[-1] ** -0.5 * np.concatenate(scores, 1), visible, [(np.concatenate(values), 1.0)])
