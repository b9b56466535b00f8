"""Agreement of the greedy continuations of a plan with those of the unmodified model."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.evaluation.greedy import generate_greedy
from zdc_jax.evaluation.perplexity import compare_predictions
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.model.transformer import Transformer

CONTINUED = 64
"""Largest number of tokens that continue a context."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """Greedy continuation of one context by the unmodified model.

    Attributes:
      tokens: token ids, int32 [CONTINUED].
      count: number of tokens up to and including a stop token, or `CONTINUED`.
      hidden: hidden states from which the tokens are predicted, [CONTINUED, D].
    """

    tokens: Int[np.ndarray, " tokens"]
    count: int
    hidden: Float[np.ndarray, "tokens D"]


@dataclass(frozen=True)
class Divergence:
    """Difference between the continuations of one context by a plan and by the unmodified model.

    Attributes:
      first_difference: number of equal tokens at the beginning.
      count: number of tokens with the plan.
      dense_count: number of tokens of the unmodified model.
      kl: mean KL(dense ‖ plan) in nats over the tokens of the unmodified model, each predicted from all
        tokens before it.
    """

    first_difference: int
    count: int
    dense_count: int
    kl: float


@dataclass(frozen=True)
class Agreement:
    """Divergence of a plan from the unmodified model, summarized over contexts.

    Attributes:
      first_difference: mean number of equal tokens at the beginning.
      same: share of contexts whose continuations are equal.
      kl: mean KL(dense ‖ plan), in nats per token.
      length_ratio: total number of tokens with the plan, divided by that of the unmodified model. A
        continuation ends at a stop token or after `CONTINUED` tokens.
      contexts: number of contexts.
    """

    first_difference: float
    same: float
    kl: float
    length_ratio: float
    contexts: int

    @classmethod
    def summarize(cls, divergences: Sequence[Divergence]) -> "Agreement":
        """Summarize the divergences of one or more contexts."""
        return cls(
            first_difference=float(np.mean([each.first_difference for each in divergences])),
            same=float(np.mean([each.first_difference == each.dense_count for each in divergences])),
            kl=float(np.mean([each.kl for each in divergences])),
            length_ratio=sum(each.count for each in divergences)
            / sum(each.dense_count for each in divergences),
            contexts=len(divergences),
        )


def continue_contexts(
    network: Transformer, hidden: Float[Array, "B D"], cache: KVCache
) -> list[Continuation]:
    """Continue contexts with the unmodified model.

    Args:
      network: the unmodified model.
      hidden: last hidden states of the contexts.
      cache: cache of the contexts; it is not modified.
    """
    tokens, counts = _generate(network, hidden, cache)
    states = np.asarray(_compute_states(network, hidden, cache, tokens))
    return [
        Continuation(tokens=tokens[row], count=int(counts[row]), hidden=states[row])
        for row in range(len(tokens))
    ]


def compare_continuations(
    network: Transformer,
    dense: Embeddings,
    hidden: Float[Array, "B D"],
    cache: KVCache,
    continuations: Sequence[Continuation],
) -> list[Divergence]:
    """Compare a plan with the continuations of the same contexts by the unmodified model.

    Args:
      network: network under the plan.
      dense: embeddings and output head of the unmodified model.
      hidden: last hidden states of the contexts, with the plan.
      cache: cache of the contexts under the plan; it is not modified.
      continuations: continuations by the unmodified model.
    """
    tokens = np.stack([each.tokens for each in continuations])
    states = _compute_states(network, hidden, cache, tokens)
    dense_states = jnp.asarray(np.stack([each.hidden for each in continuations]))
    kl, same = map(np.asarray, compare_predictions(dense, dense_states, network.embeddings, states))
    _, counts = _generate(network, hidden, cache)
    divergences = []
    for row, each in enumerate(continuations):
        differences = np.flatnonzero(~same[row, : each.count])
        divergences.append(
            Divergence(
                first_difference=int(differences[0]) if len(differences) else each.count,
                count=int(counts[row]),
                dense_count=each.count,
                kl=float(kl[row, : each.count].mean()),
            )
        )
    return divergences


def _generate(
    network: Transformer, hidden: Array, cache: KVCache
) -> tuple[Int[np.ndarray, "B tokens"], Int[np.ndarray, " B"]]:
    """Return `CONTINUED` greedy tokens, and their number up to and including a stop token."""
    copied = jax.tree.map(jnp.copy, cache)
    return generate_greedy(network, hidden, copied, CONTINUED, stop=network.config.eos_ids)


def _compute_states(
    network: Transformer, hidden: Array, cache: KVCache, tokens: Int[np.ndarray, "B tokens"]
) -> Float[Array, "B tokens D"]:
    """Return the hidden states from which tokens after the cached contexts are predicted."""
    later, _ = network.extend(cache, jnp.asarray(tokens), cache.lengths + CONTINUED)
    return jnp.concatenate([hidden[:, None], later[:, :-1]], axis=1)
