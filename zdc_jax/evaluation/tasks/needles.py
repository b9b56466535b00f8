"""Needles task: recall the numbers of several cities, stated in different places.

After RULER (Hsieh et al., 2024).
"""

from collections.abc import Sequence

import numpy as np

from zdc_jax.evaluation.questions import Question, TaskInstance, Writer
from zdc_jax.evaluation.words import CITIES

NEEDLES = 4
"""Number of cities."""


def pose(rng: np.random.Generator, writer: Writer) -> TaskInstance:
    """Draw one statement and one question for each of `NEEDLES` cities."""
    cities = rng.choice(CITIES, NEEDLES, replace=False)
    numbers = rng.choice(np.arange(1000, 10_000), NEEDLES, replace=False)
    pairs = zip(cities, numbers, strict=True)
    facts = [(f"\n\nThe secret number of {city} is ", str(number)) for city, number in pairs]

    def ask(context: np.ndarray, starts: Sequence[int]) -> tuple[Question, ...]:
        return tuple(
            writer.write_question(text, number, start / len(context))
            for (text, number), start in zip(facts, starts, strict=True)
        )

    return TaskInstance(tuple(writer.tokenize(f"{text}{number}.\n\n") for text, number in facts), ask)
