"""Reproducible models: equal bits alone, among others, after a cached prefix, and when preempted."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from tiny_tokenizers import ascii_tokenizer

from zdc_jax import methods
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import EngineRequest, Event, TokenLogprobs
from zdc_jax.fold import prepared_layers
from zdc_jax.generation.api import generate
from zdc_jax.generation.grammar import Grammar
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import LanguageModel
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

CONFIG = replace(LLAMA, layers=LLAMA.layers[:1])
H = CONFIG.head_dim
SMALL = EngineConfig(max_sequences=3, max_model_len=160, cache_tokens=192, page=16, chunk=32, decode_steps=1)
"""So few pages that requests are preempted."""


def coded(**settings: int) -> CompressionPlan:
    plan = CompressionPlan.uniform(CONFIG, qk=H, v=H, sinks=2, window=16)
    return replace(plan, method="coded", settings=methods.settings_from_json("coded", settings))


PLANS = {
    "16 bits": CompressionPlan.full(CONFIG),
    "ranks": CompressionPlan.uniform(CONFIG, qk=16, v=16, sinks=2, window=16),
    "codes": coded(bits_k=3, bits_v=3, bits_near=8),
    "codes chosen": coded(bits_k=4, bits_v=4, bits_index=4, index=16, read=16),
    "int8": replace(
        CompressionPlan.uniform(CONFIG, qk=H, v=H),
        method="int8",
        settings=methods.settings_from_json("int8", {}),
    ),
}


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel(CONFIG)


class Answer:
    """Log-probabilities of one answer's tokens and of their alternatives."""

    def __init__(self) -> None:
        self.scores: list[TokenLogprobs] = []
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self.scores += event.logprobs
        if event.finish_reason:
            self.ended.set()


def answer_all(engine: Engine, requests: list[EngineRequest]) -> list[list[TokenLogprobs]]:
    """Return the answers to requests that are sent at once."""
    answers = [Answer() for _ in requests]
    for request, answer in zip(requests, answers, strict=True):
        engine.submit(request, answer)
    for answer in answers:
        assert answer.ended.wait(120)
    return [answer.scores for answer in answers]


def load_reproducible(tiny: TinyModel, plan: CompressionPlan) -> LanguageModel:
    basis = tiny.basis()
    layers = prepared_layers(iter(tiny.layers), CONFIG, plan, basis, np.float32)
    return LanguageModel(Transformer(CONFIG, plan, tiny.embeddings, layers, reproducible=True))


def draw_requests(tiny: TinyModel, count: int) -> list[EngineRequest]:
    """Draw requests of which many begin alike."""
    rng, begin = np.random.default_rng(count), tiny.tokens(1, 120, seed=9)[0]
    found = []
    for _ in range(count):
        shared, own = int(rng.choice([0, 33, 50])), int(rng.integers(1, 30))
        prompt = (*begin[:shared].tolist(), *rng.integers(3, CONFIG.vocab_size, own).tolist())
        found.append(EngineRequest(prompt, int(rng.integers(1, 60)), ignore_eos=True, logprobs=2))
    return found


def check_requests(tiny: TinyModel, plan: CompressionPlan, count: int) -> None:
    """Check that answers among others, on few pages that they share, equal those of requests alone."""
    model, requests = load_reproducible(tiny, plan), draw_requests(tiny, count)
    with Engine(model, SMALL) as engine:
        together = answer_all(engine, requests)
        assert answer_all(engine, requests) == together
        stats = engine.stats()
        apart = [replace(request, salt=f"salt {index}") for index, request in enumerate(requests)]
        for request, answer in zip(apart, together, strict=True):
            assert answer_all(engine, [request]) == [answer]
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    longest = max(requests, key=lambda request: len(request.prompt))
    found = generate(model, longest.prompt, longest.max_tokens, stop_tokens=(), prefill_chunk=128)
    tokens = [each.token for each in together[requests.index(longest)]]
    assert list(found.completions[0].tokens) == tokens


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.full
def test_answers_that_go_back_are_those_with_masks_to_the_last_bit(tiny, name):
    model = replace(load_reproducible(tiny, PLANS[name]), tokenizer=ascii_tokenizer())
    patterns = ["[ -_]{60}", "[!-~]{60}", "[ -^`-~]{60}", "([a-z]{2} ?)*"]
    requests = [
        EngineRequest(
            tuple(range(3, 40 + 9 * i)),
            60,
            Sampling(float(i % 2), grammar=Grammar.regex(pattern)),
            logprobs=2,
        )
        for i, pattern in enumerate(patterns)
    ]
    config = replace(SMALL, cache_tokens=None, decode_steps=4)
    with Engine(model, config) as engine:
        answers = answer_all(engine, requests)
        assert engine.stats().rewinds > 0
    with Engine(model, replace(config, reuse=False)) as engine:
        assert answer_all(engine, requests) == answers
        assert engine.stats().rewinds == 0


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.full
def test_200_requests_are_answered_alike_to_the_last_bit(tiny, name):
    check_requests(tiny, PLANS[name], 40)
