"""Facts that the demo hides in a long text, and the questions that it asks about them."""

from dataclasses import dataclass
from itertools import product

import numpy as np

ATTRIBUTES = ("code", "number", "price", "weight", "value")
ADJECTIVES = (
    "red", "blue", "green", "black", "white", "dark", "small", "old", "new", "large", "little", "long",
    "short", "high",
)  # fmt: skip
THINGS = (
    "house", "door", "table", "window", "market", "school", "room", "book", "letter", "ship", "wall", "tree",
    "road", "field", "box", "paper", "bed", "office", "dog", "key", "car", "land",
)  # fmt: skip
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
        """Name of the number, such as `code of the red house`."""
        return f"{self.attribute} of the {self.adjective} {self.thing}"

    @property
    def statement(self) -> str:
        """Sentence that mentions the number."""
        return f"The {self.subject} is {self.number}."

    @property
    def question(self) -> str:
        """Question about the number."""
        return f"What is the {self.subject}?"

    @property
    def prompt(self) -> str:
        """Question in the form after which the demo checkpoint writes `statement`."""
        return f"\n\nQuestion: {self.question}\nAnswer:"


def list_pairs(*, held_out: bool) -> list[tuple[str, str]]:
    """Return the pairs of an adjective and a thing for the demo (`held_out`) or for training."""
    pairs = enumerate(product(ADJECTIVES, THINGS))
    return [pair for index, pair in pairs if (index % HELD_OUT == 0) == held_out]


def draw_facts(rng: np.random.Generator, count: int, *, held_out: bool) -> list[Fact]:
    """Draw facts about different things with different numbers of four digits."""
    pairs = list_pairs(held_out=held_out)
    chosen = [pairs[index] for index in rng.choice(len(pairs), count, replace=False)]
    numbers = rng.choice(np.arange(1000, 10_000), count, replace=False)
    attributes = rng.choice(ATTRIBUTES, count)
    return [
        Fact(str(attribute), adjective, thing, int(number))
        for attribute, (adjective, thing), number in zip(attributes, chosen, numbers, strict=True)
    ]
