"""Choice of each sequence's next token from logits, with log-probabilities."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.generation.packed_parameters import PackedParameters
from zdc_jax.generation.shaping import Shaping

MAX_LOGPROBS = 20
"""Most alternatives of a token whose log-probabilities can be requested."""
SCORE_BATCH = 128
"""Tokens scored at once, which bounds the memory of their logits over the whole vocabulary."""

Choice = Literal["greedy", "scored", "any"]
"""Kind of program that chooses tokens, the cheapest first.

- `greedy`: every sequence is greedy, without a minimum length and without log-probabilities.
- `scored`: every sequence is greedy; minimum lengths and log-probabilities are supported.
- `any`: sequences may also be sampled.
"""


class Scores(NamedTuple):
    """Log-probabilities of tokens (natural logarithms).

    Attributes:
      logprob: log-probability of each token, [*B].
      top_ids: ids of the most likely tokens at its position, [*B, 20] int32.
      top_logprobs: log-probabilities of the most likely tokens, [*B, 20].
    """

    logprob: Array
    top_ids: Array
    top_logprobs: Array


class Token(NamedTuple):
    """Chosen tokens.

    Attributes:
      token: token ids, [*B] int32.
      finite: whether each token was chosen from finite logits, [*B] bool. Otherwise it has no meaning.
      scores: log-probabilities, which `greedy` programs leave out.
    """

    token: Array
    finite: Array
    scores: Scores | None = None

    @classmethod
    def zeros(cls, choice: Choice, *shape: int) -> "Token":
        """Return zeros to be filled with tokens of a batch `shape`."""
        ids, top = jnp.zeros((*shape, MAX_LOGPROBS), jnp.int32), jnp.zeros((*shape, MAX_LOGPROBS))
        scores = None if choice == "greedy" else Scores(jnp.zeros(shape), ids, top)
        return cls(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), scores)


def choose_token(
    logits: Float[Array, "B V"],
    rows: PackedParameters,
    lengths: Int[Array, " B"],
    choice: Choice = "any",
    shaping: Shaping | None = None,
) -> Token:
    """Return the next token of each sequence.

    Args:
      logits: logits of each sequence.
      rows: sampling parameters and limits of each sequence.
      lengths: tokens of each sequence before the new one.
      choice: kind of program, which must support what `rows` request.
      shaping: arrays from which logits are changed before the choice; None for no changes.
    """
    shaped = logits if shaping is None else shaping.apply(logits, rows)
    if choice == "greedy":
        return choose_greedy(shaped)
    allowed = _mask_early_stops(shaped, rows, lengths)
    token = draw(allowed, rows, lengths) if choice == "any" else choose_greedy(allowed).token
    top_ids, top_logits = find_top(logits)
    total = jax.nn.logsumexp(logits, axis=-1)
    logprob = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - total
    return Token(token, _are_finite(logits), Scores(logprob, top_ids, top_logits - total[:, None]))


def choose_greedy(logits: Float[Array, "B V"]) -> Token:
    """Return the most likely token of each sequence; the lowest id wins a tie."""
    return Token(jnp.argmax(logits, axis=-1).astype(jnp.int32), _are_finite(logits))


def _are_finite(logits: Float[Array, "B V"]) -> Bool[Array, " B"]:
    """Return whether the largest logit of each sequence is finite; a NaN among the logits is the largest."""
    return jnp.isfinite(logits.max(axis=-1))


def score_tokens(
    unembed: Callable[[Array], Array], hidden: Float[Array, "T D"], tokens: Int[Array, " T"]
) -> Scores:
    """Score the token that follows each hidden state, `SCORE_BATCH` at a time."""

    def score_one(pair: tuple[Array, Array]) -> Scores:
        state, token = pair
        logprobs = jax.nn.log_softmax(unembed(state))
        return Scores(logprobs[token], *find_top(logprobs))

    return jax.lax.map(score_one, (hidden, tokens), batch_size=SCORE_BATCH)


def find_top(values: Float[Array, "*B V"]) -> tuple[Int[Array, "*B 20"], Float[Array, "*B 20"]]:
    """Return ids and values of the largest entries, in descending order.

    Two rounds find half of them each: XLA has a kernel for up to 16 entries and sorts whole rows for more.
    """
    values_above, ids_above = jax.lax.top_k(values, MAX_LOGPROBS // 2)
    others = jnp.put_along_axis(values, ids_above, -jnp.inf, axis=-1, inplace=False)
    values_below, ids_below = jax.lax.top_k(others, MAX_LOGPROBS - MAX_LOGPROBS // 2)
    ids = jnp.concatenate([ids_above, ids_below], axis=-1)
    return ids.astype(jnp.int32), jnp.concatenate([values_above, values_below], axis=-1)


def draw(
    logits: Float[Array, "B V"], rows: PackedParameters, positions: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Return the next token of each sequence.

    A draw depends only on the sequence's key and position, so streaming and batching do not change it.

    Args:
      logits: logits of each sequence.
      rows: sampling parameters of each sequence.
      positions: tokens of each sequence before the new one.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_greedy = rows.temperature == 0
    # The largest logit becomes 0 before the division, so that no temperature makes it infinite.
    shifted = logits - logits.max(axis=-1, keepdims=True)
    scaled = shifted / jnp.where(is_greedy, 1, rows.temperature)[:, None]
    # The largest of the scaled logits is 0.
    likely = jnp.where(scaled >= jnp.log(rows.min_p)[:, None], scaled, -jnp.inf)
    restricted = restrict(likely, rows.top_k, rows.top_p)
    keys = jax.vmap(jax.random.fold_in)(rows.keys, positions)
    drawn = jax.vmap(jax.random.categorical)(keys, restricted)
    return jnp.where(is_greedy, greedy, drawn.astype(jnp.int32))


def restrict(
    logits: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Set logits to -inf outside the top-k and top-p sets of each sequence; ties at the threshold stay."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    within = jnp.arange(logits.shape[-1]) < top_k[:, None]
    mass = jnp.cumsum(jax.nn.softmax(jnp.where(within, ordered, -jnp.inf), axis=-1), axis=-1)
    before = jnp.pad(mass, ((0, 0), (1, 0)))[:, :-1]
    count = jnp.sum(within & (before < top_p[:, None]), axis=-1, keepdims=True)
    threshold = jnp.take_along_axis(ordered, jnp.maximum(count, 1) - 1, axis=-1)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _mask_early_stops(logits: Array, rows: PackedParameters, lengths: Array) -> Array:
    """Set the logits of stop tokens to -inf in sequences below their minimum length."""
    too_short, out_of_bounds = lengths < rows.minimum, logits.shape[1]
    columns = jnp.where(too_short[:, None] & (rows.stop_ids >= 0), rows.stop_ids, out_of_bounds)
    return logits.at[jnp.arange(len(logits))[:, None], columns].set(-jnp.inf, mode="drop")
