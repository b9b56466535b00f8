"""Induction task: repeat a run of random tokens and predict how it continues (after Olsson et al., 2022)."""

from collections.abc import Sequence

import numpy as np

from zdc_jax.evaluation.questions import Question, TaskInstance, Writer

RUN, FREE = 48, 8
"""Number of repeated tokens, and how many of the first ones do not count as the answer."""


def pose(rng: np.random.Generator, writer: Writer) -> TaskInstance:
    """Draw one statement of random tokens from the text, and one question that repeats it."""
    run = rng.choice(writer.ids, RUN, replace=len(writer.ids) < RUN)
    is_answer = np.arange(RUN) >= FREE

    def ask(context: np.ndarray, starts: Sequence[int]) -> tuple[Question, ...]:
        return (Question(run, is_answer, starts[0] / len(context)),)

    return TaskInstance((run,), ask)
