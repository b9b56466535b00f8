"""The comparison of servers' answers."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.serving.compare_answers import CITIES, compare_texts, make_calls

WORDS = ["one", "two", "three", "four", "five", "six"]


@pytest.fixture
def tokenizer():
    found = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="one"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return found


def test_shares_before_the_first_difference(tokenizer):
    found = compare_texts(
        ["one two three", "one two four five", "six", "two three"],
        ["one two three", "one two three five", "one", "two"],
        tokenizer,
    )
    assert found == {"equal": 1, "of": 4, "shares": [1.0, 0.5, 0.0, 0.5]}


def test_each_call_has_its_fact_in_the_text(tokenizer):
    calls = make_calls(np.arange(6).reshape(3, 2), tokenizer, seed=0)
    assert [call.text for call in calls] != [
        call.text for call in make_calls(np.ones((3, 2), int), tokenizer, 0)
    ]
    for call, words in zip(calls, ("one two", "three four", "five six"), strict=True):
        city, day, seats = (call.arguments[name] for name in ("city", "day", "seats"))
        assert words in call.text
        assert city in CITIES
        assert f"in {city} on {day}, for {seats} people" in call.text
