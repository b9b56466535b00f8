"""Text that stood a distance earlier comes again: a model that looks back knows how it goes on."""

import numpy as np

from zdc_jax.errors import EvaluationError
from zdc_jax.evaluation.questions import QUESTION_TOKENS, Posed, Question, Writer

COPIED, COUNTED = 96, 80
"""Tokens that come again, and how many of them count, the last."""
SHARES = (1 / 4, 3 / 4)
"""Distances, where none is named, as shares of the context."""


def pose(rng: np.random.Generator, writer: Writer, *, distance: int) -> Posed:
    """No statement, one question: the first `COPIED` of the last `distance` tokens again.

    Raises:
      EvaluationError: a distance below `COPIED`; (of `ask`) a context that is shorter.
    """
    if distance < COPIED:
        raise EvaluationError(f"task copy@{distance}: the distance must be >= {COPIED} tokens")

    def ask(context: np.ndarray, starts: object) -> tuple[Question, ...]:
        if distance > len(context):
            raise EvaluationError(
                f"task copy@{distance} needs a context of {distance + QUESTION_TOKENS} tokens, questions "
                f"included, and has {len(context) + QUESTION_TOKENS}"
            )
        tokens = context[len(context) - distance :][:COPIED]
        return (Question(tokens, np.arange(COPIED) >= COPIED - COUNTED),)

    return Posed((), ask)
