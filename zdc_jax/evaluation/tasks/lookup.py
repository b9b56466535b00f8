"""Lookup task: find the value of one key in a block of key-value pairs (Liu et al., 2023)."""

from collections.abc import Sequence

import numpy as np

from zdc_jax.evaluation.questions import Question, TaskInstance, Writer
from zdc_jax.evaluation.words import OBJECTS

PAIRS = 16
"""Number of key-value pairs."""


def pose(rng: np.random.Generator, writer: Writer) -> TaskInstance:
    """Draw one statement of `PAIRS` lines, and one question about the value of a key."""
    keys = rng.choice(OBJECTS, PAIRS, replace=False)
    values = rng.choice(np.arange(1000, 10_000), PAIRS, replace=False)
    lines = "".join(f"{key} = {value}\n" for key, value in zip(keys, values, strict=True))
    asked = rng.integers(PAIRS)

    def ask(context: np.ndarray, starts: Sequence[int]) -> tuple[Question, ...]:
        depth = starts[0] / len(context)
        return (writer.write_question(f"\n\n{keys[asked]} = ", str(values[asked]), depth),)

    return TaskInstance((writer.tokenize(f"\n\n{lines}\n"),), ask)
