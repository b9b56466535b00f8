"""What tasks are made of: statements that go into a context, and questions about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Encoding, Tokenizer

from zdc_jax.errors import EvaluationError, foreign_errors_as

QUESTION_TOKENS = 128
"""Longest question, its answer included."""


@dataclass(frozen=True, eq=False)
class Question:
    """Token ids that follow a context: a question and its right answer.

    tokens: int32 [Q]. answer: bool [Q], which of them are the answer; never the first. depth: share of the
    context before the statement that is asked for, None where the question is about no statement.

    Raises:
      EvaluationError: more than `QUESTION_TOKENS` tokens, no answer, or nothing before it.
    """

    tokens: Int[np.ndarray, " Q"]
    answer: Bool[np.ndarray, " Q"]
    depth: float | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) > QUESTION_TOKENS:
            raise EvaluationError(
                f"the tokenizer makes {len(self.tokens)} tokens of a question, {QUESTION_TOKENS} are allowed"
            )
        if not self.answer.any() or self.answer[0]:
            raise EvaluationError(
                "the tokenizer leaves a question without an answer, or without its beginning"
            )


class Posed(NamedTuple):
    """A task on one context.

    statements: token ids, each to be put somewhere into the context. ask: from the whole context [S] and from
    where each statement begins in it, the questions.
    """

    statements: tuple[Int[np.ndarray, " _"], ...]
    ask: Callable[[Int[np.ndarray, " S"], Sequence[int]], tuple[Question, ...]]


class Writer:
    """Makes tokens of text.

    ids: int32 [n], ids that occur in text, each once.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Int[np.ndarray, " n"]):
        self.ids, self._tokenizer = ids, tokenizer

    def tokens(self, text: str) -> Int[np.ndarray, " _"]:
        """Token ids of a text, int32, without special tokens."""
        return np.array(self._encoded(text).ids, np.int32)

    def question(self, text: str, answer: str, depth: float) -> Question:
        """A question that ends with its answer; tokens with any of the answer's characters count."""
        encoded = self._encoded(text + answer)
        counts = [end > len(text) and end > start for start, end in encoded.offsets]
        return Question(np.array(encoded.ids, np.int32), np.array(counts), depth)

    def beginning(self) -> Int[np.ndarray, " _"]:
        """The special tokens that the tokenizer puts before a text, int32."""
        encoded = self._encoded("a", add_special_tokens=True)
        before = np.cumprod(encoded.special_tokens_mask).sum()
        return np.array(encoded.ids[:before], np.int32)

    def _encoded(self, text: str, *, add_special_tokens: bool = False) -> Encoding:
        with foreign_errors_as(EvaluationError, f"the tokenizer cannot encode {text!r:.80}"):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
