"""Caches that choose tokens, compared with loops in float64."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA

from zdc_jax import methods
from zdc_jax.cache.specs.choosing import Choosing, LeadingScores, PageBounds
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.specs.spec import Attended, Call, LayerCacheSpec, NewTokens
from zdc_jax.errors import PlanError
from zdc_jax.ops import xla
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.plan import CompressionPlan

B, K, G, H, S = 2, 2, 2, 8, 44
SHAPE = {"num_kv_heads": K, "head_dim": H, "dtype": "float32", "R": 6, "Z": 5, "sinks": 2, "window": 7}
QUEST = PageBounds(**SHAPE, read=12, page=4)
LOKI = LeadingScores(**SHAPE, read=12, index=3)
SPECS = {"quest": QUEST, "loki": LOKI}
CALL = Call(0.7)


def tokens(seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return q [B, S, K G, H], k and v [B, S, K, H]; heads of a group have different magnitudes."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(B, S, K * G, H)) * rng.uniform(0.5, 3, (K * G, 1))
    k = rng.normal(size=(B, S, K, H)) + rng.normal(size=(K, H))
    return tuple(x.astype(np.float32) for x in (q, k, rng.normal(size=(B, S, K, H))))


@partial(jax.jit, static_argnames="spec")
def attend(spec: Choosing, state, q, k, v, positions, end):
    return spec.attend(state, q, NewTokens(NewKeys(k), v, positions, end), None, CALL)


def run(spec: Choosing, q, k, v, pieces):
    """Run chunks of tokens and return results [B, S, N, H] and the last state."""
    state, found, start = spec.create(B, S), [], 0
    for count in pieces:
        piece = slice(start, start + count)
        positions = jnp.broadcast_to(jnp.arange(start, start + count), (B, count))
        end = jnp.full(B, start + count)
        done = attend(spec, state, *(jnp.asarray(x[:, piece]) for x in (q, k, v)), positions, end)
        state, start = done.state, start + count
        found.append(np.asarray(done.o))
    return np.concatenate(found, 1), state


def whole(spec: LayerCacheSpec, q, k, v) -> Attended:
    """Attend to whole sequences, with a new compilation at each call."""
    positions = jnp.broadcast_to(jnp.arange(S), (B, S))
    end = jnp.full(len(positions), positions.shape[1])
    compiled = jax.jit(
        lambda q, k, v: spec.attend_whole(q, NewTokens(NewKeys(k), v, positions, end), None, CALL)
    )
    return compiled(*map(jnp.asarray, (q, k, v)))


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def page_score(spec: Choosing, q: np.ndarray, keys: np.ndarray) -> float:
    """Score the keys [page, R] of a page for one query head."""
    if isinstance(spec, LeadingScores):
        return q[: spec.index] @ keys[0, : spec.index]
    return sum(max(q[i] * x for x in keys[:, i]) for i in range(spec.R))


def chosen_by_loops(spec: Choosing, q: np.ndarray, k: np.ndarray, t: int) -> list[int]:
    """Return the far tokens that query heads q [G, R] at position t read of the keys k [S, R]."""
    far = range(spec.sinks, t - spec.window + 1)
    pages = sorted({j // spec.page for j in far})
    if not pages:
        return []
    held = [k[page * spec.page : (page + 1) * spec.page] for page in pages]
    scores = CALL.scale * np.array([[page_score(spec, head, keys) for keys in held] for head in q])
    shared = sum(softmax(row) for row in scores)
    best = sorted(range(len(pages)), key=lambda i: (-shared[i], i))[: spec.read // spec.page]
    return [j for i in best for j in far if j // spec.page == pages[i]]


@cache
def by_loops(spec: Choosing) -> np.ndarray:
    """Compute results [B, S, N, H] of `tokens()`."""
    q, k, v = (x.astype(np.float64) for x in tokens())
    o = np.zeros((B, S, K * G, H))
    for b, t, head in np.ndindex(B, S, K):
        group = range(head * G, (head + 1) * G)
        far = chosen_by_loops(spec, q[b, t, group, : spec.R], k[b, :, head, : spec.R], t)
        near = [j for j in range(t + 1) if j < spec.sinks or j > t - spec.window]
        for n in group:
            scores = [q[b, t, n] @ k[b, j, head] for j in near]
            scores += [q[b, t, n, : spec.R] @ k[b, j, head, : spec.R] for j in far]
            weights = softmax(CALL.scale * np.array(scores))
            for weight, j in zip(weights, near + far, strict=True):
                o[b, t, n, : H if j in near else spec.Z] += (
                    weight * v[b, j, head, : H if j in near else spec.Z]
                )
    return o


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("pieces", [[S], [20, *[1] * 24]], ids=["whole", "decoded"])
@pytest.mark.matrix
def test_queries_read_what_loops_choose(spec, pieces):
    q, k, v = tokens()
    expected = by_loops(spec)
    found, _ = run(spec, q, k, v, pieces)
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.full
def test_a_decoded_token_reads_nothing_that_it_did_not_choose(spec):
    # Tokens that are not chosen may be NaN.
    q, k, v = tokens(1)
    expected, _ = run(spec, q, k, v, [20, 23, 1])
    _, state = run(spec, q[:, :-1], k[:, :-1], v[:, :-1], [20, 23])
    poisoned = np.full((B, K, S), True)
    for b, head in np.ndindex(B, K):
        group = slice(head * G, (head + 1) * G)
        keys = np.asarray(k[b, :, head, : spec.R], np.float64)
        read = chosen_by_loops(spec, q[b, -1, group, : spec.R].astype(np.float64), keys, S - 1)
        poisoned[b, head, [j // spec.page * spec.page + i for j in read for i in range(spec.page)]] = False
    assert poisoned.sum(-1).min() >= S - spec.read - 1
    far = state.far._replace(v=jnp.where(poisoned[..., None], jnp.nan, state.far.v))
    if isinstance(spec, PageBounds):  # Loki's index is the keys themselves.
        far = far._replace(k=jnp.where(poisoned[..., None], jnp.nan, far.k))
    last, end = jnp.full((B, 1), S - 1), jnp.full(B, S)
    done = attend(spec, replace(state, far=far), *(jnp.asarray(x[:, -1:]) for x in (q, k, v)), last, end)
    np.testing.assert_allclose(done.o[:, 0], expected[:, -1], atol=1e-6)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.full
def test_who_reads_all_far_tokens_attends_to_all(spec):
    expected, found = (whole(each, *tokens(2)) for each in (PrefixRing(**SHAPE), replace(spec, read=S)))
    np.testing.assert_allclose(found.o, expected.o, atol=1e-5)
    np.testing.assert_allclose(found.lse, expected.lse, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.full
def test_queries_go_in_blocks(spec, monkeypatch):
    together = whole(spec, *tokens(3))
    monkeypatch.setitem(xla._LOGITS_BYTES, jax.default_backend(), 1)
    assert xla.query_block(S, S) == 16
    in_blocks = whole(spec, *tokens(3))
    np.testing.assert_allclose(in_blocks.o, together.o, atol=4e-6)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.full
def test_of_equal_pages_the_lower_are_read(spec):
    q, k, v = tokens(4)
    k[:] = k[:, :1]
    far = run(spec, q, k, v, [S])[1].far
    positions = jnp.full((B, 1), S - 1)
    pages = spec.chosen(far, jnp.asarray(q)[:, -1:, :, : spec.R], positions, CALL)
    first = spec.sinks // spec.page
    expected = np.arange(first, first + spec.read // spec.page)
    np.testing.assert_array_equal(pages, np.broadcast_to(expected, pages.shape))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("held", [5, 12, 42, 44])
def test_bytes_read_are_those_of_ring_index_and_what_is_gathered(spec, held):
    state = jax.eval_shape(lambda: spec.create(1, held))
    slots = jax.ShapeDtypeStruct((1, K, spec.read), jnp.int32)
    k, v = jax.eval_shape(spec.rows, state.far, slots)
    chosen = min(k.shape[2], held)
    pages_alone = isinstance(spec, PageBounds)
    index = sum(x.size for x in state.far.index) if pages_alone else K * held * spec.index
    ring = sum(x.size for x in jax.tree.leaves(state.near))
    by_hand = 4 * (ring + index + K * chosen * (k.shape[3] + v.shape[3]))
    assert spec.bytes_read(held) == by_hand


def plan(name: str, **change) -> CompressionPlan:
    fields = {"window": 16, "settings": {}} | change
    settings = methods.settings_from_json(name, fields.pop("settings"))
    return replace(CompressionPlan.full(LLAMA), method=name, settings=settings, **fields)


def test_plans_say_what_is_read():
    quest = plan("quest", settings={"read": 64, "page": 8}).layer_caches("bfloat16")[0]
    assert isinstance(quest, PageBounds)
    assert (quest.read, quest.page) == (64, 8)
    loki = plan("loki", window=0).layer_caches("bfloat16")[0]
    assert isinstance(loki, LeadingScores)
    assert (loki.read, loki.page, loki.index) == (256, 1, 16)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("quest", {"window": 15}, "window=15 must be at least page=16, because only complete"),
        ("quest", {"settings": {"page": 1}}, "page=1 must be at least 2 tokens"),
        ("quest", {"settings": {"read": 40}}, "read=40 must be a positive multiple of page=16 tokens"),
        ("quest", {"settings": {"read": 0}}, "read=0 must be a positive multiple of page=16"),
        ("quest", {"settings": {"read": "many"}}, "read='many' must be an integer"),
        ("loki", {"settings": {"read": 0}}, "read=0 must be a positive multiple of page=1"),
        ("loki", {"settings": {"index": 33}}, "index=33 must be from 1 to 32, the rank of the layer's keys"),
        ("loki", {"settings": {"index": 0}}, "index=0 must be from 1 to 32"),
        ("loki", {"rotated": False}, "rotated=False: method 'loki' needs a calibrated basis"),
    ],
)
def test_impossible_settings_are_refused_by_name(name, change, message):
    with pytest.raises(PlanError, match=message):
        plan(name, **change)
