"""The next token of each row, and log-probabilities, out of logits."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.generation.row_numbers import RowNumbers
from zdc_jax.generation.sampling import draw

MOST_LOGPROBS = 5
"""Alternatives of a token whose log-probabilities can be asked for."""
SCORED = 128
"""Tokens that are scored at once: their logits are of the whole vocabulary."""

Choice = Literal["greedy", "scored", "any"]
"""What rows ask for, the smallest program first. `greedy`: none draws, has a least number of tokens, or asks
for log-probabilities; `scored`: none draws."""


class Token(NamedTuple):
    """token [*B] int32, its logprob [*B], the likeliest [*B, 5] int32 and their logprobs: natural logarithms.

    A `greedy` choice knows no logarithms: None.
    """

    token: Array
    logprob: Array | None = None
    likeliest: Array | None = None
    logprobs: Array | None = None

    @classmethod
    def room(cls, choice: Choice, *shape: int) -> "Token":
        """Room for tokens [*shape]."""
        token = jnp.zeros(shape, jnp.int32)
        if choice == "greedy":
            return cls(token)
        several = (*shape, MOST_LOGPROBS)
        return cls(token, jnp.zeros(shape), jnp.zeros(several, jnp.int32), jnp.zeros(several))


class Scores(NamedTuple):
    """Of tokens [*B] that are known: logprob [*B], the likeliest [*B, 5] int32 there and their logprobs."""

    logprob: Array
    likeliest: Array
    logprobs: Array


def next_token(
    logits: Float[Array, "B V"], rows: RowNumbers, held: Int[Array, " B"], choice: Choice = "any"
) -> Token:
    """By each row's numbers, of which `choice` says what they ask for; held: tokens of each row before it."""
    if choice == "greedy":
        return greedy(logits)
    allowed = _without_stops(logits, rows, held)
    token = draw(allowed, rows.sampling, held) if choice == "any" else greedy(allowed).token
    ids, values = likeliest(logits)
    total = jax.nn.logsumexp(logits, axis=-1)
    logprob = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - total
    return Token(token, logprob, ids, values - total[:, None])


def greedy(logits: Float[Array, "B V"]) -> Token:
    """The likeliest of each row, the first of equals."""
    return Token(jnp.argmax(logits, axis=-1).astype(jnp.int32))


def scores(
    unembed: Callable[[Array], Array], hidden: Float[Array, "T D"], tokens: Int[Array, " T"]
) -> Scores:
    """Of tokens that stand behind hidden states, a few at a time."""

    def one(pair: tuple[Array, Array]) -> Scores:
        logprobs = jax.nn.log_softmax(unembed(pair[0]))
        return Scores(logprobs[pair[1]], *likeliest(logprobs))

    return jax.lax.map(one, (hidden, tokens), batch_size=SCORED)


def likeliest(values: Float[Array, "*B V"]) -> tuple[Int[Array, "*B 5"], Float[Array, "*B 5"]]:
    """Ids of the likeliest tokens by their values, and these."""
    values, ids = jax.lax.top_k(values, MOST_LOGPROBS)
    return ids.astype(jnp.int32), values


def _without_stops(logits: Array, rows: RowNumbers, held: Array) -> Array:
    """Logits with -inf at the tokens that would end a row too early."""
    early, nowhere = held < rows.least, logits.shape[1]
    columns = jnp.where(early[:, None] & (rows.stop_ids >= 0), rows.stop_ids, nowhere)
    return logits.at[jnp.arange(len(logits))[:, None], columns].set(-jnp.inf, mode="drop")
