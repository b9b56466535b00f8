"""Variable tracking (`vt`): name all variables that a chain of assignments gives one value."""

from bisect import bisect_right
from itertools import pairwise
from random import Random
from string import ascii_uppercase

from zdc_jax.evaluation.ruler.haystack import NOISE, draw_distinct, draw_places, hide
from zdc_jax.evaluation.ruler.prompt import Prompt, Recipe, Setting

HOPS = 4
"""Assignments of one variable to the next; the chain has one variable more."""
EXAMPLE_TOKENS = 500
"""Longest solved example before the question, in tokens."""
MOST_EXAMPLE_LINES = 100
"""Largest number of lines of noise in the solved example."""
TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above. Answer: According "
    "to the chain(s) of variable assignment in the text above, {count} variables are assigned the value "
    "{value}, they are: "
)


class Variables(Recipe):
    """Recipe of one chain in noise, after a solved example with shorter names.

    The size is in lines of noise.
    """

    answer_tokens = 30
    least = HOPS + 1

    def compose(self, rng: Random, size: int, setting: Setting) -> Prompt:
        sizes = range(self.least, MOST_EXAMPLE_LINES + 1)

        def count_tokens(lines: int) -> int:
            return len(setting.encode(_solve_example(Random(0), lines)))

        lines = sizes[max(0, bisect_right(sizes, EXAMPLE_TOKENS, key=count_tokens) - 1)]
        question, names = _pose(rng, size, letters=5)
        return Prompt(f"{_solve_example(rng, lines)}\n{question}", tuple(names))


def _solve_example(rng: Random, lines: int) -> str:
    question, names = _pose(rng, lines, letters=3)
    return f"{question} {' '.join(names)}\n"


def _pose(rng: Random, lines: int, *, letters: int) -> tuple[str, list[str]]:
    """Return a question about a chain in lines of noise, and the names of its variables."""

    def draw_name(rng: Random) -> str:
        return "".join(rng.choices(ascii_uppercase, k=letters))

    names = draw_distinct(draw_name, rng, HOPS + 1)
    value = rng.randrange(10_000, 99_999)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    context = "\n".join(hide([NOISE] * lines, chain, draw_places(rng, lines, len(chain))))
    return TEMPLATE.format(context=context, value=value, count=len(names)), names
