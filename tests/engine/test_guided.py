"""Answers with grammars where a call has several steps: they end, or fail, in the middle of a call."""

from dataclasses import replace

import pytest
from conftest import TinyModel
from listening import CONFIG, TWO_LAYERS, Listener, ask, window_model
from tiny_tokenizers import ascii_tokenizer

from zdc_jax.engine.engine import Engine
from zdc_jax.engine.job import MASKED_TOKENS, Job
from zdc_jax.engine.request import EngineRequest
from zdc_jax.errors import PromptError
from zdc_jax.generation.api import generate
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


@pytest.fixture
def free(model, told) -> Job:
    """Return a job whose answer can go back."""
    return Job(model, request_of("[ab]{5}"), told.append, Job.cancel, can_go_back=True)


def test_an_answer_goes_back_to_the_tokens_before_a_refused_one(model, free, told):
    good, bad = spell(model, "ab"), spell(model, "x")
    assert not free.needs_mask
    assert not free.is_shaped
    assert free.first_shaping() is not None, "the mask of the first token is known in time"
    free.show_guide([*good, *bad, *good])
    assert not free.add_tokens([*good, *bad, *good], None)
    assert free.must_go_back
    free.show_guide(good)
    assert not free.add_tokens(good, None), "tokens of a later call are ignored"
    assert [event.tokens for event in told] == [tuple(good)]
    assert free.work.output == good
    assert free.needs_mask
    assert free.is_shaped


def test_masks_last_longer_after_each_refusal(model, told):
    job = Job(model, request_of("[ab]{99}"), told.append, Job.cancel, can_go_back=True)
    for count in (MASKED_TOKENS, 4 * MASKED_TOKENS):
        job.show_guide(spell(model, "x"))
        job.must_go_back = False
        for _ in range(count):
            assert job.needs_mask
            job.show_guide(spell(model, "a"))
        assert not job.needs_mask


def test_a_masked_token_that_is_refused_is_an_error(model, free):
    bad = spell(model, "x")
    free.show_guide(bad)
    free.must_go_back = False
    free.show_guide(bad)
    with pytest.raises(PromptError, match="the grammar refuses the token"):
        free.add_tokens(bad, None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"temperature": 1.0, "top_p": 1.0}, True),
        ({"top_p": 0.9}, True),
        ({"temperature": 1.0, "top_p": 0.9}, False),
        ({"temperature": 1.0, "top_k": 5}, False),
        ({"temperature": 1.0, "min_p": 0.1}, False),
        ({"logit_bias": {5: 1.0}}, False),
        ({"presence_penalty": 1.0}, False),
        ({"bad_words": ("a",)}, False),
    ],
)
def test_only_draws_that_no_mask_changes_go_without_it(options, expected):
    assert Sampling(**options, grammar=Grammar.regex("a")).can_choose_before_mask is expected
    assert not Sampling(**options).can_choose_before_mask


def test_a_request_without_a_first_token_is_refused(engine, model):
    sampling = Sampling(grammar=Grammar.regex("[a-c]{2}"), allowed_token_ids=spell(model, "x"))
    with pytest.raises(PromptError, match="leave no token of allowed_token_ids that may come next"):
        engine.submit(EngineRequest((5, 6), 4, sampling), Listener())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_with_masks(engine, model, temperature):
    # A mask forbids some of what a random model chooses, all of it, or nothing.
    before = engine.stats().rewinds
    samplings = [
        Sampling(temperature, grammar=Grammar.regex(pattern), seed=seed)
        for seed, pattern in enumerate(["[ -_]{40}", "[!-~]{40}", "[a]{40}", "[^\\x00]{60}", "([a-z]{2} ?)*"])
    ]
    requests = [
        EngineRequest(tuple(range(3, 20 + i)), 40, each, salt=f"{temperature} {i}")
        for i, each in enumerate(samplings)
    ]
    listeners = [ask(engine, request) for request in requests]
    for request, listener in zip(requests, listeners, strict=True):
        alone = generate(model, request.prompt, request.max_tokens, sampling=request.sampling)
        assert listener.tokens() == alone.completions[0].tokens
        assert listener.events[-1].cached_tokens == 0, "what an answer reads again is no prefix"
    assert engine.stats().rewinds > before


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
