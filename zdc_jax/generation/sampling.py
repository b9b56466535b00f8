"""Sampling parameters and the functions that draw the next token."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, TypeGuard

import numpy as np

from zdc_jax.errors import PromptError
from zdc_jax.generation.grammar import Grammar

SEEDS = 2**32
"""Number of valid seeds."""
_LARGEST = float(np.finfo(np.float32).max)
"""Largest temperature. An infinite one would turn a logit of -inf into NaN."""
MAX_PENALTY = 2
"""Largest magnitude of the presence and frequency penalties, as in OpenAI's API."""
MAX_BIAS = 100
"""Largest magnitude of a logit's bias, as in OpenAI's API."""
REPETITION_PENALTIES = 1e-3, 1e3
"""Smallest and largest repetition penalty; logits stay finite in float32 within these limits."""
RANGES = {
    "min_p": (0, 1),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": REPETITION_PENALTIES,
}
"""Smallest and largest values of parameters."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request.

    Attributes:
      temperature: softmax temperature, >= 0 and finite in float32; 0 is greedy decoding.
      top_k: sample among this many most likely tokens, >= 1; None for all.
      top_p: sample among the smallest set of most likely tokens with this probability, in (0, 1]; None for
        all.
      seed: seed of the draws, from 0 to 2**32 - 1.
      min_p: sample among tokens with at least this share of the largest probability, from 0 to 1. It applies
        before `top_k` and `top_p`.
      presence_penalty: subtracted from the logits of tokens that were generated before, from -2 to 2.
      frequency_penalty: subtracted from a token's logit for each time it was generated, from -2 to 2.
      repetition_penalty: logits of tokens in the prompt or the answer are divided by this number if they are
        positive, and multiplied with it otherwise; from 0.001 to 1000, 1 for none.
      logit_bias: numbers from -100 to 100 that are added to logits, by token id. The mapping is stored as
        sorted pairs.
      allowed_token_ids: ids of the only tokens that may be generated; None for all. Stop tokens are not
        added to them.
      bad_words: words that are not generated. The last token of a word is forbidden after its other tokens.
      grammar: language that the answer belongs to, unless it ends at its token limit or a stop string. This
        needs the package llguidance.

    The order is that of vLLM: forbidden tokens, bias, repetition penalty, frequency and presence penalties,
    temperature, `min_p`, then `top_k` and `top_p`. Log-probabilities are those before all of them.

    Raises:
      PromptError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not 0 <= _number(self.temperature) <= _LARGEST:
            raise self._refuse("temperature", "a finite float32 number >= 0; 0 is greedy")
        if self.top_k is not None and not (is_whole(self.top_k) and self.top_k >= 1):
            raise self._refuse("top_k", "a whole number >= 1, or None")
        if self.top_p is not None and not 0 < _number(self.top_p) <= 1:
            raise self._refuse("top_p", "a number in (0, 1], or None")
        if not (is_whole(self.seed) and 0 <= self.seed < SEEDS):
            raise self._refuse("seed", f"a whole number from 0 to {SEEDS - 1}")
        for name, (least, most) in RANGES.items():
            if not least <= _number(getattr(self, name)) <= most:
                raise self._refuse(name, f"a number from {least:g} to {most:g}")
        # Tuples, so that equal parameters have equal hashes.
        object.__setattr__(self, "logit_bias", _sorted_biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _allowed_ids(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _word_tuple(self.bad_words))
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise self._refuse("grammar", "a Grammar, or None")

    def _refuse(self, name: str, allowed: str) -> PromptError:
        """Return the error for a parameter outside its range."""
        return PromptError(f"{name}={getattr(self, name)!r:.80} must be {allowed}")

    @property
    def is_shaped(self) -> bool:
        """Whether logits are changed before a token is chosen, so that programs need a `Shaping`."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        restricted = self.allowed_token_ids is not None or self.grammar is not None
        return bool(penalties != (0, 0, 1) or self.logit_bias or self.bad_words or restricted)

    @property
    def can_choose_before_mask(self) -> bool:
        """Whether a token that was chosen without the grammar's mask is right if the grammar allows it.

        A draw adds noise to the logit of each token, which no mask changes. But without a mask, `top_k`,
        `top_p` and `min_p` would leave other tokens.
        """
        is_plain = self.top_k is None and self.top_p in (None, 1) and self.min_p == 0
        has_other_changes = replace(self, grammar=None).is_shaped
        return self.grammar is not None and not has_other_changes and (is_plain or self.temperature == 0)


def _sorted_biases(biases: Any) -> tuple[tuple[int, float], ...]:
    """Return biases as sorted pairs; raise `PromptError` unless they map token ids to numbers."""
    try:
        pairs = sorted(dict(biases).items())
    except (TypeError, ValueError):
        pairs = [(None, None)]
    if not all(is_whole(token) and abs(_number(bias)) <= MAX_BIAS for token, bias in pairs):
        raise PromptError(
            f"logit_bias={biases!r:.80} must map token ids to numbers from -{MAX_BIAS} to {MAX_BIAS}"
        )
    return tuple((int(token), float(bias)) for token, bias in pairs)


def _allowed_ids(ids: Any) -> tuple[int, ...]:
    """Return token ids without repetitions; raise `PromptError` unless there is at least one."""
    is_list = isinstance(ids, Iterable) and not isinstance(ids, str)
    tokens = list(ids) if is_list else []
    if not tokens or not all(is_whole(token) for token in tokens):
        raise PromptError(f"allowed_token_ids={ids!r:.80} must be a list of one token id or more, or None")
    return tuple(sorted({int(token) for token in tokens}))


def _word_tuple(words: Any) -> tuple[str, ...]:
    """Return words as a tuple; raise `PromptError` unless all are non-empty strings."""
    is_list = isinstance(words, Iterable) and not isinstance(words, str)
    if not is_list or not all(isinstance(word, str) and word.strip() for word in words):
        raise PromptError(f"bad_words={words!r:.80} must be a list of words, none of them empty or blank")
    return tuple(words)


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or NumPy and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """Convert a real number to float: infinite if it is too large, NaN if the value is no number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def request_keys(samplings: Sequence[Sampling], prompts: Sequence[np.ndarray]) -> np.ndarray:
    """Return a random key for each request, [B, 2] uint32.

    The key hashes the seed, the prompt and the number of equal requests (prompt and sampling) earlier in the
    batch. So it does not depend on the other requests, and equal requests draw different tokens.
    """
    earlier: Counter[tuple[Sampling, bytes]] = Counter()
    keys = []
    for sampling, prompt in zip(samplings, prompts, strict=True):
        ids = prompt.astype("<u4").tobytes()
        numbers = np.array([sampling.seed, earlier[sampling, ids]], "<u4").tobytes()
        keys.append(np.frombuffer(hashlib.sha256(numbers + ids).digest()[:8], "<u4"))
        earlier[sampling, ids] += 1
    return np.stack(keys).astype(np.uint32)
