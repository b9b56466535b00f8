"""Construction of a tokenizer of the `tokenizers` library from the metadata of a GGUF file."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from convert.gguf.pretokenizers import get_pre_tokenization
from convert.gguf.reader import GGUF
from zdc_jax.errors import ConversionError, foreign_errors_as

SPACE = "▁"
"""Spelling of a space in tokens of SentencePiece."""
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Names of special tokens in tokenizer_config.json, and in GGUF."""
PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 that leave a following space alone. All others absorb it, which no value says."""


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary of a GGUF file.

    Attributes:
      tokens: tokens in the order of their ids.
      types: type of each token, a `gguf.TokenType`.
      values: all values `tokenizer.ggml.*` by name.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    values: Mapping[str, Any]

    @classmethod
    def read(cls, file: GGUF) -> "Vocabulary":
        """Read the vocabulary of a file.

        Raises:
          ConversionError: there are no tokens, a token occurs twice, or lists have another length.
        """
        prefix = "tokenizer.ggml."
        values = {
            key.removeprefix(prefix): file.metadata[key] for key in file.metadata if key.startswith(prefix)
        }
        if not values.get("tokens"):
            raise ConversionError(f"{file.path} has no tokenizer: tokenizer.ggml.tokens is missing")
        tokens = _get_list(values, "tokens", str)
        untyped = {"token_type": [int(TokenType.NORMAL)] * len(tokens)}
        types = _get_list(untyped | values, "token_type", int, len(tokens))
        if len(tokens) != len(set(tokens)):
            duplicate, _ = Counter(tokens).most_common(1)[0]
            raise ConversionError(f"tokenizer.ggml.tokens: {duplicate!r:.80} occurs twice")
        return cls(tokens, types, values)

    def get_special(self, name: str) -> str | None:
        """Return a special token, or None where the file has none.

        Raises:
          ConversionError: the id is outside the vocabulary.
        """
        index = self.values.get(f"{name}_token_id")
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(self.tokens):
            raise ConversionError(
                f"tokenizer.ggml.{name}_token_id={index!r:.80} must be an id below {len(self.tokens)}"
            )
        return self.tokens[index]

    def parse_flag(self, name: str, default: bool) -> bool:
        """Return a boolean value; raise `ConversionError` for another type."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ConversionError(f"tokenizer.ggml.{name}={value!r:.80} must be true or false")
        return value

    def map_ids(self) -> dict[str, int]:
        """Return the id of each token."""
        return {token: index for index, token in enumerate(self.tokens)}


def _get_list(values: Mapping[str, Any], name: str, kind: type, count: int | None = None) -> list[Any]:
    """Return a value that must be a list of `count` elements of one type.

    Raises:
      ConversionError: the value is not such a list.
    """
    value = values.get(name)
    if not isinstance(value, list) or not all(type(each) is kind for each in value):
        raise ConversionError(f"tokenizer.ggml.{name} must be a list of {kind.__name__}")
    if count is not None and len(value) != count:
        raise ConversionError(f"tokenizer.ggml.{name} has {len(value)} elements, it must have {count}")
    return value


def build_tokenizer(file: GGUF) -> Tokenizer:
    """Build the tokenizer of a file, with special tokens and the tokens that begin and end a text.

    Raises:
      ConversionError: the tokenizer is missing, damaged or of a kind that is not supported.
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
        tokenizer.add_special_tokens(_list_added_tokens(vocabulary, TokenType.CONTROL, strips=strips))
        tokenizer.add_tokens(_list_added_tokens(vocabulary, TokenType.USER_DEFINED, strips=strips))
        _add_special_ends(tokenizer, vocabulary, adds_bos)
    return tokenizer


def _list_added_tokens(vocabulary: Vocabulary, kind: TokenType, *, strips: bool) -> list[AddedToken]:
    """Return the tokens of a type as added tokens, which match before the text is split.

    Args:
      vocabulary: the vocabulary.
      kind: type of the tokens. Control tokens are special: decoding leaves them out.
      strips: whether tokens absorb a following space, but for `PHI3_KEEPS_SPACE`.
    """
    special, pairs = kind is TokenType.CONTROL, zip(vocabulary.tokens, vocabulary.types, strict=True)
    tokens = [token for token, other in pairs if other == kind]
    unknown = vocabulary.get_special("unknown")
    if special and unknown is not None and unknown not in tokens:
        tokens.append(unknown)
    return [
        AddedToken(token, special=special, normalized=False, rstrip=strips and token not in PHI3_KEEPS_SPACE)
        for token in tokens
        if token
    ]


def _build_byte_level(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Build a tokenizer like GPT-2's, of bytes spelled as letters, and return whether it adds BOS."""
    split = get_pre_tokenization(vocabulary.values.get("pre", ""))
    pairs = [_split_merge(merge) for merge in _get_list(vocabulary.values, "merges", str)]
    tokenizer = Tokenizer(models.BPE(vocabulary.map_ids(), pairs, ignore_merges=split.keeps_tokens))
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, split.adds_bos


def _split_merge(merge: str) -> tuple[str, str]:
    """Split a merge into its two tokens, the first of which may begin with a space."""
    space = merge.find(" ", 1)
    if space < 0:
        raise ConversionError(f"tokenizer.ggml.merges: {merge!r:.80} must be two tokens with a space between")
    return merge[:space], merge[space + 1 :]


def _build_sentencepiece(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Build a tokenizer like Llama 2's, and return whether it adds BOS.

    The pair whose merged token has the highest score merges first. Unknown characters become bytes.
    """
    if vocabulary.parse_flag("remove_extra_whitespaces", False):
        raise ConversionError("tokenizer.ggml.remove_extra_whitespaces=True is not supported; only False is")
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.map_ids(),
            _list_merges(vocabulary),
            unk_token=vocabulary.get_special("unknown"),
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


def _list_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens that join to a token, by falling score and then by rising id."""
    scores = _get_list(vocabulary.values, "scores", float, len(vocabulary.tokens))
    if not all(math.isfinite(score) for score in scores):
        raise ConversionError("tokenizer.ggml.scores has NaN or Inf")
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == TokenType.NORMAL
    }
    merges = []
    for token in sorted(ids, key=lambda token: (-scores[ids[token]], ids[token])):
        halves = ((token[:split], token[split:]) for split in range(len(token) - 1, 0, -1))
        merges += [(left, right) for left, right in halves if left in ids and right in ids]
    return merges


KINDS = {"gpt2": _build_byte_level, "llama": _build_sentencepiece}
"""Builders by `tokenizer.ggml.model`; each returns a tokenizer, and whether it adds BOS by default."""


def _add_special_ends(tokenizer: Tokenizer, vocabulary: Vocabulary, adds_bos: bool) -> None:
    """Make the tokenizer add BOS and EOS to texts where the file asks for them."""
    added = dict[str, str]()
    for name, default in (("bos", adds_bos), ("eos", False)):
        if vocabulary.parse_flag(f"add_{name}_token", default):
            if (token := vocabulary.get_special(name)) is None:
                raise ConversionError(
                    f"tokenizer.ggml.{name}_token_id is missing, but add_{name}_token requires it"
                )
            added[name] = token
    if added:
        template = [*(["bos"] if "bos" in added else []), "$A", *(["eos"] if "eos" in added else [])]
        ids = vocabulary.map_ids()
        tokens = [{"id": name, "ids": [ids[token]], "tokens": [token]} for name, token in added.items()]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)


def make_tokenizer_config(file: GGUF) -> dict[str, Any]:
    """Return the tokenizer_config.json of the same model: special tokens and the chat template.

    Raises:
      ConversionError: the vocabulary is damaged, or the chat template is not a text.
    """
    vocabulary = Vocabulary.read(file)
    special = {f"{name}_token": vocabulary.get_special(theirs) for name, theirs in SPECIAL.items()}
    config: dict[str, Any] = {name: token for name, token in special.items() if token is not None}
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ConversionError(f"tokenizer.chat_template={template!r:.80} must be a text")
        config["chat_template"] = template
    return config
