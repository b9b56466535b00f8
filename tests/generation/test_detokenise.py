"""Incremental text: equal to the whole text for every kind of tokenizer, at bounded cost."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hf_variants import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import demo, gpt_neox, metaspace, sentencepiece
from tokenizers import Tokenizer

from zdc_jax.generation.detokenise import CONTEXT, Detokeniser

TEXT = "  Ένα naïve café 👩‍👩‍👧 costs €3…\n\tsaid “the” old man, 東京で。 \n\n It is fun isn 't it? "
BROKEN = "\ufffd"


@pytest.fixture(scope="module", params=["words", sentencepiece, metaspace, demo, gpt_neox])
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
        assert "".join(pieces) + detokeniser.tail() == tokenizer.decode(tokens[:end])
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


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, tokens: list[int]) -> str:
        self.decoded += len(tokens)
        return self.tokenizer.decode(tokens)

    def __getattr__(self, name: str):
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("kind", ["random", "one token again and again"])
def test_each_token_is_decoded_a_bounded_number_of_times(tokenizer, kind, width):
    # Some rows have only broken characters, special tokens or bytes, which never complete a text.
    size, count = tokenizer.get_vocab_size(), 400
    rows = [np.random.default_rng(0).integers(0, size, count).tolist()]
    if kind != "random":
        broken = next((t for t in range(size) if BROKEN in tokenizer.decode([t])), 0)
        rows = [[token] * count for token in (broken, 0, 200 % size, size - 1)]
    for tokens in rows:
        counting = Counting(tokenizer)
        detokeniser = Detokeniser(counting)
        text = "".join(detokeniser.feed(tokens[at : at + width]) for at in range(0, count, width))
        assert counting.decoded <= count + 2 * CONTEXT * (count // width)
        assert text + detokeniser.tail() == tokenizer.decode(tokens)
