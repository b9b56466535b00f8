"""Tokens that end an answer, by the metadata of a GGUF file and by their names, as in llama.cpp."""

from typing import Any

from gguf import TokenType

from convert.gguf.reader import GGUF
from zdc_jax.errors import ConversionError

SINGLE = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Names of single end tokens: of a text, a turn, a message, and of files in fill-in-the-middle."""
LISTS = ("eos", "eot", "eom")
"""Names of end tokens that a file may list, as `tokenizer.ggml.eos_token_ids`."""
NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
    "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|return|>", "<|call|>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip
"""Control tokens that end an answer although many files do not say so.

They are those of llama.cpp's `special_eog_ids`. Normal tokens with such a name are text.
"""


def list_end_tokens(file: GGUF) -> list[int]:
    """Return the ids of the tokens that end an answer; those that the metadata name come first.

    Raises:
      ConversionError: an id is not a token of the vocabulary, or a list is no list.
    """
    named = [token for name in SINGLE if (token := get_token_id(file, name)) is not None]
    listed = [token for name in LISTS for token in _get_token_ids(file, name)]
    return list(dict.fromkeys([*named, *listed, *_find_by_name(file)]))


def get_token_id(file: GGUF, name: str) -> int | None:
    """Return the id of a special token, or None where the metadata have none; raise as `list_end_tokens`."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.metadata.get(key)
    return None if value is None else _check_id(file, key, value)


def _get_token_ids(file: GGUF, name: str) -> list[int]:
    key = f"tokenizer.ggml.{name}_token_ids"
    values = file.metadata.get(key, [])
    if not isinstance(values, list):
        raise ConversionError(f"{key}={values!r:.80} must be a list of ids")
    return [_check_id(file, key, value) for value in values]


def _check_id(file: GGUF, key: str, value: Any) -> int:
    size = file.tensors["token_embd.weight"].shape[0]
    if type(value) is not int or not 0 <= value < size:
        raise ConversionError(f"{key}={value!r:.80} must be an id below {size}")
    return value


def _find_by_name(file: GGUF) -> list[int]:
    """Return the ids of control and user-defined tokens in `NAMES`."""
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(types, list):
        return []  # Reading the tokenizer reports what is wrong with them.
    kinds = (int(TokenType.CONTROL), int(TokenType.USER_DEFINED))
    size = file.tensors["token_embd.weight"].shape[0]
    pairs = zip(tokens[:size], types, strict=False)
    return [token for token, (name, kind) in enumerate(pairs) if kind in kinds and name in NAMES]
