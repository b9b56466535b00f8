"""English words that RULER's keys and lists are made of, from the package wonderwords (MIT)."""

from functools import cache
from importlib.resources import files
from random import Random
from typing import Literal

from zdc_jax.errors import EvaluationError


@cache
def read_words(kind: Literal["noun", "adjective", "verb"]) -> tuple[str, ...]:
    """Return the words of one kind, in the order of the package.

    Raises:
      EvaluationError: the package is missing.
    """
    try:
        text = files("wonderwords.assets").joinpath(f"{kind}list.txt").read_text("utf-8")
    except ModuleNotFoundError as error:
        raise EvaluationError(
            "tasks of RULER need the package wonderwords; run: pip install 'zdc-jax[tools]'"
        ) from error
    return tuple(word for line in text.splitlines() if (word := line.strip()))


@cache
def list_words() -> tuple[str, ...]:
    """Return all different words, sorted."""
    return tuple(sorted({*read_words("noun"), *read_words("adjective"), *read_words("verb")}))


def draw_pair(rng: Random) -> str:
    """Draw an adjective and a noun, joined by a hyphen."""
    return f"{rng.choice(read_words('adjective'))}-{rng.choice(read_words('noun'))}"
