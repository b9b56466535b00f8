"""Metadata of a GGUF file → its tokenizer, in the form of the `tokenizers` library."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from convert.gguf.pretokenizers import pre_tokenization
from convert.gguf.reader import GGUF
from zdc_jax.errors import ConversionError, foreign_errors_as

SPACE = "▁"
"""How pieces of SentencePiece write one."""
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens of tokenizer_config.json, and their names in files."""
PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's other special tokens take the space behind them along, which no value of a file says."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in the order of their ids, the type of each, and all values `tokenizer.ggml.*` by name.

    Raises:
      ConversionError: no tokens, a token twice, or lists that do not fit them.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    values: Mapping[str, Any]

    @classmethod
    def read(cls, file: GGUF) -> "Vocabulary":
        """That of a file."""
        start = "tokenizer.ggml."
        values = {
            key.removeprefix(start): file.metadata[key] for key in file.metadata if key.startswith(start)
        }
        if not values.get("tokens"):
            raise ConversionError(f"{file.path} has no tokenizer: it lacks tokenizer.ggml.tokens")
        tokens = _listed(values, "tokens", str)
        untyped = {"token_type": [int(TokenType.NORMAL)] * len(tokens)}
        types = _listed(untyped | values, "token_type", int, len(tokens))
        if len(tokens) != len(set(tokens)):
            twice, _ = Counter(tokens).most_common(1)[0]
            raise ConversionError(f"tokenizer.ggml.tokens: {twice!r:.80} occurs twice")
        return cls(tokens, types, values)

    def special(self, name: str) -> tuple[str, int] | None:
        """A special token and its id; None where the file names none. Raises for an id that is no token's."""
        index = self.values.get(f"{name}_token_id")
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(self.tokens):
            raise ConversionError(
                f"tokenizer.ggml.{name}_token_id={index!r:.80} must be an id below {len(self.tokens)}"
            )
        return self.tokens[index], index

    def parse_flag(self, name: str, default: bool) -> bool:
        """A boolean value; raises `ConversionError` for another type."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ConversionError(f"tokenizer.ggml.{name}={value!r:.80} must be true or false")
        return value

    def ids(self) -> dict[str, int]:
        """Token → id."""
        return {token: index for index, token in enumerate(self.tokens)}

    def of_type(self, kind: TokenType) -> list[str]:
        """The tokens of a type."""
        return [token for token, other in zip(self.tokens, self.types, strict=True) if other == kind]


def _listed(values: Mapping[str, Any], name: str, kind: type, count: int | None = None) -> list[Any]:
    """A value that is a list of such elements, of so many; raises `ConversionError` for another."""
    value = values.get(name)
    if not isinstance(value, list) or not all(type(each) is kind for each in value):
        raise ConversionError(f"tokenizer.ggml.{name} must be a list of {kind.__name__}")
    if count is not None and len(value) != count:
        raise ConversionError(f"tokenizer.ggml.{name} has {len(value)} elements, it must have {count}")
    return value


def build_tokenizer(file: GGUF) -> Tokenizer:
    """The tokenizer of a file, with its special tokens, and with those that begin and end a text.

    Raises:
      ConversionError: none, a damaged one, or a kind that is not supported.
    """
    vocabulary = Vocabulary.read(file)
    kind = vocabulary.values.get("model")
    if kind not in KINDS:
        raise ConversionError(
            f"{file.path}: tokenizer.ggml.model={kind!r:.80} is not supported; supported are {sorted(KINDS)}"
        )
    with foreign_errors_as(ConversionError, f"cannot build the tokenizer of {file.path}"):
        tokenizer, adds_bos = KINDS[kind](vocabulary)
        strips = kind == "llama" and file.metadata.get("general.architecture") == "phi3"
        tokenizer.add_special_tokens(_added(vocabulary, TokenType.CONTROL, strips=strips))
        tokenizer.add_tokens(_added(vocabulary, TokenType.USER_DEFINED, strips=strips))
        _add_ends(tokenizer, vocabulary, adds_bos)
    return tokenizer


def _added(vocabulary: Vocabulary, kind: TokenType, *, strips: bool) -> list[AddedToken]:
    """Tokens of a type, found in text before anything else; special ones are left out of what is shown."""
    special, tokens = kind is TokenType.CONTROL, vocabulary.of_type(kind)
    unknown = vocabulary.special("unknown")
    if special and unknown is not None and unknown[0] not in tokens:
        tokens.append(unknown[0])
    return [
        AddedToken(token, special=special, normalized=False, rstrip=strips and token not in PHI3_KEEPS_SPACE)
        for token in tokens
        if token
    ]


def _byte_level(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """GPT-2's kind: bytes, written as letters, and merges."""
    split = pre_tokenization(vocabulary.values.get("pre", ""))
    pairs = [_pair(merge) for merge in _listed(vocabulary.values, "merges", str)]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids(), pairs, ignore_merges=split.whole_pieces))
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if (normalizer := split.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    return tokenizer, split.adds_bos


def _pair(merge: str) -> tuple[str, str]:
    """Both sides of a merge; the first may begin with a space of its own."""
    at = merge.find(" ", 1)
    if at < 0:
        raise ConversionError(f"tokenizer.ggml.merges: {merge!r:.80} must be two tokens and a space between")
    return merge[:at], merge[at + 1 :]


def _sentencepiece(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Llama 2's kind: the pair that makes the token of the highest score merges first; the rest is bytes."""
    if vocabulary.parse_flag("remove_extra_whitespaces", False):
        raise ConversionError("tokenizer.ggml.remove_extra_whitespaces=True is not supported; only False is")
    unknown = vocabulary.special("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids(),
            _merges(vocabulary),
            unk_token=unknown and unknown[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.parse_flag("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that make another, the highest score first, and the first id among equals."""
    scores = _listed(vocabulary.values, "scores", float, len(vocabulary.tokens))
    if not all(math.isfinite(score) for score in scores):
        raise ConversionError("tokenizer.ggml.scores hold NaN or Inf")
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == TokenType.NORMAL
    }
    merges = []
    for token in sorted(ids, key=lambda token: (-scores[ids[token]], ids[token])):
        halves = ((token[:at], token[at:]) for at in range(len(token) - 1, 0, -1))
        merges += [(left, right) for left, right in halves if left in ids and right in ids]
    return merges


KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
"""By `tokenizer.ggml.model`: the tokenizer, and whether texts begin with a token where files do not say."""


def _add_ends(tokenizer: Tokenizer, vocabulary: Vocabulary, adds_bos: bool) -> None:
    """Tokens before and after each text."""
    ends = {"bos": adds_bos, "eos": False}
    found = {
        name: vocabulary.special(name)
        for name, default in ends.items()
        if vocabulary.parse_flag(f"add_{name}_token", default)
    }
    if absent := [name for name, token in found.items() if token is None]:
        raise ConversionError(f"tokenizer.ggml.{absent[0]}_token_id is absent, but texts get that token")
    if found:
        template = [*(["bos"] if "bos" in found else []), "$A", *(["eos"] if "eos" in found else [])]
        tokens = [
            {"id": name, "ids": [index], "tokens": [token]}
            for name, (token, index) in ((name, pair) for name, pair in found.items() if pair is not None)
        ]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)


def tokenizer_config(file: GGUF) -> dict[str, Any]:
    """What tokenizer_config.json of the same model would say: special tokens, and the template of chats.

    Raises:
      ConversionError: as `build_tokenizer`; a template that is no text.
    """
    vocabulary = Vocabulary.read(file)
    special = {f"{name}_token": vocabulary.special(theirs) for name, theirs in SPECIAL.items()}
    config: dict[str, Any] = {name: pair[0] for name, pair in special.items() if pair is not None}
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ConversionError(f"tokenizer.chat_template={template!r:.80} must be a text")
        config["chat_template"] = template
    return config
