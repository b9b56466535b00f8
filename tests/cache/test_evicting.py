"""Caches that evict, compared with float64 token by token, and plans for them."""

from dataclasses import replace
from functools import partial

import evicting_brute_force as truth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA

from zdc_jax import methods
from zdc_jax.cache.specs.evicting import Evicting, highest
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.errors import PlanError
from zdc_jax.ops.attention import self_attention
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.ops.slots import EMPTY
from zdc_jax.plan import CompressionPlan

B, N, K, H, BLOCK, KEPT, CAPACITY = 2, 4, 2, 16, 8, 16, 88
CALL = Call(H**-0.5)
NEAR = {"sinks": 3, "window": 12}
CASES = {
    "h2o": ("h2o", {}, NEAR | {"R": 8, "Z": 4}, truth.h2o),
    "h2o mean alone": ("h2o", {"mean": True}, {}, truth.h2o_mean),
    "snapkv": ("snapkv", {"observed": 5, "pool": 3}, NEAR, truth.snapkv),
    "snapkv of kvpress": (
        "snapkv",
        {"observed": 8, "pool": 5, "pooling": "average"},
        {"window": 8},
        truth.snapkv_average,
    ),
    "tova": ("tova", {}, {"sinks": 2, "window": 1, "R": 8, "Z": 8}, truth.tova),
    "knorm": ("knorm", {}, NEAR | {"R": 8, "Z": 8}, truth.knorm),
}


def plan_of(method: str, settings: dict, sinks: int = 0, window: int = 0) -> CompressionPlan:
    rank = LLAMA.head_dim
    plan = CompressionPlan.uniform(LLAMA, qk=rank, v=rank, sinks=sinks, window=window)
    return replace(plan, method=method, settings=methods.settings_from_json(method, settings))


class Case:
    """A method, and random q, k, v of sequences, read on demand."""

    def __init__(self, name: str):
        method, settings, sizes, self.score = CASES[name]
        sizes = {"R": H, "Z": H, "sinks": 0, "window": 0} | sizes
        near = {"sinks": sizes["sinks"], "window": sizes["window"]}
        plan = plan_of(method, {"kept": KEPT, "block": BLOCK} | settings, **near)
        spec = plan.layer_caches("float32")[0]
        assert isinstance(spec, Evicting)
        self.spec = replace(spec, num_kv_heads=K, head_dim=H, **sizes)
        self.sizes = truth.Sizes(BLOCK, KEPT, **sizes)
        rng = np.random.default_rng(1)
        self.q, self.k, self.v = (
            rng.normal(size=(B, CAPACITY, heads, H)).astype(np.float32) for heads in (N, K, K)
        )
        self.q *= 2

    def expected(self, row: int, length: int, prompt: int = 0):
        x = (x[row, :length] for x in (self.q, self.k, self.v))
        return truth.attend(*x, CALL.scale, self.sizes, self.score, prompt)

    def run(self, state, held: list[int], ends: list[int], T: int):
        """Extend sequences to `ends`, T tokens a call, and return o of each sequence and the state."""
        found = [[] for _ in range(B)]
        held, last = np.array(held), np.array(ends)
        while (held < last).any():
            end = np.minimum(held + T, last)
            positions = held[:, None] + np.arange(T)
            at = np.minimum(positions, CAPACITY - 1)
            x = (np.take_along_axis(x, at[:, :, None, None], 1) for x in (self.q, self.k, self.v))
            o, state = _attend(self.spec, state, *x, positions, end)
            for row in range(B):
                found[row].append(o[row, : end[row] - held[row]])
            held = end
        return [np.concatenate(row) for row in found], state

    def assert_far(self, state, expected: list, row: int) -> None:
        """Assert that the far slots hold exactly the expected tokens, in order."""
        for head, tokens in enumerate(expected):
            at = min(head, state.positions.shape[1] - 1)
            held = np.asarray(state.positions[row, at])
            assert held.tolist() == [EMPTY] * (len(held) - len(tokens)) + tokens
            tail = slice(len(held) - len(tokens), None)
            keys, values = self.k[row, tokens, head], self.v[row, tokens, head]
            np.testing.assert_array_equal(state.far_k[row, head, tail], keys[:, : self.spec.R])
            np.testing.assert_array_equal(state.far_v[row, head, tail], values[:, : self.spec.Z])


@partial(jax.jit, static_argnames="spec")
def _attend(spec, state, q, k, v, positions, end):
    done = spec.attend(state, q, NewTokens(NewKeys(k), v, positions, end), None, CALL)
    return done.o, done.state


@partial(jax.jit, static_argnames="spec")
def _keep(spec, q, k, v, positions, end):
    _, lse = self_attention(q, k, v, scale=CALL.scale)
    return spec.keep_prompt(q, NewTokens(NewKeys(k), v, positions, end), lse, CAPACITY, CALL)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.full
def test_pieces_and_then_tokens(name):
    # Sequences have different lengths. In the end, 38 to 72 tokens are far, for 16 slots.
    case = Case(name)
    first, state = case.run(case.spec.create(B, CAPACITY), [0, 0], [45, 27], 3 * BLOCK)
    second, state = case.run(state, [45, 27], [72, 57], 1)
    for row, length in enumerate((72, 57)):
        o, far = case.expected(row, length)
        assert_same(np.concatenate([first[row], second[row]]), o)
        case.assert_far(state, far, row)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.matrix("h2o", "snapkv of kvpress")
def test_an_exact_prompt_and_then_tokens(name):
    # One prompt ends within a block, among observed tokens; the other ends with a block.
    case, T, prompts, ends = Case(name), 40, [38, 24], [64, 48]
    x = (x[:, :T] for x in (case.q, case.k, case.v))
    state = _keep(case.spec, *x, np.tile(np.arange(T), (B, 1)), np.array(prompts))
    for row, length in enumerate(prompts):
        case.assert_far(state, case.expected(row, length, length)[1], row)
    found, state = case.run(state, prompts, ends, 1)
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        o, far = case.expected(row, end, prompt)
        assert_same(found[row], o[prompt:])
        case.assert_far(state, far, row)


def test_far_tokens_are_as_many_as_there_are_slots():
    # Until the slots are full, they hold all tokens that left the window, except sinks.
    case = Case("h2o")
    _, state = case.run(case.spec.create(B, CAPACITY), [0, 0], [32, 88], 3 * BLOCK)
    few, many = np.asarray(state.positions)
    left = list(range(NEAR["sinks"], 32 - NEAR["window"]))[-KEPT:]
    assert len(left) == KEPT
    assert (few >= NEAR["sinks"]).all()
    assert (np.diff(many, axis=-1) > 0).all()
    assert many.min() >= NEAR["sinks"]
    assert many.max() < 88 - NEAR["window"]


def test_of_equals_the_later_stay():
    scores = jnp.array([[[1.0, 2, 1, 2, 1, 0]]])
    valid = jnp.array([[[True] * 5 + [False]]])
    assert highest(scores, valid, 4).tolist() == [[[1, 2, 3, 4]]]
    assert highest(scores, valid, 3).tolist() == [[[1, 3, 4]]]
    assert highest(scores, valid, 7).tolist() == [[[EMPTY, EMPTY, 0, 1, 2, 3, 4]]]


def test_a_cache_does_not_grow_with_the_context():
    # Sinks, window, block and slots take two bytes per coordinate, scores and positions four.
    spec = replace(Case("h2o").spec, dtype="bfloat16")
    near, recent = 3 + 12 + BLOCK, 12 + BLOCK
    expected = K * (near * 2 * H * 2 + recent * 4 + KEPT * ((8 + 4) * 2 + 8))
    assert spec.bytes(1024) == spec.bytes(64) == spec.bytes_read(2**20) == expected
    assert spec.bytes(8) < expected
    shared = Case("tova").spec  # One choice for all heads.
    near, recent = 2 + 1 + BLOCK, 1 + BLOCK
    assert shared.bytes(1024) == K * 4 * (near * 2 * H + KEPT * (8 + 8)) + recent * 4 + KEPT * 8


@pytest.mark.full
def test_capacity_below_all_sizes():
    # No token is far, so attention is exact.
    case = Case("snapkv")
    spec = replace(case.spec, block=64, window=96)
    positions, end = np.tile(np.arange(24), (B, 1)), np.array([24, 20])
    x = [x[:, :24] for x in (case.q, case.k, case.v)]
    o, state = _attend(spec, spec.create(B, 24), *x, positions, end)
    exact, _ = self_attention(*map(jnp.asarray, x), scale=CALL.scale)
    assert_same(o[0], exact[0])
    assert_same(o[1, :20], exact[1, :20])
    assert state.near_k.shape[2] == 3 + 24 + 24


@pytest.mark.parametrize(
    ("method", "settings", "near", "named"),
    [
        ("h2o", {"kept": 0}, {}, "kept=0"),
        ("h2o", {"kept": 12}, {}, "kept=12"),
        ("h2o", {"kept": "8"}, {}, "kept='8'"),
        ("knorm", {"block": -8}, {}, "block=-8"),
        ("knorm", {"block": 4}, {}, "block=4 must be a power of two"),
        ("h2o", {"block": 24}, {}, "block=24 must be a power of two"),
        ("h2o", {"mean": 1}, {}, "mean=1"),
        ("snapkv", {"observed": 0}, {"window": 64}, "observed=0"),
        ("snapkv", {"pool": 4}, {"window": 64}, "pool=4"),
        ("snapkv", {"pooling": "min"}, {"window": 64}, "pooling='min'"),
        ("snapkv", {}, {"sinks": 4, "window": 31}, "window=31 must be at least 32"),
        ("snapkv", {"block": 16}, {"window": 64}, "block=16 must be at least 32"),
        ("tova", {}, {"sinks": 4}, "window=0 must be at least 1"),
    ],
)
def test_settings_that_are_refused(method, settings, near, named):
    with pytest.raises(PlanError, match=named):
        plan_of(method, settings, **near)


def test_tokens_are_stored_only_as_they_are_attended_to():
    spec, x = Case("h2o").spec, jnp.zeros((1, 1, K, H))
    new = NewTokens(NewKeys(x), x, jnp.zeros((1, 1), int), jnp.ones(1, int))
    with pytest.raises(NotImplementedError, match="only in `attend`"):
        spec.write(spec.create(1, 8), new)
