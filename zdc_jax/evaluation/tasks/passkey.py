"""Passkey task: recall five digits that the context states once (Mohtashami and Jaggi, 2023)."""

from collections.abc import Sequence

import numpy as np

from zdc_jax.evaluation.questions import Question, TaskInstance, Writer


def pose(rng: np.random.Generator, writer: Writer) -> TaskInstance:
    """Draw one statement of a key, and one question about it."""
    key = str(rng.integers(10_000, 100_000))
    statement = writer.tokenize(f"\n\nThe pass key is {key}. Remember it.\n\n")

    def ask(context: np.ndarray, starts: Sequence[int]) -> tuple[Question, ...]:
        question = "\n\nWhat is the pass key? The pass key is "
        return (writer.write_question(question, key, starts[0] / len(context)),)

    return TaskInstance((statement,), ask)
