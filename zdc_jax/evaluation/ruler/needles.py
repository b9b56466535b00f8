"""Needles in a haystack (`niah_*`): recall the values of keys that sentences of the prompt state."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal
from uuid import UUID

from zdc_jax.evaluation.ruler.haystack import (
    NOISE,
    cut_sentences,
    draw_depths,
    draw_distinct,
    draw_places,
    hide,
)
from zdc_jax.evaluation.ruler.prompt import Prompt, Recipe, Setting
from zdc_jax.evaluation.ruler.words import draw_pair

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ONE_ANSWER = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the "
    "provided text? The special magic {kind} for {query} mentioned in the provided text is"
)
"""Prompt that asks for one value, with `kind` in the singular."""
SEVERAL_ANSWERS = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} "
    "mentioned in the provided text? The special magic {kind} for {query} mentioned in the provided text are"
)
"""Prompt that asks for several values."""


def _draw_number(rng: Random) -> str:
    return str(rng.randint(10**6, 10**7 - 1))


def _draw_uuid(rng: Random) -> str:
    return str(UUID(int=rng.getrandbits(128), version=4))


DRAW: dict[str, Callable[[Random], str]] = {
    "words": draw_pair,
    "numbers": _draw_number,
    "uuids": _draw_uuid,
}
"""Functions that draw a key or a value: a pair of words, a number of seven digits, or a UUID."""


@dataclass(frozen=True)
class Needles(Recipe):
    """Recipe of a task with needles.

    Needles lie at different depths of `DEPTHS` in text, and at random lines of other haystacks. Keys are
    different, which RULER leaves to chance. The size is in lines of noise, needles of the haystack, or words
    of text.

    Attributes:
      haystack: text around the needles: lines of noise, the user's text, or needles with other keys.
      key: kind of the keys.
      value: kind of the values.
      keys: number of keys.
      values: values of each key.
      queries: keys asked for.
    """

    haystack: Literal["noise", "text", "needles"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    answer_tokens = 128
    least = 5

    @property
    def needs_text(self) -> bool:
        return self.haystack == "text"

    def compose(self, rng: Random, size: int, setting: Setting) -> Prompt:
        others = size if self.haystack == "needles" else 0
        keys = draw_distinct(DRAW[self.key], rng, self.keys + others)
        values = draw_distinct(DRAW[self.value], rng, self.keys * self.values + others)
        own, other_keys = keys[: self.keys], keys[self.keys :]
        by_key = {key: values[i * self.values : (i + 1) * self.values] for i, key in enumerate(own)}
        needles = [self._state(key, value) for key, values in by_key.items() for value in values]
        rng.shuffle(needles)
        if self.haystack == "text":
            sentences = cut_sentences(setting.text, size)
            context = " ".join(hide(sentences, needles, draw_depths(rng, len(sentences), len(needles))))
        else:
            lines = [NOISE] * size
            if self.haystack == "needles":
                lines = list(map(self._state, other_keys, values[-others:]))
            context = "\n".join(hide(lines, needles, draw_places(rng, size, len(needles))))
        asked = rng.sample(own, self.queries)
        references = tuple(value for key in asked for value in by_key[key])
        return Prompt(self._ask(asked, context, len(references)), references)

    def _state(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value, key=key, value=value)

    def _ask(self, keys: list[str], context: str, answers: int) -> str:
        *others, last = keys
        query = f"{', '.join(others)}, and {last}" if others else last
        if answers == 1:
            return ONE_ANSWER.format(kind=self.value.removesuffix("s"), context=context, query=query)
        return SEVERAL_ANSWERS.format(kind=self.value, context=context, query=query)
