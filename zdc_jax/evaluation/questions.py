"""Building blocks of evaluation tasks: questions, statements, and the writer that tokenizes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Encoding, Tokenizer

from zdc_jax.errors import EvaluationError, foreign_errors_as

QUESTION_TOKENS = 128
"""Longest question in tokens, including its answer."""


@dataclass(frozen=True, eq=False)
class Question:
    """Question about a context, followed by its correct answer.

    Attributes:
      tokens: token ids of the question and the answer, int32 [Q].
      answer: mask of the answer tokens, bool [Q]. The first token is never part of the answer.
      depth: share of the context before the statement that the question refers to; None if it refers to no
        statement.

    Raises:
      EvaluationError: more than `QUESTION_TOKENS` tokens, no answer token, or no token before the answer.
    """

    tokens: Int[np.ndarray, " Q"]
    answer: Bool[np.ndarray, " Q"]
    depth: float | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) > QUESTION_TOKENS:
            raise EvaluationError(
                f"the tokenizer encodes a question as {len(self.tokens)} tokens; "
                f"at most {QUESTION_TOKENS} are allowed"
            )
        if not self.answer.any() or self.answer[0]:
            raise EvaluationError(
                "the tokenizer produces a question without answer tokens, or without tokens before the answer"
            )


class TaskInstance(NamedTuple):
    """One task drawn for one context.

    Attributes:
      statements: statements to insert into the context, as token ids.
      ask: function that returns the questions, given the whole context [S] and the position at which each
        statement begins.
    """

    statements: tuple[Int[np.ndarray, " _"], ...]
    ask: Callable[[Int[np.ndarray, " S"], Sequence[int]], tuple[Question, ...]]


class Writer:
    """Tokenizes statements and questions.

    Args:
      tokenizer: tokenizer of the model.
      ids: distinct token ids that occur in the text, int32 [n].
    """

    def __init__(self, tokenizer: Tokenizer, ids: Int[np.ndarray, " n"]):
        self.ids, self._tokenizer = ids, tokenizer

    def tokenize(self, text: str) -> Int[np.ndarray, " _"]:
        """Return the token ids of a text, int32, without special tokens."""
        return np.array(self._encode(text).ids, np.int32)

    def write_question(self, text: str, answer: str, depth: float) -> Question:
        """Return a question that ends with its answer.

        Tokens that contain any character of the answer are answer tokens.
        """
        encoded = self._encode(text + answer)
        is_answer = [end > len(text) and end > start for start, end in encoded.offsets]
        return Question(np.array(encoded.ids, np.int32), np.array(is_answer), depth)

    def make_prefix(self) -> Int[np.ndarray, " _"]:
        """Return the special tokens that the tokenizer adds before a text, int32."""
        encoded = self._encode("a", add_special_tokens=True)
        count = np.cumprod(encoded.special_tokens_mask).sum()
        return np.array(encoded.ids[:count], np.int32)

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> Encoding:
        with foreign_errors_as(EvaluationError, f"the tokenizer cannot encode {text!r:.80}"):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
