"""Answers in JSON of a real model: which requests have a grammar, and what is counted."""

from pathlib import Path

import pytest
from fake_engine import FakeEngine, chat_model

from benchmarks.serving.grammars import GRAMMAR, Answers, Options, draw_requests, main, measure
from zdc_jax.engine.request import Event

OPTIONS = Options(Path("missing"), requests=10, masked=3, tokens=4)


def test_the_first_requests_have_a_grammar():
    requests = draw_requests(chat_model(), OPTIONS, masked=3, number=2)
    assert [each.sampling.grammar for each in requests] == [GRAMMAR] * 3 + [None] * 7
    assert len({each.prompt for each in requests}) == 10
    assert {each.salt for each in requests} == {"2"}, "no round finds what an earlier one has cached"


def test_all_tokens_are_counted():
    engine = FakeEngine(chat_model())
    speed, tokens = measure(engine, draw_requests(chat_model(), OPTIONS, masked=0, number=0))
    assert speed > 0
    assert tokens == [4] * 10


def test_a_failed_request_has_no_speed():
    answers = Answers(1)
    answers.add(0, Event(finish_reason="error", error="the device is lost"))
    with pytest.raises(SystemExit, match="a request failed: the device is lost"):
        answers.wait()


def test_the_number_of_grammars_is_checked_first():
    with pytest.raises(SystemExit, match="--masked 11: must be 1 to 10, as many as --requests"):
        main(Options(Path("missing"), requests=10, masked=11))
