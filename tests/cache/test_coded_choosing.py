"""Quantized tokens chosen by an index, compared with loops in float64."""

from functools import cache, partial
from math import sqrt

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from zdc_jax.cache.codes.gaussian import Gaussian, gaussian_levels
from zdc_jax.cache.specs.coded_choosing import CodedChoosing
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.errors import PlanError
from zdc_jax.ops.new_keys import NewKeys

B, K, G, H, S = 2, 2, 2, 32, 44
CODES = {"index_code": Gaussian(4), "key_code": Gaussian(3), "value_code": Gaussian(2)}
SHAPE = {"num_kv_heads": K, "head_dim": H, "dtype": "float32", "R": 24, "Z": 16, "sinks": 2, "window": 7}
SINGLE = CodedChoosing(**SHAPE, **CODES, index=8, read=12)
SPECS = {"tokens": SINGLE, "pages": CodedChoosing(**SHAPE, **CODES, index=8, read=12, page=4)}
CALL = Call(0.3)


@cache
def tokens(seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return q [B, S, K G, H], k and v [B, S, K, H]; heads of a group have different magnitudes."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(B, S, K * G, H)) * rng.uniform(0.5, 3, (K * G, 1))
    k = rng.normal(size=(B, S, K, H)) + rng.normal(size=(K, H))
    return tuple(x.astype(np.float32) for x in (q, k, rng.normal(size=(B, S, K, H))))


@partial(jax.jit, static_argnames="spec")
def attend(spec: CodedChoosing, state, q, k, v, positions, end, aux):
    return spec.attend(state, q, NewTokens(NewKeys(k), v, positions, end), aux, CALL)


def run(spec: CodedChoosing, q, k, v, pieces, handed_on=None):
    """Run chunks of tokens and return results [B, S, N, H], what each layer handed on, and the last state."""
    state, found, aux, start = spec.create(B, S), [], [], 0
    for number, count in enumerate(pieces):
        piece = slice(start, start + count)
        positions = jnp.broadcast_to(jnp.arange(start, start + count), (B, count))
        taken = None if handed_on is None else handed_on[number]
        x = (jnp.asarray(each[:, piece]) for each in (q, k, v))
        done = attend(spec, state, *x, positions, jnp.full(B, start + count), taken)
        state, start = done.state, start + count
        found.append(np.asarray(done.o))
        aux.append(done.aux)
    return np.concatenate(found, 1), aux, state


def coded(x: np.ndarray, bits: int) -> np.ndarray:
    """Quantize a vector to the nearest levels times its root mean square in 16 bits."""
    size = sqrt(sum(value * value for value in x) / len(x))
    levels = gaussian_levels(bits)
    nearest = [levels[np.argmin(np.abs(levels - value / size))] for value in x]
    return np.array(nearest) * float(ml_dtypes.bfloat16(size))


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def chosen_by_loops(spec: CodedChoosing, q: np.ndarray, index: np.ndarray, t: int) -> list[int]:
    """Return the far tokens that query heads q [G, H] at position t read; index [S, index] is dequantized."""
    far = range(spec.sinks, t - spec.window + 1)
    pages = sorted({j // spec.page for j in far})
    if not pages:
        return []
    members = [range(p * spec.page, min(S, (p + 1) * spec.page)) for p in pages]
    sums = [
        [sum(np.exp(CALL.scale * head[: spec.index] @ index[j]) for j in page) for page in members]
        for head in q
    ]
    shared = sum(np.array(row) / sum(row) for row in sums)
    best = sorted(range(len(pages)), key=lambda i: (-shared[i], i))[: spec.read // spec.page]
    return [j for i in best for j in far if j // spec.page == pages[i]]


@cache
def by_loops(spec: CodedChoosing) -> np.ndarray:
    """Compute results [B, S, N, H] of `tokens()`."""
    q, k, v = (x.astype(np.float64) for x in tokens())
    o = np.zeros((B, S, K * G, H))
    for b, head in np.ndindex(B, K):
        index = np.array([coded(x[:8], 4) for x in k[b, :, head]])
        keys = np.array([np.r_[i, coded(x[8:24], 3)] for i, x in zip(index, k[b, :, head], strict=True)])
        values = np.array([coded(x[:16], 2) for x in v[b, :, head]])
        for t in range(S):
            group = range(head * G, (head + 1) * G)
            far = chosen_by_loops(spec, q[b, t, group], index, t)
            near = [j for j in range(t + 1) if j < spec.sinks or j > t - spec.window]
            for n in group:
                scores = [q[b, t, n] @ k[b, j, head] for j in near]
                scores += [q[b, t, n, : spec.R] @ keys[j] for j in far]
                weights = softmax(CALL.scale * np.array(scores))
                o[b, t, n] = weights[: len(near)] @ v[b, near, head]
                o[b, t, n, : spec.Z] += weights[len(near) :] @ values[far].reshape(len(far), spec.Z)
    return o


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("pieces", [[S], [20, *[1] * 24]], ids=["whole", "decoded"])
@pytest.mark.full
def test_queries_read_what_loops_choose(spec, pieces):
    expected = by_loops(spec)
    found, aux, _ = run(spec, *tokens(), pieces)
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())
    assert aux == [None] * len(pieces)


@pytest.mark.parametrize("pieces", [[S], [20, *[1] * 24]], ids=["whole", "decoded"])
@pytest.mark.full
def test_a_layer_that_follows_reads_what_the_leader_chose(pieces):
    # A follower with the same keys gives the leader's results, though it has no index.
    leader = CodedChoosing(**SHAPE, **CODES, index=8, read=12, leads=True)
    same = CODES | {"key_code": Gaussian(8), "index_code": Gaussian(8), "value_code": Gaussian(8)}
    alone, _, _ = run(CodedChoosing(**SHAPE, **same, index=8, read=12), *tokens(), pieces)
    _, handed_on, _ = run(leader, *tokens(), pieces)
    found, passed, _ = run(CodedChoosing(**SHAPE, **same, index=0, read=12), *tokens(), pieces, handed_on)
    # Eight bits choose nearly the same tokens as four, and answer nearly like unquantized coordinates.
    close = np.isclose(found, alone, atol=0.05 * np.abs(alone).max()).all((2, 3))
    assert close.mean() > 0.9
    for given, on in zip(handed_on, passed, strict=True):
        np.testing.assert_array_equal(given, on)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.full
def test_decoding_reads_the_planes_of_chosen_tokens_alone(spec):
    # Keys and values of other tokens may be anything, and they do not count as bytes read.
    q, k, v = tokens()
    expected, _, _ = run(spec, q, k, v, [20, 23, 1])
    _, _, state = run(spec, q[:, :-1], k[:, :-1], v[:, :-1], [20, 23])
    t = S - 1
    pages = spec.chosen(state.far, jnp.asarray(q)[:, -1:, :, : spec.R], jnp.full((B, 1), t), CALL)
    read = np.asarray(pages)[:, 0, :, :, None] * spec.page + np.arange(spec.page)
    unread = np.ones(jax.tree.leaves(state.far.v)[0].shape[:3], bool)
    np.put_along_axis(unread, read.reshape(B, K, -1), False, axis=2)

    def spoil(x):
        return jnp.where(unread[..., None], jnp.asarray(255, x.dtype), x)

    far = state.far._replace(k=jax.tree.map(spoil, state.far.k), v=jax.tree.map(spoil, state.far.v))
    last = (jnp.asarray(x[:, -1:]) for x in (q, k, v))
    spoiled = type(state)(state.near, far)
    done = attend(spec, spoiled, *last, jnp.full((B, 1), t), jnp.full(B, S), None)
    np.testing.assert_allclose(done.o[:, 0], expected[:, -1], atol=1e-6)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_bytes_are_those_of_the_planes(spec):
    scales, ring = 2, spec.near.bytes(40)
    index, key, value = 8 * 4 // 8 + scales, 16 * 3 // 8 + scales, 16 * 2 // 8 + scales
    # The store has room for a multiple of 128 tokens.
    assert spec.bytes(40) == ring + 128 * K * (index + key + value)
    assert spec.bytes_read(40) == ring + 40 * K * index + 12 * K * (key + value)
    assert spec.bytes_read(5) == spec.near.bytes(5) + 5 * K * (index + key + value)


def test_zeros_outliers_and_what_is_no_number():
    code = Gaussian(4)
    x = np.zeros((4, 1, 16), np.float32)
    x[1, 0, 3] = 1e30
    x[2, 0] = 1e-30
    x[3, 0, 5] = np.nan
    back = np.asarray(code.decode(code.encode(jnp.asarray(x)), 16))
    np.testing.assert_array_equal(back[0], 0)
    # One coordinate among sixteen is 4 times the root mean square; the highest level is 2.73 times as large.
    np.testing.assert_allclose(back[1, 0, 3], 1e30 * gaussian_levels(4)[-1] / 4, rtol=1e-2)
    np.testing.assert_allclose(back[2], 1e-30, rtol=0.15)
    assert np.isnan(back[3]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": 24}, "index=24 must be from 0 to 23"),
        ({"page": 12}, "page=12 must be 1, or at most 7 tokens"),
        ({"page": 5}, "read=12 must be a positive multiple of page=5"),
        ({"index": 4}, "rank 4 must be a multiple of 8"),
        ({"Z": 12}, "rank 12 must be a multiple of 8"),
    ],
)
def test_impossible_stores_are_refused(change, message):
    with pytest.raises(PlanError, match=message):
        CodedChoosing(**SHAPE | CODES | {"index": 8, "read": 12} | change)
