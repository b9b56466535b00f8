"""Agreement with greedy runs of each model alone, and KL with plain log-softmax of whole sequences."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel

from zdc_jax import CompressionPlan
from zdc_jax.evaluation.agreement import (
    CONTINUED,
    Agreement,
    Divergence,
    compare_continuations,
    continue_contexts,
)
from zdc_jax.evaluation.answers import read_contexts

S = 64


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    """Return a tiny model without a stop token."""
    return TinyModel(replace(LLAMA, eos_ids=()))


def greedy(network, context: np.ndarray, stop: tuple[int, ...] = ()) -> list[int]:
    """Generate token by token, each from the whole sequence, padded at its end."""
    tokens = np.zeros((1, S + CONTINUED), np.int32)
    tokens[0, :S] = context
    for at in range(S, S + CONTINUED):
        tokens[0, at] = np.asarray(network(jnp.asarray(tokens)))[0, at - 1].argmax()
        if tokens[0, at] in stop:
            break
    return tokens[0, S : at + 1].tolist()


def log_softmax(network, tokens: np.ndarray) -> np.ndarray:
    logits = np.asarray(network(jnp.asarray(tokens[None])), np.float64)[0, S - 1 : -1]
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def measured(dense, network, contexts):
    hidden, cache = read_contexts(dense, contexts, room=CONTINUED, protocol="cached")
    theirs = continue_contexts(dense, hidden, cache)
    hidden, cache = read_contexts(network, contexts, room=CONTINUED, protocol="cached")
    return theirs, compare_continuations(network, dense.embeddings, hidden, cache, theirs)


@pytest.mark.full
def test_a_model_agrees_with_itself(tiny: TinyModel):
    theirs, found = measured(tiny.dense, tiny.dense, tiny.tokens(3, S))
    assert found == [Divergence(CONTINUED, CONTINUED, CONTINUED, 0.0)] * 3
    assert Agreement.summarize(found) == Agreement(CONTINUED, 1.0, 0.0, 1.0, 3)
    assert theirs[0].tokens.tolist() == greedy(tiny.dense, tiny.tokens(3, S)[0])


@pytest.mark.full
def test_a_plan_departs_where_greedy_runs_do(tiny: TinyModel):
    contexts = tiny.tokens(3, S)
    plan = CompressionPlan.uniform(tiny.config, qk=16, v=16, window=32)
    network = tiny.model(plan).network
    theirs, found = measured(tiny.dense, network, contexts)
    for context, their, departure in zip(contexts, theirs, found, strict=True):
        own = np.array(greedy(network, context))
        same = own == their.tokens
        assert departure.first_difference == (CONTINUED if same.all() else same.argmin())
        whole = np.concatenate([context, their.tokens])
        log_p, log_q = log_softmax(tiny.dense, whole), log_softmax(network, whole)
        kl = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
        assert departure.kl == pytest.approx(kl, rel=1e-3)
    assert min(departure.first_difference for departure in found) < CONTINUED


@pytest.mark.full
def test_continuations_end_at_stop_tokens(tiny: TinyModel):
    # The stop token is one that the unmodified model soon generates.
    contexts = tiny.tokens(2, S)
    said = [greedy(tiny.dense, context) for context in contexts]
    stop = (said[0][5],)
    config = replace(tiny.config, eos_ids=stop)
    stopping = TinyModel(config)
    plan = CompressionPlan.uniform(config, qk=16, v=16, window=32)
    network = stopping.model(plan).network
    theirs, found = measured(stopping.dense, network, contexts)
    for context, their, departure in zip(contexts, theirs, found, strict=True):
        assert their.tokens[: their.count].tolist() == greedy(tiny.dense, context, stop)
        assert departure.count == len(greedy(network, context, stop))
        assert departure.dense_count == their.count
        assert departure.first_difference <= their.count
    assert theirs[0].count <= 6


def test_means():
    found = Agreement.summarize([Divergence(64, 64, 64, 0.0), Divergence(10, 8, 16, 0.5)])
    assert found == Agreement(37.0, 0.5, 0.25, 72 / 80, 2)
