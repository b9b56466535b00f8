"""Validated requests of `generate` and `stream`, and the checks of their arguments."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.generation.chunks import PREFILL_CHUNK, bucket, find_block
from zdc_jax.generation.guide import check_sampling
from zdc_jax.generation.packed_parameters import MAX_STOP_TOKENS
from zdc_jax.generation.sampling import Sampling, is_whole
from zdc_jax.generation.shaping import check_in_vocabulary
from zdc_jax.loading import LanguageModel, TextModel

Prompt = str | Sequence[int]
"""Text or token ids."""

SMALLEST_CAPACITY = 128


@dataclass(frozen=True)
class Request:
    """Validated arguments of one call for B prompts.

    Attributes:
      prompts: token ids of each prompt, [T] int32.
      samplings: sampling parameters of each prompt.
      max_new_tokens: most tokens to generate for each prompt.
      stop_ids: token ids that end a sequence.
      stop: strings that end a sequence.
      prefill_chunk: most prompt tokens of one prefill call; None to choose by free memory.
      capacity: tokens of cache for each sequence.
      new_text: whether each completion is a text of its own, rather than a continuation of its prompt.
    """

    prompts: tuple[np.ndarray, ...]
    samplings: tuple[Sampling, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]
    prefill_chunk: int | None
    capacity: int
    new_text: bool = False

    @classmethod
    def from_arguments(
        cls,
        model: LanguageModel,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling] | None,
        stop_tokens: Sequence[int] | int | None,
        stop: Sequence[str] | str,
        prefill_chunk: int | None,
        *,
        new_text: bool = False,
    ) -> "Request":
        """Check the arguments of `generate` and build a request.

        Raises the `PromptError` of `generate`. The warning about long contexts points at the caller's caller.
        """
        if not isinstance(model, LanguageModel):
            raise PromptError(f"model={model!r:.80} must be a model; pass zdc_jax.load(FOLDER)")
        check_limit(max_new_tokens)
        check_chunk(model, PREFILL_CHUNK if prefill_chunk is None else prefill_chunk)
        strings = stop_strings(model, stop)
        encoded = tuple(encode(model, prompt, max_new_tokens) for prompt in _list_prompts(prompts))
        samplings = _match_samplings(sampling, len(encoded))
        for each in set(samplings):
            check_sampling(model, each)
        stop_ids = _resolve_stop_tokens(model, stop_tokens, strings)
        longest = max(len(prompt) for prompt in encoded) + int(max_new_tokens)
        warn_beyond_calibration(model, longest, stacklevel=4)
        capacity = capacity_for(longest, model.config.max_positions)
        return cls(
            encoded, samplings, int(max_new_tokens), stop_ids, strings, prefill_chunk, capacity, new_text
        )


def capacity_for(tokens: int, max_positions: int) -> int:
    """Return the cache capacity for `tokens` tokens, rounded up so that shapes repeat.

    Capacities are powers of two up to 2048, then multiples of 2048, and at most `max_positions`.
    """
    rounded = bucket(tokens, SMALLEST_CAPACITY) if tokens <= 2048 else -(-tokens // 2048) * 2048
    return max(tokens, min(rounded, max_positions))


def check_limit(max_new_tokens: int, name: str = "max_new_tokens") -> None:
    """Raise `PromptError` unless the token limit is a whole number >= 1; `name` is the argument's name."""
    if not is_whole(max_new_tokens) or max_new_tokens < 1:
        raise PromptError(f"{name}={max_new_tokens!r} must be a whole number >= 1")


def warn_beyond_calibration(model: LanguageModel, tokens: int, stacklevel: int) -> None:
    """Warn if sequences of `tokens` tokens exceed the contexts that the model's basis was calibrated on."""
    if model.basis is not None and tokens > model.basis.context_length:
        warnings.warn(
            f"sequences may have {tokens} tokens, but the basis was calibrated on contexts of "
            f"{model.basis.context_length}: coordinates that the plan drops may matter beyond that; "
            "calibrate on longer contexts",
            stacklevel=stacklevel,
        )


def check_chunk(model: LanguageModel, prefill_chunk: int, name: str = "prefill_chunk") -> None:
    """Raise `PromptError` unless prompts can be prefilled in chunks of this size under the model's plan.

    The argument's name in the message is `name`.
    """
    if not is_whole(prefill_chunk) or prefill_chunk != bucket(prefill_chunk):
        raise PromptError(f"{name}={prefill_chunk!r} must be a power of two >= 32")
    if prefill_chunk % (block := find_block(model)):
        raise PromptError(f"{name}={prefill_chunk!r} must be a multiple of the plan's blocks of {block}")


def stop_strings(model: TextModel, stop: Sequence[str] | str) -> tuple[str, ...]:
    """Return the strings that end a sequence.

    Raises:
      PromptError: an entry is not a string or is empty, or the model has no tokenizer to find strings with.
    """
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Iterable) or not all(isinstance(text, str) for text in strings):
        raise PromptError(f"{stop=} must be a string or a list of strings")
    if not all(strings):
        raise PromptError(f"stop={list(strings)} must not contain an empty string")
    if strings and model.tokenizer is None:
        raise PromptError(f"stop={list(strings)} needs a model with a tokenizer; use stop token ids instead")
    return tuple(strings)


def _match_samplings(sampling: Sampling | Sequence[Sampling] | None, count: int) -> tuple[Sampling, ...]:
    """Return one `Sampling` for each of `count` prompts."""
    if sampling is None or isinstance(sampling, Sampling):
        return (sampling or Sampling(),) * count
    if not isinstance(sampling, Sequence) or not all(isinstance(each, Sampling) for each in sampling):
        raise PromptError(f"{sampling=} must be a Sampling, or a list with one for each prompt")
    if len(sampling) != count:
        raise PromptError(
            f"sampling has {len(sampling)} entries for {count} prompts; "
            "pass one Sampling, or a list with one for each prompt"
        )
    return tuple(sampling)


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise PromptError(f"{prompts=} must be a text, a list of token ids, or a list of either")
    items = list(prompts)
    if not items:
        raise PromptError("prompts=[] must contain at least one prompt")
    return [items] if is_whole(items[0]) else items


def tokenized(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text.

    Special tokens with which the text itself begins, as after a chat template, are not added again.

    Args:
      tokenizer: tokenizer of the model.
      text: text to encode; names of special tokens in it become those tokens.
      add_special_tokens: add the tokens that begin and end a text for this tokenizer, such as BOS.

    Raises:
      PromptError: the tokenizer cannot encode the text.
    """
    with foreign_errors_as(PromptError, f"the tokenizer cannot encode {text!r:.80}"):
        # `encode` holds Python's lock, so that no other thread runs while it reads a long text.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids = encoding.ids
    added = [*encoding.special_tokens_mask, 0].index(0)  # Tokens of the text have 0 there, special or not.
    return ids[added:] if ids[:added] == ids[added : 2 * added] else ids


def encode(model: TextModel, prompt: Prompt, max_new_tokens: int) -> np.ndarray:
    """Return the token ids of a prompt that leaves room for `max_new_tokens`, [T] int32.

    Raises:
      PromptError: an error of `token_ids`, or prompt and new tokens exceed the model's positions.
    """
    ids, limit = token_ids(model, prompt), model.config.max_positions
    if len(ids) + max_new_tokens > limit:
        raise PromptError(
            f"{len(ids)} prompt tokens and {max_new_tokens=} exceed the model's {limit} positions; "
            "shorten the prompt or generate fewer tokens"
        )
    return ids


def token_ids(model: TextModel, prompt: Prompt, *, add_special_tokens: bool = True) -> np.ndarray:
    """Return the token ids of a prompt of any length but 0, [T] int32.

    Args:
      model: model that reads the prompt.
      prompt: text or token ids.
      add_special_tokens: add the special tokens that begin and end a text, such as BOS.

    Raises:
      PromptError: the prompt is empty, malformed, cannot be encoded, or has ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise PromptError(f"prompt={prompt!r:.80}: this model has no tokenizer; pass token ids instead")
        ids = np.array(tokenized(model.tokenizer, prompt, add_special_tokens=add_special_tokens), np.int64)
    else:
        ids = _to_array(prompt)
    if ids.size == 0:
        raise PromptError(f"prompt={prompt!r} is empty; it must have at least one token")
    vocab = model.config.vocab_size
    if ids.min() < 0 or ids.max() >= vocab:
        bad = ids[(ids < 0) | (ids >= vocab)][0]
        raise PromptError(f"token id {bad} lies outside the vocabulary 0…{vocab - 1}")
    return ids.astype(np.int32)


def _to_array(prompt: Sequence[int]) -> np.ndarray:
    try:
        ids = np.array(prompt)
    except ValueError:  # Nested lists of unequal lengths.
        ids = np.array([[]])
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise PromptError(f"prompt={prompt!r:.80} must be a text or a flat list of integers")
    return ids


def stop_token_ids(model: TextModel, stop_tokens: Sequence[int] | int) -> tuple[int, ...]:
    """Return the token ids that end a sequence.

    Raises:
      PromptError: an entry is not an integer or lies outside the vocabulary.
    """
    ids: Any = [stop_tokens] if is_whole(stop_tokens) else stop_tokens
    if not isinstance(ids, Iterable) or not all(is_whole(token) for token in ids):
        raise PromptError(f"{stop_tokens=} must be a token id or a list of token ids")
    check_in_vocabulary(f"{stop_tokens=}", ids, model)
    return tuple(int(token) for token in ids)


def find_special_tokens(model: TextModel, strings: Sequence[str]) -> list[int]:
    """Return the ids of strings that are special tokens: no text has them, so they stop as tokens."""
    if model.tokenizer is None or not strings:
        return []
    ids = list_special_tokens(model.tokenizer)
    return [ids[string] for string in strings if string in ids]


def list_special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the id of each special token by its text."""
    added = tokenizer.get_added_tokens_decoder()
    return {each.content: token for token, each in added.items() if each.special}


def _resolve_stop_tokens(
    model: LanguageModel, stop_tokens: Sequence[int] | int | None, strings: Sequence[str]
) -> tuple[int, ...]:
    """Return the given stop tokens, or the model's end-of-sequence ids, and strings that are tokens."""
    stop_ids = model.config.eos_ids if stop_tokens is None else stop_token_ids(model, stop_tokens)
    stop_ids = tuple(dict.fromkeys((*stop_ids, *find_special_tokens(model, strings))))
    if len(stop_ids) > MAX_STOP_TOKENS:
        raise PromptError(f"stop_tokens has {len(stop_ids)} ids; at most {MAX_STOP_TOKENS} are allowed")
    return stop_ids
