"""Masks of a sequence's next token that depend on its answer so far, computed on the host."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from zdc_jax.errors import PromptError
from zdc_jax.generation.sampling import Sampling
from zdc_jax.generation.shaping import ALL, MASK_BITS, bad_word_ids, pack_mask, token_biases
from zdc_jax.loading import TextModel


class Guide:
    """Guide of one sequence: it reads the answer, and says which tokens may come next.

    The tokens of each step must be known before those of the next are chosen, so a guided sequence takes one
    step at a time.

    Args:
      words: token ids of words that must not be completed, each at least two.
      allowed: tokens that other options allow, [V] bool.
    """

    def __init__(self, words: Sequence[tuple[int, ...]], allowed: Bool[np.ndarray, " V"]):
        self._words, self._allowed = tuple(words), pack_mask(allowed)
        self._answer: list[int] = []
        self._failure: str | None = None

    @classmethod
    def of(cls, model: TextModel, sampling: Sampling) -> "Guide | None":
        """Return the guide that a request needs; None if its options do not depend on the answer."""
        words = [word for word in bad_word_ids(model, sampling) if len(word) > 1]
        return cls(words, np.isfinite(token_biases(model, sampling))) if words else None

    def accept(self, tokens: Sequence[int]) -> None:
        """Add new tokens of the answer.

        Raises:
          PromptError: no token was allowed for the newest one.
        """
        if self._failure is not None:
            raise PromptError(self._failure)
        self._answer += tokens

    def mask(self) -> Int[np.ndarray, " W"]:
        """Return a bit for each token, 1 for those that may come next (`Shaping.mask`).

        If no token may come next, all bits are 1, and `accept` raises an error for the next token. So one
        sequence cannot make a step of all fail.
        """
        mask = self._allowed.copy()
        for *beginning, last in self._words:
            if self._answer[-len(beginning) :] == beginning:
                mask.view(np.uint32)[last // MASK_BITS] &= ~np.uint32(1 << last % MASK_BITS)
        if not mask.any():
            self._failure = "bad_words leave no token of allowed_token_ids that may come next; remove some"
            mask[:] = ALL
        return mask
