"""Incremental text and places of tokens: equal to the whole text for every kind of tokenizer."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hf_variants import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import demo, gemma, gpt_neox, metaspace, sentencepiece, whole_text
from tokenizers import Tokenizer

from zdc_jax.generation.detokenise import Detokeniser
from zdc_jax.generation.token_bytes import get_token_bytes

TEXT = "  Ένα naïve café 👩‍👩‍👧 costs €3…\n\tsaid “the” old man, 東京で。 \n\n It is fun isn 't it? "
BROKEN = "\ufffd"


@pytest.fixture(scope="module", params=["words", sentencepiece, metaspace, gemma, demo, gpt_neox])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "words":
        write_tokenizer(folder := tmp_path_factory.mktemp("words"))
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    make: Callable[[], Tokenizer] = request.param
    return make()


def fed(tokenizer: Tokenizer, tokens: list[int], cuts: list[int]) -> list[str]:
    """Return the text of `tokens` in parts cut at `cuts`.

    After each part, all parts and the tail must give the text so far.
    """
    detokeniser, pieces = Detokeniser(tokenizer), []
    for start, end in pairwise([0, *cuts, len(tokens)]):
        pieces.append(detokeniser.feed(tokens[start:end]))
        assert "".join(pieces) + detokeniser.tail() == whole_text(tokenizer, tokens[:end])
    return [*pieces, detokeniser.tail()]


@settings(max_examples=60, deadline=None)
@given(draw=st.data())
@pytest.mark.matrix
def test_pieces_joined_are_the_whole_text(tokenizer, draw):
    # Ids are arbitrary, often the lowest and highest: bytes, special tokens, and ids without a token.
    size = tokenizer.get_vocab_size()
    ids = st.integers(0, size + 1) | st.integers(0, min(size, 300)) | st.integers(size - 3, size - 1)
    tokens = draw.draw(st.lists(ids, min_size=1, max_size=40))
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(tokens)), max_size=40)))
    fed(tokenizer, tokens, cuts)
    fed(tokenizer, tokens, list(range(1, len(tokens))))


@pytest.mark.parametrize("width", [1, 3, 8])
def test_real_text_comes_without_broken_characters(tokenizer, width):
    tokens = tokenizer.encode(TEXT).ids
    pieces = fed(tokenizer, tokens, list(range(width, len(tokens), width)))
    assert BROKEN not in "".join(pieces)
    assert sum(map(bool, pieces)) > 1


def test_text_continues_the_prompt(tokenizer):
    tokens = tokenizer.encode(TEXT).ids
    for cut in range(1, len(tokens)):
        prompt = Detokeniser(tokenizer)
        shown = prompt.feed(tokens[:cut])
        assert shown + Detokeniser(tokenizer, tokens[:cut]).feed(tokens[cut:]) == whole_text(
            tokenizer, tokens
        )


@settings(max_examples=60, deadline=None)
@given(draw=st.data())
@pytest.mark.matrix
def test_tokens_have_the_place_of_their_first_byte(tokenizer, draw):
    size = tokenizer.get_vocab_size()
    ids = st.integers(0, size + 1) | st.integers(0, min(size, 300))
    tokens = draw.draw(st.lists(ids, min_size=1, max_size=20))
    detokeniser, text, data = Detokeniser(tokenizer), "", b""
    for token in tokens:
        spelled = detokeniser.spell(token)
        new, place = detokeniser.place(token)
        if get_token_bytes(tokenizer).has_text(token) and spelled:
            # The character with the last of these bytes.
            assert len(text) + place == len((data + spelled[:1]).decode(errors="replace")) - 1
            data += spelled
        text += new
    assert text + detokeniser.tail() == data.decode(errors="replace")
