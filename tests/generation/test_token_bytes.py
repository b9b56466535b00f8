"""Bytes of single tokens: joined, they are the text that was encoded."""

import time

import pytest
from tiny_tokenizers import byte_tokenizer, chat_tokenizer, demo, gemma, metaspace, sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from zdc_jax.generation.token_bytes import get_token_bytes

TEXT = "the old man’s café 👩‍👩‍👧 costs €3…\n\tsaid  the\n\n東京で "


def llama() -> Tokenizer:
    """Return a tokenizer like that of a GGUF file of Llama 2: a space is put before each text."""
    tokenizer = gemma()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def many_bytes() -> Tokenizer:
    return byte_tokenizer(256)


def read(tokenizer: Tokenizer, text: str) -> list[bytes]:
    tokens, reader = tokenizer.encode(text, add_special_tokens=False).ids, get_token_bytes(tokenizer)
    return [reader.get(token, first=index == 0) for index, token in enumerate(tokens)]


@pytest.mark.parametrize("make", [demo, many_bytes, sentencepiece, metaspace, gemma, llama])
def test_joined_bytes_are_the_text(make):
    tokenizer, text = make(), TEXT
    if make is metaspace:  # This decoder leaves bytes as they are named.
        text = "the old man is  the é"
    elif make is llama:  # The normalizer puts a space after added tokens, too.
        text = TEXT.replace("\n\n", "\n")
    assert b"".join(read(tokenizer, text)) == text.encode()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert get_token_bytes(tokenizer).join(tokens) == text


def test_single_tokens():
    assert read(gemma(), "the thes  é\n\n") == [
        *(b"t", b"he", b" the", b"s", b"  ", b"\xc3", b"\xa9", b"\n\n")
    ]
    assert read(llama(), "the thes  é") == [b"the", b" the", b"s", b"  ", b"\xc3", b"\xa9"]
    assert read(sentencepiece(), "the the!") == [b"the", b" the", b"!"]
    assert read(demo(), " 東")[-3:] == [b"\xe6", b"\x9d", b"\xb1"]


def test_the_space_of_a_first_word_is_dropped_only_there():
    tokenizer = sentencepiece()
    reader, word = get_token_bytes(tokenizer), tokenizer.token_to_id("▁the")
    assert (reader.get(word, first=True), reader.get(word, first=False)) == (b"the", b" the")
    begin = tokenizer.token_to_id("<s>")
    assert reader.join([begin, word, word]) == "<s>the the"
    assert reader.join([word], before=[begin]) == "the"
    assert reader.join([word], before=[begin, word]) == " the"


def test_added_tokens_are_their_text():
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens([AddedToken("<é Ġ>", normalized=False), AddedToken("é", normalized=False)])
    reader = get_token_bytes(tokenizer)
    assert b"".join(read(tokenizer, "on<é Ġ>it é")) == "on<é Ġ>it é".encode()
    assert reader.get(1, first=True) == b"<|im_end|>"
    assert (reader.has_text(1), reader.has_text(10**6)) == (False, False)
    assert reader.get(10**6, first=True) == b""


def test_other_decoders_decode_in_context():
    tokenizer = Tokenizer(models.WordPiece({"on": 0, "##it": 1, "the": 2}, unk_token="the"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    assert read(tokenizer, "onit the") == [b"on", b"it", b" the"]
    tokenizer.decoder = None
    assert read(tokenizer, "on the") == [b"on", b" the"]


def test_many_tokens_are_joined_in_linear_time():
    reader, token = get_token_bytes(demo()), demo().encode("the").ids[0]
    began = time.monotonic()
    text = reader.join([token] * 10**6)
    assert len(text) == 3 * 10**6
    assert time.monotonic() - began < 20  # In quadratic time more than a minute.
