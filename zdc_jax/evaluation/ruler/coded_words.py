"""Frequent words extraction (`fwe`): name the three most frequent of many invented words."""

from math import pi
from random import Random
from string import ascii_lowercase

from zdc_jax.evaluation.ruler.haystack import draw_distinct
from zdc_jax.evaluation.ruler.prompt import Prompt, Recipe, Setting

LETTERS = 6
"""Letters of a word."""
TOKENS_PER_WORD = 50
"""Context length divided by the number of different words."""
ZETA_2 = pi**2 / 6
"""Sum of the inverse squares: word k has a share of 1 / (k² ζ(2)) of all words."""
NOISE_WORD = "..."
"""Word that replaces the most frequent one and that the question says to ignore."""
TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the "
    "dots '....'. What are the three most frequently appeared words in the above coded text? Answer: "
    "According to the coded text above, the three most frequently appeared words are:"
)


class CodedWords(Recipe):
    """Recipe of words whose frequencies have a zeta distribution with exponent 2.

    The size is in words, before frequencies are rounded down. The three words asked for occur more often than
    all others from 64 words on.
    """

    answer_tokens = 50
    least = 64

    def compose(self, rng: Random, size: int, setting: Setting) -> Prompt:
        def draw_word(rng: Random) -> str:
            return "".join(rng.choices(ascii_lowercase, k=LETTERS))

        different = (setting.length - self.answer_tokens) // TOKENS_PER_WORD
        words = [NOISE_WORD, *draw_distinct(draw_word, rng, max(different - 1, 4))]
        text = [word for rank, word in enumerate(words, 1) for _ in range(int(size / (rank**2 * ZETA_2)))]
        rng.shuffle(text)
        return Prompt(TEMPLATE.format(context=" ".join(text)), tuple(words[1:4]))
