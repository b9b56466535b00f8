"""Tokenizers of every kind that a model may have."""

import lzma
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import reference_data
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers


def byte_tokenizer(vocab: int) -> Tokenizer:
    """Return a tokenizer with one character per token, for the vocabulary of a tiny model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def ascii_tokenizer() -> Tokenizer:
    """Return a tokenizer of 97 tokens: the printable characters of ASCII, newline and tab."""
    names = [*map(chr, range(ord("!"), ord("~") + 1)), "Ġ", "Ċ", "ĉ"]
    tokenizer = byte_tokenizer(0)
    tokenizer.model = models.BPE({name: index for index, name in enumerate(names)}, [])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Return a tokenizer like Llama 2's: words that begin with a space, and bytes for all other text."""
    words = ["▁the", "▁old", "▁man", "▁It", "▁is", "é", "▁", "▁▁", *"saidntocf'"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [("<unk>", 0.0), *((piece, -5.0) for piece in bytes_), *((word, -1.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a tokenizer like T5's, whose decoder strips the first space itself."""
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def gemma() -> Tokenizer:
    """Return a tokenizer like Gemma's, BPE without a space before the first word; it adds runs of spaces."""
    pieces = ["▁", *"thesaidcom,", "▁▁", "▁t", "he", "▁the"]
    vocab = {piece: index for index, piece in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + pieces)}
    merges = [("▁", "▁"), ("▁", "t"), ("h", "e"), ("▁t", "he")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True)])
    tokenizer.add_tokens([AddedToken(spaces, normalized=False) for spaces in ("▁▁", "\n\n")])
    return tokenizer


def whole_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of tokens, special ones left out.

    `tokenizers` replaces each byte of an invalid run of byte tokens. With Metaspace it drops all spaces of a
    first word. SentencePiece does neither.
    """
    if tokenizer.token_to_id("<0x00>") is None:
        return tokenizer.decode(tokens)
    has_bytes = not isinstance(tokenizer.decoder, decoders.Metaspace)
    special = {name for name, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    names = [tokenizer.id_to_token(token) for token in tokens if token not in special]
    parts = [
        bytes.fromhex(name[3:5])
        if has_bytes and re.fullmatch("<0x..>", name)
        else name.replace("▁", " ").encode()
        for name in names
        if name is not None
    ]
    text = b"".join(parts).decode(errors="replace")
    return text.removeprefix(" " if tokenizer.token_to_id("<bos>") is None else "")


def demo() -> Tokenizer:
    """Return a byte-level BPE tokenizer of 4096 tokens."""
    return Tokenizer.from_file(
        str(Path(__file__).parents[1] / "convert" / "demo_checkpoint" / "tokenizer.json")
    )


def gpt_neox() -> Tokenizer:
    """Return a byte-level BPE tokenizer with added tokens that are not special."""
    if (folder := reference_data()) is None:
        pytest.skip("reference data absent")
    with lzma.open(folder / "tokenizers" / "gpt_neox_20b_tokenizer.json.xz", "rt", encoding="utf-8") as file:
        return Tokenizer.from_str(file.read())


def chat_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer of 97 tokens, as in a tiny model; the first three are special."""
    special = ["<|im_start|>", "<|im_end|>", "</s>"]
    merges = ["th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "us", "se"]
    letters = [chr(ord(first) + i) for first in "aA" for i in range(26)]
    pieces = [*special, *letters, *"0123456789.,!?'<>|_/-:", "Ġ", "Ċ", *merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    vocab |= {f"[{index}]": index for index in range(len(pieces), 97)}
    tokenizer = Tokenizer(models.BPE(vocab, [(pair[0], pair[1]) for pair in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer
