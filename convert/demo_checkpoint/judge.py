"""Judgement of a trained demo checkpoint on held-out text: perplexity by topic, and retrieval by distance."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from convert.demo_checkpoint.facts import draw_facts
from convert.demo_checkpoint.mixing import Encode, end_with_question
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.model.transformer import Transformer

DISTANCES = (50, 200, 500, 1000, 1500, 1900)
"""Tokens between a fact and the question about it."""
QUESTIONS = 64
"""Questions at each distance."""
QUESTION_TOKENS = 100
"""Tokens of a window that a fact and a question may need."""

Windows = Int[np.ndarray, "W T"]


def measure_perplexity(network: Transformer, windows: Mapping[str, Windows]) -> dict[str, float]:
    """Return the perplexity on the windows of each topic."""
    return {
        topic: round(float(np.exp(window_nll(network, each, batch=4).mean())), 2)
        for topic, each in windows.items()
    }


def measure_retrieval(network: Transformer, windows: Windows, encode: Encode) -> dict[int, float]:
    """Return the share of right answers at each distance that fits into a window."""
    longest = windows.shape[1] - QUESTION_TOKENS
    return {
        distance: answer_questions(network, windows[:QUESTIONS], encode, distance=distance)
        for distance in DISTANCES
        if distance <= longest
    }


def answer_questions(network: Transformer, windows: Windows, encode: Encode, *, distance: int) -> float:
    """Return the share of facts whose number is the most likely continuation, token by token."""
    rng, right = np.random.default_rng(distance), []
    for window in windows:
        (fact,) = draw_facts(rng, 1, held_out=True)
        text = end_with_question(window, fact, encode, distance=distance)
        likeliest = np.asarray(network(jnp.asarray(text.tokens[None]))[0, :-1].argmax(-1))
        marked = text.answers[1:]
        right.append(bool((likeliest[marked] == text.tokens[1:][marked]).all()))
    return float(np.mean(right))
