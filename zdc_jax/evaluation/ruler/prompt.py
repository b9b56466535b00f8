"""Prompts of RULER: recipes, and samples whose prompt and answer fill a context."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from zdc_jax.errors import EvaluationError
from zdc_jax.evaluation.questions import Writer


class Prompt(NamedTuple):
    """Prompt and the strings that a right answer contains.

    Attributes:
      text: prompt that ends with the beginning of the answer.
      references: reference answers.
    """

    text: str
    references: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Setting:
    """Conditions that prompts are made for.

    Attributes:
      length: context length in tokens: prompt and answer together.
      tokenizer: tokenizer of the model.
      text: words of the haystack of text, in order.
    """

    length: int
    tokenizer: Tokenizer
    text: Sequence[str] = ()

    @cached_property
    def _writer(self) -> Writer:
        return Writer(self.tokenizer, np.empty(0, np.int32))

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the token ids of a prompt, int32, after the special tokens that begin a text."""
        return np.concatenate([self._writer.make_prefix(), self._writer.tokenize(text)])


class Recipe(ABC):
    """Recipe of one task of RULER.

    Attributes:
      answer_tokens: tokens to generate.
      least: smallest size of a prompt, in the units of `compose`.
    """

    answer_tokens: ClassVar[int]
    least: ClassVar[int]

    @property
    def needs_text(self) -> bool:
        """Whether prompts use `Setting.text`."""
        return False

    @property
    def most(self) -> int | None:
        """Largest size of a prompt; None without a limit."""
        return None

    @abstractmethod
    def compose(self, rng: Random, size: int, setting: Setting) -> Prompt:
        """Compose a prompt.

        Args:
          rng: source of all random choices.
          size: size of the haystack: lines of noise, needles or words, as the recipe defines.
          setting: conditions of the prompt.
        """


@dataclass(frozen=True, eq=False)
class Sample:
    """Tokenized prompt and its reference answers.

    Attributes:
      tokens: token ids of the prompt, int32 [S].
      references: reference answers.
    """

    tokens: Int[np.ndarray, " S"]
    references: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class RulerTask:
    """Samples of one task.

    Attributes:
      setting: conditions that the samples were made for.
      answer_tokens: tokens to generate after each prompt.
      samples: samples, which fit into the context together with the answer.
    """

    setting: Setting
    answer_tokens: int
    samples: tuple[Sample, ...]


def make_task(name: str, recipe: Recipe, setting: Setting, *, count: int, seed: int) -> RulerTask:
    """Make the samples of a task.

    As in RULER, the size of the haystack is searched once, and a prompt that becomes too long shrinks.

    Args:
      name: name of the task, which is part of the seed.
      recipe: recipe of the task.
      setting: conditions of the prompts.
      count: number of samples.
      seed: seed of all random choices. Sample i does not depend on `count`.

    Raises:
      EvaluationError: the context is too short, or the tokenizer cannot encode a prompt.
    """
    size = _find_size(name, recipe, setting, f"{seed} {name}")
    samples = (_make_sample(name, recipe, setting, size, f"{seed} {name} {index}") for index in range(count))
    return RulerTask(setting, recipe.answer_tokens, tuple(samples))


def _find_size(name: str, recipe: Recipe, setting: Setting, seed: str) -> int:
    """Return the largest size whose prompt and answer fit: double the size, then bisect."""

    def count_tokens(size: int) -> int:
        prompt = recipe.compose(Random(seed), size, setting)
        return len(setting.encode(prompt.text)) + recipe.answer_tokens

    if (needed := count_tokens(recipe.least)) > setting.length:
        raise _too_short(name, setting, needed)
    high, most = 2 * recipe.least, recipe.most
    while (most is None or high < most) and count_tokens(high) <= setting.length:
        high *= 2
    sizes = range(recipe.least, (high if most is None else min(high, most)) + 1)
    return sizes[bisect_right(sizes, setting.length, key=count_tokens) - 1]


def _make_sample(name: str, recipe: Recipe, setting: Setting, size: int, seed: str) -> Sample:
    """Make a sample of at most `size`, reduced by two percent as long as it does not fit."""
    while True:
        prompt = recipe.compose(Random(seed), size, setting)
        tokens = setting.encode(prompt.text)
        if (needed := len(tokens) + recipe.answer_tokens) <= setting.length:
            return Sample(tokens, prompt.references)
        if size == recipe.least:
            raise _too_short(name, setting, needed)
        size = max(recipe.least, size - 1 - size // 50)


def _too_short(name: str, setting: Setting, needed: int) -> EvaluationError:
    return EvaluationError(
        f"context={setting.length}: task {name!r} needs at least {needed} tokens for its prompt and answer; "
        "choose longer contexts or leave out the task"
    )
