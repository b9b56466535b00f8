"""Judgement of a demo checkpoint on held-out text: perplexity by topic, and retrieval by distance."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from benchmarks.demo_checkpoint.mixing import Encode, end_with_question
from convert.demo_checkpoint.facts import draw_facts
from zdc_jax.axes import Array
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.model.embeddings import Embeddings
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
        topic: round(float(np.exp(window_nll(network, each).mean())), 2) for topic, each in windows.items()
    }


def measure_retrieval(network: Transformer, windows: Windows, encode: Encode) -> dict[int, float]:
    """Return the share of facts found at each distance that fits into a window.

    A fact is found if every token of its number is the most likely one.
    """
    shares = {}
    for distance in (each for each in DISTANCES if each <= windows.shape[1] - QUESTION_TOKENS):
        rng, right = np.random.default_rng(distance), []
        for window in windows[:QUESTIONS]:
            (fact,) = draw_facts(rng, 1, held_out=True)
            text = end_with_question(window, fact, encode, distance=distance)
            hidden = network.hidden(jnp.asarray(text.tokens[None]))[0, -QUESTION_TOKENS:]
            likeliest = np.asarray(find_likeliest(network.embeddings, hidden))[:-1]
            asked, marked = (each[-QUESTION_TOKENS:][1:] for each in (text.tokens, text.answers))
            right.append(bool((likeliest[marked] == asked[marked]).all()))
        shares[distance] = round(float(np.mean(right)), 3)
    return shares


@jax.jit
def find_likeliest(embeddings: Embeddings, hidden: Array) -> Array:
    """Return the most likely next token at each position."""
    return embeddings.unembed(hidden).argmax(-1)
