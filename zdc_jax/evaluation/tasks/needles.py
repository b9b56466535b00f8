"""Numbers of several cities, each said somewhere else, all asked for (after RULER; Hsieh et al., 2024)."""

import numpy as np

from zdc_jax.evaluation.questions import Posed, Writer
from zdc_jax.evaluation.words import CITIES

NEEDLES = 4


def pose(rng: np.random.Generator, writer: Writer) -> Posed:
    """A statement and a question for each of `NEEDLES` cities."""
    cities = rng.choice(CITIES, NEEDLES, replace=False)
    numbers = rng.choice(np.arange(1000, 10_000), NEEDLES, replace=False)
    pairs = zip(cities, numbers, strict=True)
    said = [(f"\n\nThe secret number of {city} is ", str(number)) for city, number in pairs]
    return Posed(
        tuple(writer.tokens(f"{text}{number}.\n\n") for text, number in said),
        lambda context, starts: tuple(
            writer.question(*each, start / len(context)) for each, start in zip(said, starts, strict=True)
        ),
    )
