"""Copy task: repeat a passage from a given distance and predict how it continues."""

import numpy as np

from zdc_jax.errors import EvaluationError
from zdc_jax.evaluation.questions import QUESTION_TOKENS, Question, TaskInstance, Writer

COPIED, COUNTED = 96, 80
"""Number of repeated tokens, and how many of the last ones count as the answer."""
SHARES = (1 / 4, 3 / 4)
"""Default distances, as shares of the context."""


def pose(rng: np.random.Generator, writer: Writer, *, distance: int) -> TaskInstance:
    """Pose one question, without a statement: the first `COPIED` of the last `distance` tokens.

    Raises:
      EvaluationError: the distance is less than `COPIED`; `ask` raises it if the context is too short.
    """
    if distance < COPIED:
        raise EvaluationError(f"task copy@{distance}: the distance must be >= {COPIED} tokens")

    def ask(context: np.ndarray, starts: object) -> tuple[Question, ...]:
        if distance > len(context):
            raise EvaluationError(
                f"task copy@{distance} needs contexts of {distance + QUESTION_TOKENS} tokens including "
                f"questions, but they have {len(context) + QUESTION_TOKENS}"
            )
        tokens = context[len(context) - distance :][:COPIED]
        return (Question(tokens, np.arange(COPIED) >= COPIED - COUNTED),)

    return TaskInstance((), ask)
