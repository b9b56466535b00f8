"""Sampling of tokens: each row by its own numbers and key, compared with closed forms and brute force."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax import Sampling
from zdc_jax.errors import PromptError
from zdc_jax.generation.next_token import draw, find_top, restrict
from zdc_jax.generation.packed_parameters import PackedParameters, pack_parameters
from zdc_jax.generation.sampling import request_keys

LOGITS = 3 * np.random.default_rng(0).normal(size=(6, 30)).astype(np.float32)
PROMPTS = [np.array(prompt, np.int32) for prompt in ([1], [1, 2], [2, 1], [1], [0, 1], [1, 0])]
POSITIONS = jnp.array([1, 2, 2, 1, 2, 2])
chosen = jax.jit(lambda logits, numbers, positions: draw(logits, PackedParameters.of(numbers), positions))


def numbers(samplings, prompts):
    """Return the row numbers that `draw` needs."""
    keys = request_keys(samplings, prompts)
    given = zip(prompts, samplings, keys, strict=True)
    return np.stack([pack_parameters(len(prompt), 1, (), *rest) for prompt, *rest in given])


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        (
            "temperature",
            (-1, float("nan"), float("inf"), 10**39, 10**400, True, "1", None),
            "finite float32 number >= 0",
        ),
        ("top_k", (0, -1, 1.0, float("nan"), True, "5"), "whole number >= 1"),
        ("top_p", (0.0, 1.1, 10**400, float("nan"), True, "0.5"), r"number in \(0, 1\]"),
        ("seed", (-1, 2**32, 0.0, False, "0", None), "whole number from 0 to 4294967295"),
        ("min_p", (-0.1, 1.1, float("nan"), True, "0", None), "number from 0 to 1"),
        ("presence_penalty", (-2.1, 2.1, float("nan"), True, "0", None), "number from -2 to 2"),
        ("frequency_penalty", (-2.1, 2.1, float("nan"), True, "0", None), "number from -2 to 2"),
        ("repetition_penalty", (0, -1, 1001, float("nan"), True, None), "number from 0.001 to 1000"),
    ],
)
def test_bad_samplings_are_refused(name, values, allowed):
    for value in values:
        with pytest.raises(PromptError, match=f"{name}={value!r:.80} must be a {allowed}"):
            Sampling(**{name: value})


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        (
            "logit_bias",
            ({5: 101}, {5: "1"}, {5: float("nan")}, {"5": 1}, [5], 5, None),
            "must map token ids to numbers from -100 to 100",
        ),
        ("allowed_token_ids", ([], ["5"], "5", 5, [True]), "must be a list of one token id or more"),
        ("bad_words", ("word", [""], [" "], [5], None), "must be a list of words, none of them empty"),
    ],
)
def test_bad_lists_of_tokens_are_refused(name, values, allowed):
    for value in values:
        with pytest.raises(PromptError, match=re.escape(f"{name}={value!r} ") + allowed):
            Sampling(**{name: value})


def test_equal_lists_make_equal_samplings():
    first = Sampling(logit_bias={7: 1, 5: 2}, allowed_token_ids=[7, 5, 5], bad_words=["a"])
    second = Sampling(logit_bias={5: 2.0, 7: 1.0}, allowed_token_ids=(5, 7), bad_words=("a",))
    assert first == second
    assert hash(first) == hash(second)
    assert replace(first, seed=1).logit_bias == first.logit_bias


def test_numbers_of_numpy_are_numbers():
    Sampling(np.finfo(np.float32).max)
    Sampling(np.float16(0.5))
    Sampling(np.float32(0.5), np.int64(3), np.float64(0.5), np.uint32(2**32 - 1))


def test_keys_belong_to_requests():
    # Keys depend on seed, prompt and repetition, but not on order or on other requests.
    samplings = [Sampling(1.0, seed=seed) for seed in (0, 1)]
    requests = [(sampling, prompt) for sampling in samplings for prompt in PROMPTS[1:]]

    def keys(requests):
        return request_keys(*zip(*requests, strict=True)).tolist()

    together = keys(requests)
    assert len(set(map(tuple, together))) == len(requests)
    assert keys(requests[::-1]) == together[::-1]
    assert [keys([request])[0] for request in requests] == together
    other = Sampling(0.5, seed=0), requests[0][1]  # The prompt is the same, but this is no repetition.
    assert keys([other, requests[0]])[1] == together[0]
    again = keys([requests[0]] * 3)
    assert again[0] == together[0]
    assert len(set(map(tuple, again))) == 3


def test_rows_are_chosen_one_by_one():
    # A batch of all kinds, including greedy, gives each row its result alone.
    samplings = [
        Sampling(),
        Sampling(1.0),
        Sampling(2.0, top_k=3, seed=1),
        Sampling(2.0, top_k=1),
        Sampling(5.0, top_p=0.3),
        Sampling(1.0, top_k=1000, top_p=1.0, min_p=0.1, seed=2),
    ]
    batch = chosen(jnp.asarray(LOGITS), numbers(samplings, PROMPTS), POSITIONS)
    for row, (sampling, prompt) in enumerate(zip(samplings, PROMPTS, strict=True)):
        arrays = numbers([sampling], [prompt])
        alone = chosen(jnp.asarray(LOGITS[row : row + 1]), arrays, POSITIONS[row : row + 1])
        assert batch[row] == alone[0]
    assert (np.asarray(batch)[[0, 3]] == LOGITS[[0, 3]].argmax(-1)).all()


@pytest.mark.parametrize("temperature", [1e-300, 1e-44, 1e-38, 1e-20])
def test_the_coldest_samplings_are_greedy(temperature):
    arrays = numbers([Sampling(temperature, top_p=1e-60)] * 6, PROMPTS)
    assert (np.asarray(chosen(jnp.asarray(LOGITS), arrays, POSITIONS)) == LOGITS.argmax(-1)).all()


def test_frequencies_follow_the_softmax():
    # Equal requests of two samplings are in one batch, at a few positions.
    count, samplings = 1000, [Sampling(0.7, min_p=0.02, seed=5), Sampling(2.0, top_k=5, seed=5)]
    arrays = numbers(samplings * count, [PROMPTS[0]] * 2 * count)
    logits = jnp.tile(LOGITS[:2], (count, 1))
    draws = [chosen(logits, arrays, jnp.full(2 * count, position)) for position in range(1, 5)]
    for row, sampling in enumerate(samplings):
        weight = np.exp(LOGITS[row].astype(np.float64) / sampling.temperature)
        weight[np.argsort(-weight)[sampling.top_k or 30 :]] = 0
        weight[weight < sampling.min_p * weight.max()] = 0
        expected = 4 * count * weight / weight.sum()
        counts = np.bincount(np.stack(draws).reshape(-1, count, 2)[..., row].ravel(), minlength=30)
        likely = expected > 10
        assert ((counts - expected)[likely] ** 2 / expected[likely]).sum() < 3 * likely.sum()
        assert (counts[expected == 0] == 0).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), top_k=st.integers(1, 40), top_p=st.floats(0.05, 1.0))
def test_restrict_keeps_the_smallest_sufficient_set(seed, top_k, top_p):
    logits = np.random.default_rng(seed).normal(size=(1, 30)).astype(np.float32) * 3
    out = np.asarray(restrict(jnp.asarray(logits), jnp.array([min(top_k, 30)]), jnp.array([top_p])))[0]
    order = np.argsort(-logits[0])[:top_k]
    mass = np.exp(logits[0, order].astype(np.float64))
    before = np.cumsum(mass / mass.sum()) - mass / mass.sum()
    kept = set(order[before < top_p - 1e-6])
    allowed = set(order[before < top_p + 1e-6])
    found = set(np.flatnonzero(np.isfinite(out)))
    assert kept <= found <= allowed
    assert found


def test_the_likeliest_tokens_are_those_of_a_stable_sort():
    logits = np.random.default_rng(0).integers(0, 30, (3, 97)).astype(np.float32)
    ids, values = find_top(jnp.array(logits))
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, axis=-1))
