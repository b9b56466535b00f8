"""Haystacks of RULER: noise, or text in sentences, with sentences hidden in them."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, cycle, islice
from random import Random

import numpy as np

from zdc_jax.evaluation.text import Document

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Line that haystacks of noise repeat."""
DEPTHS = tuple(np.round(np.linspace(0, 100, 40)).astype(int).tolist())
"""Depths of needles in a haystack of text, in percent of its sentences."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def collect_words(documents: Iterable[Document], most: int) -> tuple[str, ...]:
    """Return the first `most` words of documents, separated at white space."""
    return tuple(islice(chain.from_iterable(document.text.split() for document in documents), most))


def cut_sentences(words: Sequence[str], count: int) -> list[str]:
    """Return the first `count` words in sentences; the words begin again where they are too few."""
    return _SENTENCE_END.split(" ".join(islice(cycle(words), count)))


def hide(sentences: Sequence[str], hidden: Sequence[str], places: Sequence[int]) -> list[str]:
    """Insert each hidden sentence before the sentence at its place; places must ascend."""
    result = list(sentences)
    for sentence, place in reversed(list(zip(hidden, places, strict=True))):
        result.insert(place, sentence)
    return result


def draw_depths(rng: Random, sentences: int, count: int) -> list[int]:
    """Draw ascending places in a haystack of text, at `count` different depths."""
    return [sentences * depth // 100 for depth in sorted(rng.sample(DEPTHS, count))]


def draw_places(rng: Random, lines: int, count: int) -> list[int]:
    """Draw `count` different ascending places before one of the lines."""
    return sorted(rng.sample(range(lines), count))


def draw_distinct(draw: Callable[[Random], str], rng: Random, count: int) -> list[str]:
    """Draw until there are `count` different strings."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw(rng)] = None
    return list(drawn)
