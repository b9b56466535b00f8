"""Token classes: attention over contiguous segments against float64, and the merge on its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import attend, f64
from test_prefill import check, draw, lower, shape

from kernels_pallas import Segment, merge_partial, segment_attention

RANKS = [(64, 96), (32, 64)]


def classes(T, share, seed):
    """Positions of important and other tokens of each of two rows."""
    rng = np.random.default_rng(seed)
    count = int(share * T)
    rows = [rng.permutation(T) for _ in range(2)]
    return [np.stack([np.sort(row[cut]) for row in rows]) for cut in (slice(count), slice(count, None))]


def test_lowers():
    integers = lambda n: shape(2, n, dtype=jnp.int32)
    sizes = zip((90, 700), RANKS, strict=True)
    segments = [Segment(shape(2, 2, n, R), shape(2, 2, n, Z), integers(n)) for n, (R, Z) in sizes]
    f = lambda q, t, segments: segment_attention(q, t, segments, scale=1.0)
    o, lse = lower(f, shape(2, 90, 4, 64), integers(90), segments).out_info
    assert (o.shape, lse.shape) == ((2, 90, 4, 96), (2, 4, 90))


@pytest.mark.parametrize(("positions", "message"), [((2, 91), "B, T"), ((3, 90), "B, T")])
def test_refuses_positions_of_another_shape(positions, message):
    segment = Segment(shape(2, 2, 40, 32), shape(2, 2, 40, 64), shape(2, 40, dtype=jnp.int32))
    f = lambda q, t, s: segment_attention(q, t, [s], scale=1.0)
    with pytest.raises(ValueError, match=message):
        lower(f, shape(2, 90, 4, 32), shape(*positions, dtype=jnp.int32), segment)


def test_merge_is_one_softmax():
    """Also where one part, or both, saw nothing."""
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


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("query_class", [0, 1])
def test_classes(share, query_class):
    T, N, K, H = 1500, 4, 2, 64
    positions = classes(T, share, 0)
    q, k, v = draw(0, 2, T, N, H), draw(1, 2, K, T, H), draw(2, 2, K, T, 96)
    take = lambda x, where, axis: jnp.stack([jnp.take(x[b], where[b], axis=axis) for b in range(2)])
    segments = [
        Segment(take(k, p, 1)[..., :R], take(v, p, 1)[..., :Z], jnp.asarray(p, jnp.int32))
        for p, (R, Z) in zip(positions, RANKS, strict=True)
    ]
    t = positions[query_class]
    own = take(q, t, 0)
    f = lambda q, t, segments: segment_attention(q, t, segments, scale=H**-0.5)
    o, lse = jax.jit(f)(own, jnp.asarray(t, jnp.int32), segments)
    truth, truth_lse = [], []
    for b in range(2):
        rank_of = np.empty(T, int)
        for index, p in enumerate(positions):
            rank_of[p[b]] = index
        for n in range(N):
            keys, values = f64(k[b, n // 2]), f64(v[b, n // 2])
            scores, parts = 0, []
            for index, (R, Z) in enumerate(RANKS):
                mask = rank_of == index
                scores = scores + (f64(own[b, :, n, :R]) @ keys[:, :R].T) * mask
                parts.append((np.where(np.arange(96) < Z, values, 0), mask))
            out, row_lse = attend(scores * H**-0.5, np.arange(T) <= t[b][:, None], parts)
            truth.append(out[:, :96] + out[:, 96:])
            truth_lse.append(row_lse)
    truth = np.stack(truth).reshape(2, N, len(t[0]), 96).transpose(0, 2, 1, 3)
    check(o, lse, truth, np.stack(truth_lse).reshape(2, N, -1), jnp.bfloat16)
