"""Ends of rows, compared with brute force over the first n tokens; parts of stop strings never show."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import demo, sentencepiece, whole_text
from tokenizers import Tokenizer

from zdc_jax.generation.results import Completion
from zdc_jax.generation.stopping import OutputSequence, StopStrings

STOP_ID = 7


@pytest.fixture(scope="module", params=[demo, sentencepiece])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


def brute_force(tokenizer: Tokenizer, tokens: list[int], stop: list[str]) -> Completion:
    """Decode the first n tokens for every n."""
    for n in range(1, len(tokens) + 1):
        if tokens[n - 1] == STOP_ID:
            return Completion(tuple(tokens[:n]), whole_text(tokenizer, tokens[: n - 1]), "stop")
        text = whole_text(tokenizer, tokens[:n])
        if any(string in text for string in stop):
            return Completion(tuple(tokens[:n]), text[: min(text.find(s) for s in stop if s in text)], "stop")
    return Completion(tuple(tokens), whole_text(tokenizer, tokens), "length")


@settings(max_examples=150, deadline=None)
@given(draw=st.data())
def test_rows_end_where_brute_force_says(tokenizer, draw):
    common = tokenizer.encode("the old man said\n\n it is, and isn't").ids
    ids = st.sampled_from([*common, *range(5, 9)]) | st.integers(0, tokenizer.get_vocab_size() - 1)
    tokens = draw.draw(st.lists(ids, min_size=1, max_size=30))
    tokens = tokens[: tokens.index(STOP_ID) + 1] if STOP_ID in tokens else tokens
    text = whole_text(tokenizer, tokens)
    at = draw.draw(st.integers(0, len(text)))
    length = draw.draw(st.integers(1, 6))
    stop = [string for string in ("\n", "old m", text[at : at + length]) if string.strip("\ufffd")]
    stop = draw.draw(st.lists(st.sampled_from(stop), max_size=3))
    expected = brute_force(tokenizer, tokens, stop)
    row = OutputSequence(0, tokenizer, (STOP_ID,), StopStrings(stop), before=())
    shown, given_tokens = "", ()
    width = draw.draw(st.integers(1, 9))
    for start in range(0, len(tokens), width):
        delta = row.append(tokens[start : start + width], full=start + width >= len(tokens))
        if delta is not None:
            shown, given_tokens = shown + delta.text, given_tokens + delta.tokens
            assert expected.text.startswith(shown)
        if row.finish_reason is not None:
            break
    assert row.completion() == expected
    assert (given_tokens, shown, delta.finish_reason) == (
        expected.tokens,
        expected.text,
        expected.finish_reason,
    )


def test_only_what_may_become_a_stop_string_waits():
    stop = StopStrings(["</s>", "\n\n"])
    texts = ("abc", "abc<", "abc</s", "abc</t", "a\n", "")
    assert [stop.count_safe(text) for text in texts] == [3, 3, 3, 6, 1, 0]
    assert stop.find("a\n\n</s>") == 1
    assert stop.find("abc</s>", searched=6) == 3
    assert StopStrings().find("abc") is None
    assert StopStrings().count_safe("abc") == 3
