"""Tokenizers of GGUF files: the original's ids for each kind, and damage refused by name."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import WORDS
from tiny_tokenizers import demo
from tokenizers import Tokenizer

from convert.gguf.pretokenizers import PRE_TOKENIZATIONS, get_pre_tokenization
from convert.gguf.reader import GGUF
from convert.gguf.tokenizer import build_tokenizer, make_tokenizer_config
from zdc_jax.errors import ConversionError

NORMAL, UNKNOWN, CONTROL, USER, _, BYTE = range(1, 7)
TEXTS = (
    *("", " ", "  two", "a\n\n\nb\t\tc \r\n", "12345 1,234.5 ½ Ⅻ ٣٤", "don't WE'LL i'M"),
    *(
        "日本語 漢字",
        "emoji 🦙👩‍👩‍👧",
        "\x00\x01\x7f\u200b",
        "é é",
        "Привет العربية हिन्दी",
        "x" * 99,
        " " * 50,
    ),
    "<s>in text</s> and <pad>",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
)


def file_with(values: dict[str, Any], architecture: str = "llama") -> GGUF:
    """Return the header of a file with this tokenizer."""
    metadata = {"general.architecture": architecture} | {
        key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}": value
        for key, value in values.items()
    }
    return GGUF(Path("a.gguf"), metadata, {})


def build(values: dict[str, Any], architecture: str = "llama") -> Tokenizer:
    return build_tokenizer(file_with(values, architecture))


def ids(tokenizer: Tokenizer, text: str, *, ends: bool = False) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=ends).ids


# --- Byte-level ------------------------------------------------------------------------------------------


def values_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a converter writes for a byte-level tokenizer."""
    raw = json.loads(tokenizer.to_str())
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    special = {token["id"] for token in raw["added_tokens"] if token["special"]}
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [by_id[index] for index in range(len(by_id))],
        "token_type": [CONTROL if index in special else NORMAL for index in range(len(by_id))],
        "merges": [" ".join(pair) for pair in raw["model"]["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_byte_level_ids_and_texts_are_those_of_the_original():
    original = demo()
    tokenizer = build(values_of(original))
    for text in TEXTS:
        assert ids(tokenizer, text) == ids(original, text)
        assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text
        assert tokenizer.decode(ids(original, text)) == original.decode(ids(original, text))


PIECES = {
    "gpt-2": ("We'll pay 1234  \n\nOK", ["We", "'ll", " pay", " 1234", "  \n", "\n", "OK"]),
    "smollm": ("We'll pay 1234\n\n5", ["We", "'ll", " pay", " ", "1", "2", "3", "4", "\n\n", "5"]),
    "llama-bpe": ("WE'LL(pay) 12345\n\n x", ["WE", "'LL", "(pay", ")", " ", "123", "45", "\n\n", " x"]),
    "dbrx": ("WE'LL(pay) 12345\n\n x", ["WE", "'LL", "(pay", ")", " ", "123", "45", "\n\n", " x"]),
    "qwen2": ("WE'LL(pay) 12\n\n x", ["WE", "'LL", "(pay", ")", " ", "1", "2", "\n\n", " x"]),
    "tekken": ("helloWORLDs It's 12/\n", ["hello", "WORLDs", " It", "'s", " ", "1", "2", "/\n"]),
    "gpt-4o": ("helloWORLDs It's 1234/\n", ["hello", "WORLDs", " It's", " ", "123", "4", "/\n"]),
}


@pytest.mark.parametrize("name", PIECES)
def test_text_is_split_as_the_original_does(name):
    text, pieces = PIECES[name]
    found = get_pre_tokenization(name).pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces


def test_every_split_keeps_every_byte():
    for split in PRE_TOKENIZATIONS.values():
        for text in TEXTS:
            found = split.pre_tokenizer().pre_tokenize_str(text)
            assert "".join(text[start:end] for _, (start, end) in found) == text


def test_composed_characters_of_qwen():
    values = values_of(demo()) | {"pre": "qwen2"}
    assert ids(build(values), "e\u0301") == ids(build(values), "é") == ids(demo(), "é")
    assert ids(build(values | {"pre": "gpt-2"}), "e\u0301") == ids(demo(), "e\u0301")


def test_pieces_that_are_tokens_need_no_merges_in_llama_3():
    values = WORDS | {"tokenizer.ggml.merges": []}
    whole = WORDS["tokenizer.ggml.tokens"].index("ab")
    assert ids(build(values | {"tokenizer.ggml.pre": "llama-bpe"}), "ab") == [whole]
    assert whole not in ids(build(values), "ab")
    assert ids(build(WORDS), "ab") == [whole]


@pytest.mark.parametrize("pre", [None, "", "default"])
def test_files_without_a_split_warn(pre):
    values = values_of(demo()) | {"pre": pre}
    values = {key: value for key, value in values.items() if value is not None}
    with pytest.warns(UserWarning, match="does not name its pre-tokenizer"):
        assert ids(build(values), TEXTS[-1]) == ids(demo(), TEXTS[-1])


# --- SentencePiece ---------------------------------------------------------------------------------------

LETTERS = "▁abcde"


def pieces(seed: int = 0) -> dict[str, Any]:
    """Return a vocabulary of bytes, letters, and random words whose scores all differ."""
    rng = np.random.Generator(np.random.PCG64(seed))
    words = {"".join(rng.choice(list(LETTERS), rng.integers(2, 6))) for _ in range(400)}
    normal = [*LETTERS, *sorted(words)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *normal]
    scores = [0.0] * 259 + [-1e6] * len(LETTERS) + [-float(x) for x in rng.permutation(len(words))]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(normal),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def merged(text: str, values: dict[str, Any]) -> list[int]:
    """Tokenize by the definition of SentencePiece's BPE: repeatedly merge the pair with the highest score."""
    first = values["tokens"].index("▁")
    score = dict(zip(values["tokens"][first:], values["scores"][first:], strict=True))
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [score.get(a + b, -math.inf) for a, b in pairwise(symbols)]
        if not pairs or max(pairs) == -math.inf:
            break
        at = pairs.index(max(pairs))
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found = []
    for symbol in symbols:
        known = symbol in values["tokens"]
        names = [symbol] if known else [f"<0x{byte:02X}>" for byte in symbol.encode()]
        found += [values["tokens"].index(name) for name in names]
    return found


def test_pieces_merge_as_sentencepiece_defines():
    values = pieces()
    tokenizer, rng = build(values), np.random.Generator(np.random.PCG64(1))
    for length in (1, 2, 5, 10, 30, 60):
        for _ in range(30):
            text = "".join(rng.choice(list(" abcdeéz🦙"), length))
            assert ids(tokenizer, text) == merged(text, values)
            assert tokenizer.decode(ids(tokenizer, text)) == text


def test_a_space_comes_first_unless_the_file_says_no():
    values = pieces()
    with_space, without = build(values), build(values | {"add_space_prefix": False})
    assert with_space.encode("z", add_special_tokens=False).tokens == ["▁", "<0x7A>"]
    assert without.encode("z", add_special_tokens=False).tokens == ["<0x7A>"]
    assert without.decode(ids(without, " z")) == " z"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_ends_of_a_text(kind):
    values = values_of(demo()) if kind == "gpt2" else pieces()
    default = [1] if kind == "llama" else []
    inside = ids(build(values), "a")
    assert ids(build(values), "a", ends=True) == [*default, *inside]
    for bos in (False, True):
        for eos in (False, True):
            tokenizer = build(values | {"add_bos_token": bos, "add_eos_token": eos})
            assert ids(tokenizer, "a", ends=True) == [1] * bos + inside + [2] * eos
    assert ids(build(values | {"pre": "llama-bpe"}), "a", ends=True) == [1, *inside]


def test_added_tokens_are_found_first_and_special_ones_are_not_shown():
    values = pieces()
    values["tokens"] = [*values["tokens"], "<tool>", "  ", "<end>"]
    values["scores"] = [*values["scores"], *[-1000.0] * 3]
    values["token_type"] = [*values["token_type"], USER, USER, CONTROL]
    tokenizer = build(values | {"add_space_prefix": False})
    tool, spaces, end = range(len(values["tokens"]) - 3, len(values["tokens"]))
    a = values["tokens"].index("a")
    assert ids(tokenizer, "<tool>a  a<end><unk>") == [tool, a, spaces, a, end, 0]
    assert tokenizer.decode([tool, a, spaces, a, end]) == "<tool>a  a"
    assert tokenizer.decode([tool, a, end], skip_special_tokens=False) == "<tool>a<end>"


def test_special_tokens_of_phi_3_take_spaces_along():
    values = pieces()
    phi, other = build(values, "phi3"), build(values)
    assert ids(phi, "</s>  a") == [2, *ids(other, "a")]
    assert ids(phi, "<s>  a") == ids(other, "<s>  a") == [1, *ids(other, "  a")]


# --- Other metadata --------------------------------------------------------------------------------------


def test_names_of_special_tokens():
    values = WORDS | {"tokenizer.ggml.padding_token_id": 2}
    assert make_tokenizer_config(file_with(values)) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "</s>",
        "chat_template": "{{ messages }}",
    }
    del values["tokenizer.chat_template"], values["tokenizer.ggml.bos_token_id"]
    assert "bos_token" not in make_tokenizer_config(file_with(values))


TOO_FEW = pieces()["scores"][:-1]
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "model": (
        {"model": "bert"},
        r"tokenizer.ggml.model='bert' is not supported; supported are \['gpt2', 'llama'",
    ),
    "no model": ({"model": None}, "tokenizer.ggml.model=None is not supported"),
    "split": (
        {"model": "gpt2", "pre": "viking"},
        "tokenizer.ggml.pre='viking' is not supported; supported are",
    ),
    "split of no name": ({"model": "gpt2", "pre": 3}, "tokenizer.ggml.pre=3 is not supported"),
    "no tokens": ({"tokens": []}, "a.gguf has no tokenizer: tokenizer.ggml.tokens is missing"),
    "a number for tokens": ({"tokens": 2.5}, "tokenizer.ggml.tokens must be a list of str"),
    "numbers as tokens": ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of str"),
    "a token twice": (
        {"tokens": ["a", "b", "a"], "token_type": [1] * 3},
        "tokenizer.ggml.tokens: 'a' occurs twice",
    ),
    "types": ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 elements, it must have"),
    "types of no number": ({"token_type": "1"}, "tokenizer.ggml.token_type must be a list of int"),
    "scores": ({"scores": TOO_FEW}, r"tokenizer.ggml.scores has \d+ elements, it must have"),
    "no scores": ({"scores": None}, "tokenizer.ggml.scores must be a list of float"),
    "scores of no number": ({"scores": [math.nan, *TOO_FEW]}, "tokenizer.ggml.scores has NaN or Inf"),
    "no merges": ({"model": "gpt2", "pre": "gpt-2"}, "tokenizer.ggml.merges must be a list of str"),
    "a merge of one": (
        {"model": "gpt2", "pre": "gpt-2", "merges": ["a"]},
        "'a' must be two tokens with a space",
    ),
    "a merge of others": (
        {"model": "gpt2", "pre": "gpt-2", "merges": ["x y"]},
        "cannot build the tokenizer of a.gguf: .*out of vocabulary",
    ),
    "id": ({"bos_token_id": 9999}, "tokenizer.ggml.bos_token_id=9999 must be an id below"),
    "id of no number": (
        {"eos_token_id": "2", "add_eos_token": True},
        "tokenizer.ggml.eos_token_id='2' must be an id",
    ),
    "no id": (
        {"bos_token_id": None},
        "tokenizer.ggml.bos_token_id is missing, but add_bos_token requires it",
    ),
    "flag": ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token=1 must be true or false"),
    "spaces": ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces=True is not supported"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_tokenizers_are_refused(name):
    changes, message = DAMAGED[name]
    values = {key: value for key, value in (pieces() | changes).items() if value is not None}
    with pytest.raises(ConversionError, match=message):
        build(values)


def test_templates_are_texts():
    with pytest.raises(ConversionError, match=r"tokenizer.chat_template=3 must be a text"):
        make_tokenizer_config(file_with(WORDS | {"tokenizer.chat_template": 3}))
