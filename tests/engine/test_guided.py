"""Answers with grammars where a call has several steps: they end, or fail, in the middle of a call."""

from dataclasses import replace

import pytest
from conftest import TinyModel
from listening import CONFIG, TWO_LAYERS, Listener, ask, window_model
from tiny_tokenizers import ascii_tokenizer

from zdc_jax.engine.engine import Engine
from zdc_jax.engine.job import Job
from zdc_jax.engine.request import EngineRequest
from zdc_jax.errors import PromptError
from zdc_jax.generation.grammar import Grammar, Matcher
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import LanguageModel


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return replace(window_model(TinyModel(TWO_LAYERS)), tokenizer=ascii_tokenizer())


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, replace(CONFIG, max_sequences=6)) as engine:
        yield engine


def request_of(pattern: str) -> EngineRequest:
    return EngineRequest(tuple(range(3, 20)), 20, Sampling(grammar=Grammar.regex(pattern)))


def test_answers_of_all_lengths_are_whole(engine):
    # Some sequences are delivered while guides have seen tokens of the next call.
    lengths = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    listeners = [ask(engine, request_of(f"[ab]{{{length}}}")) for length in lengths]
    for length, listener in zip(lengths, listeners, strict=True):
        assert len(listener.tokens()) == length
        text = "".join(event.text for event in listener.events)
        assert (len(text), set(text) <= {"a", "b"}, listener.reason) == (length, True, "stop")


def spell(model: LanguageModel, text: str) -> list[int]:
    return model.tokenizer.encode(text).ids


@pytest.fixture
def told() -> list:
    return []


@pytest.fixture
def job(model, told) -> Job:
    return Job(model, request_of("[ab]{5}"), told.append, Job.cancel)


def test_an_answer_ends_with_the_token_that_completes_it(model, job, told):
    first, last = spell(model, "abab"), spell(model, "b")
    job.show_guide(first)
    job.show_guide([*last, *first])
    job.add_tokens(first, None)
    assert not job.ended, "the guide is ahead of the answer"
    job.add_tokens([*last, *first], None)
    assert [event.tokens for event in told] == [tuple(first), tuple(last)]
    assert told[-1].finish_reason == "stop"


def test_tokens_before_a_refused_one_are_delivered(model, job, told):
    good, bad = spell(model, "ab"), spell(model, "x")
    job.show_guide([*good, *bad, *good])
    with pytest.raises(PromptError, match="refuses the token"):
        job.add_tokens([*good, *bad, *good], None)
    assert [event.tokens for event in told] == [tuple(good)]
    assert not job.ended, "the engine ends it with the error"
    assert job.next_guide is None


def test_a_grammar_that_fails_is_not_complete(model, job, monkeypatch):
    monkeypatch.setattr(job.guide, "_failure", "the grammar cannot continue: no fuel")
    assert not job.guide.is_complete
    job.show_guide(tokens := spell(model, "a"))
    with pytest.raises(PromptError, match="no fuel"):
        job.add_tokens(tokens, None)


def test_a_failure_ends_its_request_alone(engine, monkeypatch):
    mask, failing = Matcher.mask, set()

    def fails(matcher: Matcher):
        own, error = mask(matcher)
        return own, "no fuel" if matcher in failing else error

    monkeypatch.setattr(Matcher, "mask", fails)
    expected = ask(engine, request_of("[ab]{9}")).tokens()
    listeners = [Listener() for _ in range(5)]
    job = engine.submit(request_of("[ab]{12}"), listeners[0])
    failing.add(job.guide._matcher)
    for listener in listeners[1:]:
        engine.submit(request_of("[ab]{9}"), listener)
    listeners[0].tokens()
    assert (listeners[0].reason, listeners[0].events[-1].error) == (
        "error",
        "the grammar cannot continue: no fuel",
    )
    assert [listener.tokens() for listener in listeners[1:]] == [expected] * 4
