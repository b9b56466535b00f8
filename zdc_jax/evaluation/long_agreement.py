"""Agreement and repetition of long greedy texts under a plan and by the unmodified model."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from zdc_jax.evaluation.answers import Protocol, read_contexts
from zdc_jax.evaluation.batches import padded_batches
from zdc_jax.evaluation.greedy import generate_greedy
from zdc_jax.model.transformer import Transformer

LONG_TOKENS = 2000
"""Tokens to generate after each prompt."""
MAX_PROMPTS = 16
"""Largest number of prompts."""
GRAM = 4
"""Length of the sequences whose repetition is counted, in tokens."""


@dataclass(frozen=True)
class LongAgreement:
    """Comparison of long greedy texts of a plan with those of the unmodified model.

    Texts do not end at stop tokens, so that all have the same length.

    Attributes:
      tokens: tokens of each text.
      first_difference: mean number of equal tokens before the first difference; `tokens` if there is none.
      share: mean share of a text before the first difference, 0 to 1.
      same: share of prompts whose texts are equal.
      repetition: mean share of sequences of `GRAM` tokens that occur earlier in their text, with the plan.
      dense_repetition: the same share for the unmodified model.
      first_differences: number of equal tokens of each prompt.
      prompts: number of prompts.
    """

    tokens: int
    first_difference: float
    share: float
    same: float
    repetition: float
    dense_repetition: float
    first_differences: tuple[int, ...]
    prompts: int


def write_texts(
    network: Transformer,
    prompts: Int[np.ndarray, "n S"],
    *,
    tokens: int,
    protocol: Protocol,
    batch: int = 1,
    watch: Callable[[int], None] = lambda _: None,
) -> Int[np.ndarray, "n tokens"]:
    """Continue each prompt greedily by `tokens` tokens, int32, whether or not a stop token comes.

    Args:
      network: network to run.
      prompts: token ids, int32.
      tokens: tokens to generate.
      protocol: how prompts are read.
      batch: prompts to run at once.
      watch: function called after each batch with the number of texts written.

    Raises:
      CacheMemoryError: the caches do not fit into memory.
    """
    texts: list[np.ndarray] = []
    for padded, count in padded_batches(list(prompts), batch):
        hidden, cache = read_contexts(network, np.stack(padded), room=tokens, protocol=protocol)
        texts += [*generate_greedy(network, hidden, cache, tokens)[0][:count]]
        watch(len(texts))
    return np.stack(texts)


def compare_texts(dense: Int[np.ndarray, "n tokens"], plan: Int[np.ndarray, "n tokens"]) -> LongAgreement:
    """Compare the texts of a plan with those of the unmodified model after the same prompts."""
    length = dense.shape[1]
    differs = dense != plan
    first = np.where(differs.any(1), differs.argmax(1), length)
    return LongAgreement(
        tokens=length,
        first_difference=float(first.mean()),
        share=float(first.mean() / length),
        same=float((first == length).mean()),
        repetition=float(np.mean([measure_repetition(text) for text in plan])),
        dense_repetition=float(np.mean([measure_repetition(text) for text in dense])),
        first_differences=tuple(first.tolist()),
        prompts=len(dense),
    )


def measure_repetition(text: Int[np.ndarray, " tokens"]) -> float:
    """Return the share of sequences of `GRAM` tokens that occur earlier in a text of at least as many."""
    grams = np.lib.stride_tricks.sliding_window_view(text, GRAM)
    return 1 - len(np.unique(grams, axis=0)) / len(grams)
