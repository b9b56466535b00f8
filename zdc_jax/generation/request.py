"""What is asked of `generate` or `stream`, checked before any work."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.generation.row_numbers import MAX_STOP_TOKENS
from zdc_jax.generation.sampling import Sampling, is_whole
from zdc_jax.generation.steps import bucket
from zdc_jax.loading import LanguageModel, TextModel

Prompt = str | Sequence[int]

SMALLEST_CAPACITY = 128


@dataclass(frozen=True)
class Request:
    """One call: for B prompts, token ids [T] int32 and a sampling each, and what all have in common.

    capacity: tokens that each row of the cache has room for.
    """

    prompts: tuple[np.ndarray, ...]
    samplings: tuple[Sampling, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]
    prefill_chunk: int
    capacity: int

    @classmethod
    def checked(
        cls,
        model: LanguageModel,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling] | None,
        stop_tokens: Sequence[int] | int | None,
        stop: Sequence[str] | str,
        prefill_chunk: int,
    ) -> "Request":
        """The arguments of `generate`; raises its `PromptError`, and warns the caller of its caller."""
        check_limit(max_new_tokens)
        check_chunk(model, prefill_chunk)
        strings = stop_strings(model, stop)
        encoded = tuple(encode(model, prompt, max_new_tokens) for prompt in _as_list(prompts))
        samplings = _samplings(sampling, len(encoded))
        stop_ids = _stop_ids(model, stop_tokens)
        longest = max(len(prompt) for prompt in encoded) + int(max_new_tokens)
        warn_beyond_calibration(model, longest, stacklevel=4)
        capacity = capacity_for(longest, model.config.max_positions)
        return cls(encoded, samplings, int(max_new_tokens), stop_ids, strings, prefill_chunk, capacity)


def capacity_for(tokens: int, max_positions: int) -> int:
    """Cache capacity for so many tokens: powers of two to 2048, then multiples of 2048, so shapes repeat."""
    rounded = bucket(tokens, SMALLEST_CAPACITY) if tokens <= 2048 else -(-tokens // 2048) * 2048
    return max(tokens, min(rounded, max_positions))


def check_limit(max_new_tokens: int) -> None:
    """Raises `PromptError` for what is no number of tokens to generate."""
    if not is_whole(max_new_tokens) or max_new_tokens < 1:
        raise PromptError(f"{max_new_tokens=} must be a whole number >= 1")


def warn_beyond_calibration(model: LanguageModel, tokens: int, stacklevel: int) -> None:
    """Warns where rows of so many tokens are longer than what the model's basis was calibrated on."""
    if model.basis is not None and tokens > model.basis.context_length:
        warnings.warn(
            f"a row may hold {tokens} tokens, the basis was calibrated on contexts of "
            f"{model.basis.context_length}; coordinates that a plan drops may matter beyond",
            stacklevel=stacklevel,
        )


def check_chunk(model: LanguageModel, prefill_chunk: int) -> None:
    """Raises `PromptError` where prompts cannot be read in such pieces under the model's plan."""
    if not is_whole(prefill_chunk) or prefill_chunk != bucket(prefill_chunk):
        raise PromptError(f"{prefill_chunk=} must be a power of two >= 32")
    block = math.lcm(*(spec.alignment for spec in model.plan.layer_caches("bfloat16")))
    if prefill_chunk % block:
        raise PromptError(f"{prefill_chunk=} must be a multiple of the plan's blocks of {block}")


def stop_strings(model: TextModel, stop: Sequence[str] | str) -> tuple[str, ...]:
    """Strings that end an answer; raises `PromptError` for what are none, or cannot be found."""
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Iterable) or not all(isinstance(text, str) for text in strings):
        raise PromptError(f"{stop=} must be a string or a list of strings")
    if not all(strings):
        raise PromptError(f"stop={list(strings)} must not hold an empty string")
    if strings and model.tokenizer is None:
        raise PromptError("stop strings need a model with a tokenizer")
    return tuple(strings)


def _samplings(sampling: Sampling | Sequence[Sampling] | None, count: int) -> tuple[Sampling, ...]:
    """One for each of `count` prompts."""
    if sampling is None or isinstance(sampling, Sampling):
        return (sampling or Sampling(),) * count
    if not isinstance(sampling, Sequence) or not all(isinstance(one, Sampling) for one in sampling):
        raise PromptError(f"{sampling=} must be a Sampling, or a list of one for each prompt")
    if len(sampling) != count:
        raise PromptError(f"sampling holds {len(sampling)} for {count} prompts; give one, or one for each")
    return tuple(sampling)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise PromptError(f"{prompts=} must be a text, a list of token ids, or a list of either")
    items = list(prompts)
    if not items:
        raise PromptError("prompts=[] must hold at least one prompt")
    return [items] if is_whole(items[0]) else items


def tokenized(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text; raises `PromptError` where the tokenizer has none for it."""
    with foreign_errors_as(PromptError, f"the tokenizer cannot encode {text!r:.80}"):
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def encode(model: TextModel, prompt: Prompt, max_new_tokens: int) -> np.ndarray:
    """As `token_ids`; also raises `PromptError` where so many more exceed the model's positions."""
    ids, limit = token_ids(model, prompt), model.config.max_positions
    if len(ids) + max_new_tokens > limit:
        raise PromptError(
            f"{len(ids)} prompt tokens and {max_new_tokens=} exceed the model's {limit} positions"
        )
    return ids


def token_ids(model: TextModel, prompt: Prompt) -> np.ndarray:
    """Token ids [T] int32 of one prompt, of any length but 0; raises `PromptError` where they are none."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise PromptError("this model has no tokenizer; give token ids instead of text")
        ids = np.array(tokenized(model.tokenizer, prompt), np.int64)
    else:
        ids = _flat(prompt)
    if ids.size == 0:
        raise PromptError(f"prompt {prompt!r} is empty; it must give at least one token")
    vocab = model.config.vocab_size
    if ids.min() < 0 or ids.max() >= vocab:
        bad = ids[(ids < 0) | (ids >= vocab)][0]
        raise PromptError(f"token id {bad} lies outside the vocabulary 0…{vocab - 1}")
    return ids.astype(np.int32)


def _flat(prompt: Sequence[int]) -> np.ndarray:
    try:
        ids = np.array(prompt)
    except ValueError:  # Lists of several lengths.
        ids = np.array([[]])
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise PromptError(f"a prompt of ids must be a flat list of integers, got {prompt!r:.80}")
    return ids


def stop_token_ids(model: TextModel, stop_tokens: Sequence[int] | int) -> tuple[int, ...]:
    """Token ids that end an answer; raises `PromptError` for what are none, or none of the model's."""
    ids: Any = [stop_tokens] if is_whole(stop_tokens) else stop_tokens
    if not isinstance(ids, Iterable) or not all(is_whole(token) for token in ids):
        raise PromptError(f"{stop_tokens=} must be a token id or a list of token ids")
    vocab = model.config.vocab_size
    if (bad := next((token for token in ids if not 0 <= token < vocab), None)) is not None:
        raise PromptError(f"{stop_tokens=}: token id {bad} lies outside the vocabulary 0…{vocab - 1}")
    return tuple(int(token) for token in ids)


def _stop_ids(model: LanguageModel, stop_tokens: Sequence[int] | int | None) -> tuple[int, ...]:
    stop_ids = model.config.eos_ids if stop_tokens is None else stop_token_ids(model, stop_tokens)
    if len(stop_ids) > MAX_STOP_TOKENS:
        raise PromptError(f"{len(stop_ids)} stop tokens given, at most {MAX_STOP_TOKENS} are allowed")
    return stop_ids
