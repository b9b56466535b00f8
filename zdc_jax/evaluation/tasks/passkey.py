"""Five digits, said once and asked for at the end (Mohtashami and Jaggi, 2023)."""

import numpy as np

from zdc_jax.evaluation.questions import Posed, Writer


def pose(rng: np.random.Generator, writer: Writer) -> Posed:
    """One statement, one question."""
    key = str(rng.integers(10_000, 100_000))
    statement = writer.tokens(f"\n\nThe pass key is {key}. Remember it.\n\n")

    return Posed(
        (statement,),
        lambda context, starts: (
            writer.question("\n\nWhat is the pass key? The pass key is ", key, starts[0] / len(context)),
        ),
    )
