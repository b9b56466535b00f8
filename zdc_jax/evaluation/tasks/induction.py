"""Random tokens come twice: nothing but looking back tells how they go on (after Olsson et al., 2022)."""

import numpy as np

from zdc_jax.evaluation.questions import Posed, Question, Writer

RUN, FREE = 48, 8
"""Tokens that are repeated, and how many of them do not count, the first."""


def pose(rng: np.random.Generator, writer: Writer) -> Posed:
    """One statement of tokens that occur in text, one question: the same again."""
    run = rng.choice(writer.ids, RUN, replace=len(writer.ids) < RUN)
    counts = np.arange(RUN) >= FREE
    return Posed((run,), lambda context, starts: (Question(run, counts, starts[0] / len(context)),))
