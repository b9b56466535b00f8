"""Masks of a sequence's next token that depend on its answer so far, computed on the host."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from jaxtyping import Bool, Int

from zdc_jax.errors import PromptError
from zdc_jax.generation.grammar import Matcher, compile_grammar
from zdc_jax.generation.masks import ALL, clear_bit, full_mask, pack_mask, set_bits
from zdc_jax.generation.sampling import Sampling
from zdc_jax.generation.shaping import bad_word_ids, token_biases
from zdc_jax.loading import TextModel

SLOW_SECONDS = 0.0002
"""Processor time of a mask from which a thread makes it. Masks of JSON take less, and threads cost more."""
THREADS = 8
"""Most slow masks that are made at the same time."""


class Guide:
    """Guide of one sequence: it reads the answer, and says which tokens may come next.

    A mask needs all tokens before it, so that a sequence with masks takes one step at a time.

    Args:
      words: token ids of words that must not be completed, each at least two.
      allowed: tokens that other options allow, [V] bool.
      matcher: state of the answer in its grammar; None without a grammar.
      stop_ids: tokens that end the answer. With a grammar they may come only where the answer belongs to it.
      min_tokens: fewest tokens before a stop token.

    Attributes:
      is_slow: whether the last mask took long.
    """

    def __init__(
        self,
        words: Sequence[tuple[int, ...]],
        allowed: Bool[np.ndarray, " V"],
        matcher: Matcher | None = None,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ):
        self._words, self._allowed = tuple(words), pack_mask(allowed)
        self._matcher, self._stop_ids, self._min_tokens = matcher, tuple(stop_ids), min_tokens
        self._answer: list[int] = []
        self._failure: str | None = None
        self.is_slow = False

    @classmethod
    def of(
        cls, model: TextModel, sampling: Sampling, stop_ids: Sequence[int] = (), min_tokens: int = 0
    ) -> "Guide | None":
        """Return the guide that a request needs; None if its options do not depend on the answer."""
        words = [word for word in bad_word_ids(model, sampling) if len(word) > 1]
        if not words and sampling.grammar is None:
            return None
        matcher = None if sampling.grammar is None else compile_grammar(model, sampling.grammar)
        return cls(words, np.isfinite(token_biases(model, sampling)), matcher, stop_ids, min_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether the answer belongs to its grammar and nothing may follow."""
        return self._matcher is not None and self._failure is None and self._matcher.is_complete

    def accept(self, tokens: Sequence[int]) -> None:
        """Add new tokens of the answer, chosen with masks.

        Raises:
          PromptError: no token was allowed for the newest one, or the grammar refuses one.
        """
        for token in tokens:
            if not self.try_accept(token):
                raise PromptError(f"the grammar refuses the token {token}")

    def try_accept(self, token: int) -> bool:
        """Add a new token of the answer if the grammar allows it, and return whether it does.

        Raises:
          PromptError: no token was allowed for this one.
        """
        if self._failure is not None:
            raise PromptError(self._failure)
        if self._matcher is None:
            allowed = True
        elif token in self._stop_ids:
            allowed = self._may_stop
        else:
            allowed = self._matcher.accept(token)
        if allowed:
            self._answer.append(token)
        return allowed

    def check(self) -> None:
        """Raise `PromptError` if no token may come next."""
        self.mask()
        if self._failure is not None:
            raise PromptError(self._failure)

    @property
    def _may_stop(self) -> bool:
        """Whether a stop token may come next by the grammar."""
        assert self._matcher is not None
        return self._matcher.is_accepting and len(self._answer) >= self._min_tokens

    def mask(self) -> Int[np.ndarray, " W"]:
        """Return a bit for each token, 1 for those that may come next (`Shaping.mask`).

        If no token may come next, all bits are 1, and `accept` raises an error for the next token. So one
        sequence cannot make a step of all fail.
        """
        began, mask = time.thread_time(), self._allowed.copy()
        if self._matcher is not None:
            own, error = self._matcher.mask()
            for token in self._stop_ids:
                clear_bit(own, token)
            if self._may_stop:
                set_bits(own, self._stop_ids)
            mask &= own[: len(mask)]
            self._failure = f"the grammar cannot continue: {error}" if error else None
        for *beginning, last in self._words:
            if self._answer[-len(beginning) :] == beginning:
                clear_bit(mask, last)
        if not mask.any():
            reason = "bad_words" if self._matcher is None else "grammar, stop tokens, bad_words or min_tokens"
            self._failure = f"{reason} leave no token of allowed_token_ids that may come next; change one"
        if self._failure is not None:
            mask[:] = ALL
        self.is_slow = time.thread_time() - began > SLOW_SECONDS
        return mask


def make_mask(guides: Sequence[Guide | None], vocab: int) -> Int[np.ndarray, "B W"]:
    """Return the masks of sequences; a sequence without a guide may get all `vocab` tokens.

    Threads make those of guides that were slow the last time.
    """
    mask = full_mask(vocab, len(guides))
    guided = [(row, guide) for row, guide in enumerate(guides) if guide is not None]
    quick = [(row, guide) for row, guide in guided if not guide.is_slow]
    slow = [(row, _start_threads().submit(guide.mask)) for row, guide in guided if guide.is_slow]
    for row, guide in quick:
        mask[row] = guide.mask()
    for row, future in slow:
        mask[row] = future.result()
    return mask


@cache
def _start_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="zdc-mask")


def check_sampling(model: TextModel, sampling: Sampling) -> None:
    """Raise `PromptError` unless the model can serve the sampling; a new grammar takes up to a second."""
    token_biases(model, sampling)
    if sampling.grammar is not None:
        compile_grammar(model, sampling.grammar)
