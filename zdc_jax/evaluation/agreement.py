"""Whether a plan's model goes on as the unmodified model does, from the same contexts."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.generation.row_numbers import MAX_STOP_TOKENS, row_numbers
from zdc_jax.generation.sampling import Sampling
from zdc_jax.generation.steps import DecodeState, Flat, decode, first
from zdc_jax.model.transformer import Embeddings, Transformer

CONTINUED = 64
"""Tokens that are added to a context at most."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """How the unmodified model goes on from one context, greedily.

    tokens: int32 [CONTINUED], of which the first `count` are; the last of them stops, or all are. hidden:
    [CONTINUED, D], the states that each is predicted from.
    """

    tokens: Int[np.ndarray, " tokens"]
    count: int
    hidden: Float[np.ndarray, "tokens D"]


@dataclass(frozen=True)
class Departure:
    """How a plan's model goes on instead.

    first_difference: tokens that are the same at the beginning. count, dense_count: length of both. kl:
    mean over the unmodified model's tokens of KL(dense ‖ plan) in nats, each behind those before it.
    """

    first_difference: int
    count: int
    dense_count: int
    kl: float


@dataclass(frozen=True)
class Agreement:
    """Means over contexts.

    first_difference: tokens that greedy continuations have in common before they part. same: share of
    contexts on which they never do. kl: KL(dense ‖ plan) in nats a token. length_ratio: tokens of all
    continuations, the plan's over the unmodified model's; each ends at a stop token or after `CONTINUED`.
    """

    first_difference: float
    same: float
    kl: float
    length_ratio: float
    contexts: int

    @classmethod
    def of(cls, departures: Sequence[Departure]) -> "Agreement":
        """Of at least one context."""

        def mean(values):
            return float(np.mean(list(values)))

        return cls(
            first_difference=mean(each.first_difference for each in departures),
            same=mean(each.first_difference == each.dense_count for each in departures),
            kl=mean(each.kl for each in departures),
            length_ratio=sum(each.count for each in departures)
            / sum(each.dense_count for each in departures),
            contexts=len(departures),
        )


def continuations(network: Transformer, hidden: Float[Array, "B D"], cache: KVCache) -> list[Continuation]:
    """How the unmodified model goes on from what a cache holds, which stays as it was.

    hidden: last states of what the cache holds.
    """
    tokens, counts = _continued(network, hidden, cache)
    states = np.asarray(_states(network, hidden, cache, tokens))
    return [Continuation(*row) for row in zip(tokens, counts.tolist(), states, strict=True)]


def departures(
    network: Transformer,
    dense: Embeddings,
    hidden: Float[Array, "B D"],
    cache: KVCache,
    continuations: Sequence[Continuation],
) -> list[Departure]:
    """How a plan's model departs from continuations of the same contexts; `dense`: the unmodified one's."""
    tokens = np.stack([each.tokens for each in continuations])
    states = _states(network, hidden, cache, tokens)
    theirs = jnp.asarray(np.stack([each.hidden for each in continuations]))
    kl, same = (np.asarray(each) for each in _compared(dense, theirs, network.embeddings, states))
    _, counts = _continued(network, hidden, cache)
    found = []
    for row, each in enumerate(continuations):
        differs = np.flatnonzero(~same[row, : each.count])
        first = int(differs[0]) if len(differs) else each.count
        found.append(Departure(first, int(counts[row]), each.count, float(kl[row, : each.count].mean())))
    return found


def _continued(
    network: Transformer, hidden: Array, cache: KVCache
) -> tuple[Int[np.ndarray, "B tokens"], Int[np.ndarray, " B"]]:
    """Greedy tokens, and how many there are up to a stop token."""
    stop, nothing = network.config.eos_ids[:MAX_STOP_TOKENS], np.zeros(2, np.uint32)
    numbers = np.stack(
        [row_numbers(held, CONTINUED, stop, Sampling(), nothing) for held in cache.lengths.tolist()]
    )
    wanted, cache = np.ones(len(numbers), bool), jax.tree.map(jnp.copy, cache)  # The steps take it over.
    flat = Flat.of(network)
    state, begun = first(flat, DecodeState.of(cache), hidden, wanted, numbers, choice="greedy")
    given = wanted, numbers, np.int32(CONTINUED)
    _, later = decode(flat, state, *given, steps=CONTINUED, choice="greedy")
    tokens = np.concatenate([begun.tokens, later.tokens[:, :-1]], axis=1)
    return tokens, 1 + np.asarray(later.counts)


def _states(
    network: Transformer, hidden: Array, cache: KVCache, tokens: Int[np.ndarray, "B tokens"]
) -> Float[Array, "B tokens D"]:
    """The states that tokens are predicted from, behind what a cache holds."""
    later, _ = network.extend(cache, jnp.asarray(tokens), cache.lengths + CONTINUED)
    return jnp.concatenate([hidden[:, None], later[:, :-1]], axis=1)


@jax.jit
def _compared(
    dense: Embeddings,
    theirs: Float[Array, "B tokens D"],
    embeddings: Embeddings,
    states: Float[Array, "B tokens D"],
) -> tuple[Float[Array, "B tokens"], Array]:
    """KL(dense ‖ plan) at each token, float32, and whether both find the same token the most likely.

    Row by row: at no time are there logits of all.
    """

    def row(given: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = dense.unembed(given[0]), embeddings.unembed(given[1])
        log_p, log_q = (jax.nn.log_softmax(each, axis=-1) for each in logits)
        kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
        return kl, jnp.argmax(log_p, axis=-1) == jnp.argmax(log_q, axis=-1)

    return jax.lax.map(row, (theirs, states))
