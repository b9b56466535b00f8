"""Answers that another engine began: they continue as if one engine had generated all tokens."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from tiny_tokenizers import byte_tokenizer

from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import EngineRequest, Event
from zdc_jax.errors import PromptError
from zdc_jax.generation.sampling import Sampling
from zdc_jax.plan import CompressionPlan

PROMPT = tuple(range(3, 40))
WORD = byte_tokenizer(LLAMA.vocab_size).decode([40, 41])
REQUESTS = {
    "greedy": EngineRequest(PROMPT, 12, ignore_eos=True),
    "drawn": EngineRequest(PROMPT, 12, Sampling(0.9, top_k=20, top_p=0.9, seed=5), ignore_eos=True),
    "penalties": EngineRequest(
        PROMPT, 12, Sampling(0.9, seed=5, presence_penalty=1, repetition_penalty=1.5), ignore_eos=True
    ),
    "words": EngineRequest(
        PROMPT, 12, Sampling(allowed_token_ids=[40, 41], bad_words=[WORD]), ignore_eos=True
    ),
    "log-probabilities": EngineRequest(PROMPT, 12, ignore_eos=True, logprobs=2),
}
MATRIX = pytest.mark.matrix
"""Selects all tests alike, because only starting the engine takes time."""


@pytest.fixture(scope="module")
def engine():
    """Yield an engine with one token per event; most tokens end within a character, since each is a byte."""
    config = replace(LLAMA, layers=LLAMA.layers[:1])
    tiny = TinyModel(config)
    plan = CompressionPlan.uniform(config, qk=16, v=16, sinks=2, window=16)
    model = replace(tiny.model(plan, tiny.basis()), basis=None, tokenizer=byte_tokenizer(LLAMA.vocab_size))
    with Engine(model, EngineConfig(max_sequences=2, max_model_len=160, chunk=32, decode_steps=1)) as engine:
        yield engine


def answer(engine: Engine, request: EngineRequest) -> list[Event]:
    events, ended = [], threading.Event()

    def notify(event: Event) -> None:
        events.append(event)
        if event.finish_reason:
            ended.set()

    engine.submit(request, notify)
    assert ended.wait(60)
    return events


def told(events: list[Event]) -> tuple[tuple[int, ...], str]:
    """Return the tokens and text of some events."""
    tokens = tuple(token for event in events for token in event.tokens)
    return tokens, "".join(event.text or "" for event in events)


def resumed_at_each_token(engine: Engine, request: EngineRequest) -> list[Event]:
    """Return the whole answer, after checking resumption after each event."""
    whole = answer(engine, request)
    for count in range(1, len(whole)):
        rest = answer(engine, replace(request, generated=told(whole[:count])[0]))
        assert told(rest) == told(whole[count:])
        assert rest[-1].finish_reason == whole[-1].finish_reason
        ours, theirs = (
            [one.logprob for event in events for one in event.logprobs] for events in (rest, whole[count:])
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    return whole


@pytest.mark.parametrize("name", REQUESTS)
@MATRIX
def test_the_rest_of_an_answer_is_the_same_wherever_it_was_cut(engine, name):
    whole = resumed_at_each_token(engine, REQUESTS[name])
    assert len(told(whole)[0]) == 12


@MATRIX
@pytest.mark.full
def test_a_stop_string_that_the_cut_goes_through_is_found(engine):
    _, text = told(answer(engine, REQUESTS["greedy"]))
    stop = text[-5:-2]
    ended = resumed_at_each_token(engine, replace(REQUESTS["greedy"], stop=(stop,)))
    assert ended[-1].finish_reason == "stop"
    assert told(ended)[1] == text[: text.index(stop)]


@pytest.mark.full
def test_stop_tokens_count_from_the_beginning(engine):
    tokens, _ = told(answer(engine, REQUESTS["greedy"]))
    request = replace(REQUESTS["greedy"], stop_tokens=(tokens[6],), min_tokens=9)
    ended = resumed_at_each_token(engine, request)
    assert len(told(ended)[0]) >= 9


@pytest.mark.parametrize(
    ("generated", "message"),
    [
        (tuple(range(3, 15)), "generated: these 12 tokens end the answer"),
        ((5, LLAMA.eos_ids[0]), "generated: these 2 tokens end the answer"),
        ((5, 500), "token id 500 lies outside the vocabulary"),
    ],
)
@MATRIX
def test_what_cannot_go_on_is_refused(engine, generated, message):
    request = EngineRequest(PROMPT, 12, generated=generated)
    with pytest.raises(PromptError, match=message):
        engine.submit(request, lambda event: None)
