"""Scores of continuations, compared with plain float64 log-softmax of a forward pass without a cache."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from zdc_jax.config import ModelConfig
from zdc_jax.errors import MeshError, PromptError
from zdc_jax.evaluation.likelihood import score_continuations
from zdc_jax.loading import LanguageModel
from zdc_jax.methods import h2o, token_classes
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan

NEAR = {"window": 8, "sinks": 2}
SHORT = replace(LLAMA, layers=LLAMA.layers[:2])
SMALL_OPT = replace(OPT, layers=OPT.layers[:2])
LENGTHS = ((1, 1), (70, 3), (40, 30), (5, 1), (31, 2), (1, 77), (64, 1))
"""Lengths of context and continuation; some begin, end or lie between chunks of 32 tokens."""


def classes(config: ModelConfig) -> CompressionPlan:
    settings = token_classes.Settings(group=config.num_layers, first=0.4, last=0.4, block=8)
    return replace(
        CompressionPlan.uniform(config, qk=32, v=32, **NEAR), method="token_classes", settings=settings
    )


PLANS = {
    "no plan": (SMALL_OPT, CompressionPlan.full),
    "window and sinks": (SHORT, partial(CompressionPlan.uniform, qk=16, v=16, **NEAR)),
    "token classes": (SHORT, classes),
}


@pytest.fixture(scope="module", params=PLANS)
def model(request) -> LanguageModel:
    config, plan = PLANS[request.param]
    return TinyModel(config).model(plan(config))


def pairs_of(model: LanguageModel) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(0)

    def draw(count):
        return rng.integers(3, model.config.vocab_size, count).tolist()

    return [(draw(context), draw(continuation)) for context, continuation in LENGTHS]


_whole = jax.jit(lambda network, tokens: network(tokens))


def plain(model: LanguageModel, context: list[int], continuation: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities [C] in float64, and the likeliest tokens [C]."""
    tokens = np.zeros((1, 128), np.int32)
    tokens[0, : len(context) + len(continuation)] = [*context, *continuation]
    logits = np.asarray(_whole(model.network, tokens), np.float64)[0, len(context) - 1 :][: len(continuation)]
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return log_p[np.arange(len(continuation)), continuation], logits.argmax(-1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.matrix
def test_equals_a_pass_without_a_cache(model, batch):
    pairs = pairs_of(model)
    scored = list(score_continuations(model, pairs, batch=batch, prefill_chunk=32))
    lengths = [sum(LENGTHS[index]) for index, _ in scored]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(index for index, _ in scored) == list(range(len(pairs)))
    for index, scores in scored:
        log_probs, likeliest = plain(model, *pairs[index])
        np.testing.assert_allclose(scores.log_probs, log_probs, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(scores.is_greedy, likeliest == pairs[index][1])


@pytest.mark.matrix
def test_what_is_likeliest_is_greedy(model):
    # Only tokens of greedy decoding are marked as greedy; here they come from the forward pass.
    context = pairs_of(model)[1][0]
    best = plain(model, context, [3])[1].tolist()
    other = [(best[0] + 1) % model.config.vocab_size]
    found = dict(score_continuations(model, [(context, best), (context, other)]))
    assert found[0].is_greedy.tolist() == [True]
    assert found[1].is_greedy.tolist() == [False]
    assert found[0].log_probs[0] > found[1].log_probs[0]


@pytest.mark.matrix
def test_one_more_than_the_positions_can_be_scored(model):
    limit = model.config.max_positions
    tokens = TinyModel(model.config).tokens(1, limit + 2)[0].tolist()
    ((_, scores),) = score_continuations(model, [(tokens[:1], tokens[1 : limit + 1])])
    assert scores.log_probs.shape == (limit,)
    with pytest.raises(PromptError, match=f"exceed the model's {limit} positions"):
        score_continuations(model, [(tokens[:2], tokens[2:])])


def test_refusals_come_before_any_work(model):
    for pairs, error in (
        ([([3], [4]), ([], [4])], "pair 1 has 0 context tokens and 1 continuation tokens"),
        ([([3], [])], "pair 0 has 1 context tokens and 0 continuation tokens"),
        ([([3], [4, 97])], "token id 97 lies outside the vocabulary"),
        ([([-1], [4])], "token id -1 lies outside the vocabulary"),
    ):
        with pytest.raises(PromptError, match=error):
            score_continuations(model, pairs)
    for batch in (0, -1, 1.5):
        with pytest.raises(PromptError, match=f"batch={batch} must be a whole number >= 1"):
            score_continuations(model, [], batch=batch)
    assert list(score_continuations(model, [])) == []


def test_models_on_a_mesh_are_refused():
    network = TinyModel(SHORT).dense.on_mesh(MeshConfig().create())
    with pytest.raises(MeshError, match="does not support a mesh; load the model without mesh="):
        score_continuations(LanguageModel(network), [([3], [4])])


def test_pieces_that_blocks_do_not_fit_are_refused():
    # With such chunks, all but the first would give NaN.
    plan = replace(CompressionPlan.full(SHORT), method="h2o", settings=h2o.Settings(kept=8, block=64))
    model = TinyModel(SHORT).model(plan)
    with pytest.raises(PromptError, match="prefill_chunk=32 must be a multiple of the plan's blocks of 64"):
        score_continuations(model, [([3] * 40, [4])], prefill_chunk=32)
