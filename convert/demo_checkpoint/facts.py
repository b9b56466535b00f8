"""Facts that the demo hides in a long text, and the questions that it asks about them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

ATTRIBUTES = ("code", "number", "price", "weight", "value")
ADJECTIVES = (
    "red",
    "blue",
    "green",
    "black",
    "white",
    "dark",
    "small",
    "old",
    "new",
    "large",
    "little",
    "long",
    "short",
    "high",
)
THINGS = (
    "house",
    "door",
    "table",
    "window",
    "market",
    "school",
    "room",
    "book",
    "letter",
    "ship",
    "wall",
    "tree",
    "road",
    "field",
    "box",
    "paper",
    "bed",
    "office",
    "dog",
    "key",
    "car",
    "land",
)
"""Words that are one token each for the demo checkpoint."""
HELD_OUT = 7
"""One in this many pairs of an adjective and a thing is left out of training; the demo asks about these."""


@dataclass(frozen=True)
class Fact:
    """A number that a text mentions once."""

    attribute: str
    adjective: str
    thing: str
    number: int

    @property
    def subject(self) -> str:
        """Name of the number, such as `the code of the red house`."""
        return f"the {self.attribute} of the {self.adjective} {self.thing}"

    @property
    def statement(self) -> str:
        """Sentence that mentions the number."""
        return f"The {self.subject.removeprefix('the ')} is {self.number}."

    @property
    def question(self) -> str:
        """Question about the number."""
        return f"What is {self.subject}?"


def list_pairs(*, held_out: bool) -> Iterator[tuple[str, str]]:
    """Yield the pairs of an adjective and a thing for the demo (`held_out`) or for training."""
    for index, pair in enumerate(product(ADJECTIVES, THINGS)):
        if (index % HELD_OUT == 0) == held_out:
            yield pair


def draw_facts(rng: np.random.Generator, count: int, *, held_out: bool) -> list[Fact]:
    """Draw facts about different things with different numbers of four digits."""
    pairs = list(list_pairs(held_out=held_out))
    chosen = [pairs[index] for index in rng.choice(len(pairs), count, replace=False)]
    numbers = rng.choice(np.arange(1000, 10_000), count, replace=False)
    attributes = rng.choice(ATTRIBUTES, count)
    return [
        Fact(str(attribute), adjective, thing, int(number))
        for attribute, (adjective, thing), number in zip(attributes, chosen, numbers, strict=True)
    ]


def ask(fact: Fact) -> str:
    """Return the text after which a plain language model writes the answer."""
    return f"\n\nQuestion: {fact.question}\nAnswer:"


def answer(fact: Fact) -> str:
    """Return the answer that continues `ask`."""
    return f" {fact.statement}"
