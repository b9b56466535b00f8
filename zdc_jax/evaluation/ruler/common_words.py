"""Common words extraction (`cwe`): name the ten words of a list that occur most often."""

from random import Random
from typing import NamedTuple

from zdc_jax.evaluation.ruler.prompt import Prompt, Recipe, Setting
from zdc_jax.evaluation.ruler.words import list_words

COMMON = 10
"""Number of common words."""
TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
    "ones that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? "
    "Answer: The top 10 words that appear most often in the list are:"
)


class Frequencies(NamedTuple):
    """Occurrences of each common word and of each other word."""

    common: int
    other: int


class CommonWords(Recipe):
    """Recipe of one list, after a solved example.

    The size is in different words. All words of the package fit into about 100K tokens, so longer contexts
    are not filled; RULER has a second list for them.
    """

    answer_tokens = 120
    least = 2 * COMMON

    @property
    def most(self) -> int:
        return len(list_words())

    def compose(self, rng: Random, size: int, setting: Setting) -> Prompt:
        if setting.length < 4096:
            example, solution = _write_list(rng, 20, Frequencies(3, 1))
            context, common = _write_list(rng, size, Frequencies(6, 1))
        else:
            example, solution = _write_list(rng, 40, Frequencies(10, 3))
            context, common = _write_list(rng, size, Frequencies(30, 3))
        solved = f"{TEMPLATE.format(context=example)} {_number(solution)}"
        return Prompt(f"{solved}\n{TEMPLATE.format(context=context)}", tuple(common))


def _write_list(rng: Random, size: int, frequencies: Frequencies) -> tuple[str, list[str]]:
    """Return a numbered list of `size` different words, and the common ones."""
    words = rng.sample(list_words(), size)
    common, others = words[:COMMON], words[COMMON:]
    entries = common * frequencies.common + others * frequencies.other
    rng.shuffle(entries)
    return _number(entries), common


def _number(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
