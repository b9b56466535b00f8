"""A block of keys and values in the midst of text; the value of one key is asked for (Liu et al., 2023)."""

import numpy as np

from zdc_jax.evaluation.questions import Posed, Writer
from zdc_jax.evaluation.words import OBJECTS

PAIRS = 16


def pose(rng: np.random.Generator, writer: Writer) -> Posed:
    """One statement of `PAIRS` lines, one question."""
    keys = rng.choice(OBJECTS, PAIRS, replace=False)
    values = rng.choice(np.arange(1000, 10_000), PAIRS, replace=False)
    lines = "".join(f"{key} = {value}\n" for key, value in zip(keys, values, strict=True))
    asked = rng.integers(PAIRS)
    return Posed(
        (writer.tokens(f"\n\n{lines}\n"),),
        lambda context, starts: (
            writer.question(f"\n\n{keys[asked]} = ", str(values[asked]), starts[0] / len(context)),
        ),
    )
