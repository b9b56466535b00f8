"""Answers compared with whole sequences of context and question, without a cache."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel

from zdc_jax import CompressionPlan
from zdc_jax.evaluation.answers import answers, read_contexts
from zdc_jax.evaluation.questions import Question

S = 64


def questions(tiny: TinyModel, count: int) -> list[Question]:
    """Return questions of different lengths, whose answers have gaps."""
    rng = np.random.default_rng(1)
    made = []
    for row, length in enumerate(rng.integers(2, 45, count)):
        answer = rng.random(length) < 0.4
        answer[0], answer[-1] = False, True
        made.append(Question(tiny.tokens(1, int(length), seed=row)[0], answer, row / count))
    return made


def plainly(network, context: np.ndarray, question: Question) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 log-probabilities of the answer, and whether each token is the argmax."""
    tokens = np.concatenate([context, question.tokens])
    logits = np.asarray(network(jnp.asarray(tokens[None])), np.float64)[0]
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    where = S + np.flatnonzero(question.answer)
    return log_p[where - 1, tokens[where]], logits[where - 1].argmax(-1) == tokens[where]


def check(network, contexts, asked, found):
    for context, question, answer in zip(contexts, asked, found, strict=True):
        log_probability, right = plainly(network, context, question)
        np.testing.assert_allclose(answer.log_probability, log_probability, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(answer.right, right)
        assert answer.depth == question.depth
        assert answer.log_probability.dtype == np.float32


@pytest.mark.parametrize("protocol", ["cached", "exact"])
@pytest.mark.full
def test_equals_whole_sequences(tiny: TinyModel, protocol, monkeypatch):
    monkeypatch.setattr("zdc_jax.evaluation.answers.PREFILL_CHUNK", 32)
    contexts, asked = tiny.tokens(3, S), questions(tiny, 6)
    hidden, cache = read_contexts(tiny.dense, contexts, room=64, protocol=protocol)
    np.testing.assert_allclose(hidden, tiny.dense.hidden(jnp.asarray(contexts))[:, -1], rtol=1e-3, atol=1e-3)
    for some in (asked[:3], asked[3:]):  # The second batch of questions uses the same cache.
        check(tiny.dense, contexts, some, answers(tiny.dense, cache, some))


@pytest.mark.full
def test_a_plan_sees_contexts_through_its_cache(tiny_llama: TinyModel):
    plan = CompressionPlan.uniform(tiny_llama.config, qk=16, v=16, window=16, sinks=2)
    network, contexts, asked = (
        tiny_llama.model(plan).network,
        tiny_llama.tokens(2, S),
        questions(tiny_llama, 2),
    )
    found = {
        protocol: answers(network, read_contexts(network, contexts, room=64, protocol=protocol)[1], asked)
        for protocol in ("cached", "exact")
    }
    check(network, contexts, asked, found["cached"])
    for cached, exact in zip(found["cached"], found["exact"], strict=True):
        assert np.abs(cached.log_probability - exact.log_probability).max() > 1e-3


@pytest.mark.full
def test_neither_batch_nor_padding_matters(tiny_llama: TinyModel):
    network, contexts, asked = tiny_llama.dense, tiny_llama.tokens(3, S), questions(tiny_llama, 3)
    together = answers(network, read_contexts(network, contexts, room=64, protocol="cached")[1], asked)
    for row, question in enumerate(asked):
        _, cache = read_contexts(network, contexts[row : row + 1], room=64, protocol="cached")
        (alone,) = answers(network, cache, [question])
        np.testing.assert_allclose(alone.log_probability, together[row].log_probability, atol=1e-5)
        np.testing.assert_array_equal(alone.right, together[row].right)
