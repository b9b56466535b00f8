"""How likely continuations are to a model that reads them through its compressed cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.errors import MeshError, PromptError
from zdc_jax.generation.request import capacity_for, check_chunk, encode, warn_beyond_calibration
from zdc_jax.generation.sampling import is_whole
from zdc_jax.generation.steps import PREFILL_CHUNK, bucket, padded
from zdc_jax.loading import LanguageModel
from zdc_jax.model.transformer import Transformer

_SMALLEST_COUNT = 8
"""Scored tokens of a piece are padded to powers of two from here on, so new lengths rarely recompile."""
_POSITIONS_PER_BLOCK = 64
"""Positions whose logits are in memory at once, for each row of a batch."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Of each token of a continuation: log-probability in nats, float32, and whether it is the likeliest."""

    log_probs: Float[np.ndarray, " C"]
    is_greedy: Bool[np.ndarray, " C"]


def score_continuations(
    model: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch: int = 1,
    prefill_chunk: int = PREFILL_CHUNK,
) -> Iterator[tuple[int, TokenScores]]:
    """Scores of each continuation behind its context, as they come, the longest first.

    Context and continuation are read as `generate` reads a prompt: into an empty cache, `prefill_chunk`
    tokens at a time. Rows of like length go together.

    Args:
      model: on one device, not on a mesh.
      pairs: token ids of a context and of its continuation, at least one each.
      batch: rows that are read at once, 1 or more; the last ones are filled up, so that shapes repeat.

    Returns:
      pairs of an index into `pairs` and its scores.

    Raises:
      PromptError: an empty context or continuation, an id outside the vocabulary, or more tokens than the
        model has positions; the last token of a continuation needs none. A `batch` below 1; a `prefill_chunk`
        that `generate` would not take.
      MeshError: a model on a mesh.
      CacheMemoryError: the KV cache does not fit.
    """
    if not isinstance(model.network, Transformer):
        raise MeshError("the model is on a mesh; to score continuations, load it without mesh=")
    if not is_whole(batch) or batch < 1:
        raise PromptError(f"{batch=} must be a whole number >= 1")
    check_chunk(model, prefill_chunk)
    for index, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise PromptError(
                f"pair {index} has {len(context)} tokens of context and {len(continuation)} behind it; "
                "each must have one or more"
            )
        encode(model, list(continuation), 0)
    rows = [_Row.of(index, encode(model, [*a, *b[:-1]], 0), b) for index, (a, b) in enumerate(pairs)]
    if rows:
        warn_beyond_calibration(model, max(len(row.tokens) for row in rows), stacklevel=3)
    return _scored(model.network, sorted(rows, key=lambda row: -len(row.tokens)), batch, prefill_chunk)


@dataclass(frozen=True, eq=False)
class _Row:
    """What is read of one pair: tokens [T], and behind each of them the token to score; -1 in the context."""

    index: int
    tokens: np.ndarray
    targets: np.ndarray

    @classmethod
    def of(cls, index: int, tokens: np.ndarray, continuation: Sequence[int]) -> "_Row":
        targets = np.full(len(tokens), -1, np.int32)
        targets[len(tokens) - len(continuation) :] = continuation
        return cls(index, tokens, targets)


def _scored(
    network: Transformer, rows: list[_Row], batch: int, chunk: int
) -> Iterator[tuple[int, TokenScores]]:
    size = min(batch, len(rows))
    for start in range(0, len(rows), batch):
        together = rows[start : start + batch]
        filled = together + together[-1:] * (size - len(together))
        for row, scores in zip(together, _score_batch(network, filled, chunk), strict=False):
            yield row.index, scores


def _score_batch(network: Transformer, rows: list[_Row], chunk: int) -> list[TokenScores]:
    """Scores of rows of which the first is the longest."""
    longest = len(rows[0].tokens)
    capacity = capacity_for(longest, network.config.max_positions)
    cache = network.new_cache(batch=len(rows), capacity=capacity)
    found: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in rows]
    for start in range(0, longest, chunk):
        width = min(bucket(longest - start), chunk, capacity)
        tokens = padded([row.tokens[start:][:width] for row in rows], width)
        pieces = [row.targets[start:][:width] for row in rows]
        scored = [np.flatnonzero(piece >= 0) for piece in pieces]
        count = bucket(max(map(len, scored)), _SMALLEST_COUNT)
        columns = padded(scored, count)
        targets = padded([piece[at] for piece, at in zip(pieces, scored, strict=True)], count)
        end = np.array([min(len(row.tokens), start + width) for row in rows], np.int32)
        log_probs, is_greedy, cache = _score_piece(network, cache, tokens, end, columns, targets)
        for row, at in enumerate(scored):
            found[row].append((np.asarray(log_probs)[row, : len(at)], np.asarray(is_greedy)[row, : len(at)]))
    return [TokenScores(*map(np.concatenate, zip(*pieces, strict=True))) for pieces in found]


@partial(jax.jit, donate_argnums=1)
def _score_piece(
    network: Transformer,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    end: Int[Array, " B"],
    columns: Int[Array, "B C"],
    targets: Int[Array, "B C"],
) -> tuple[Float[Array, "B C"], Bool[Array, "B C"], KVCache]:
    """Reads a piece; scores `targets` as the tokens behind those in `columns`."""
    hidden, cache = network.extend(cache, tokens, end)
    hidden = jnp.take_along_axis(hidden, columns[..., None], axis=1)

    def block(given: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, target = given
        logits = network.embeddings.unembed(hidden)
        chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == target

    size = min(_POSITIONS_PER_BLOCK, targets.shape[1])

    def split(x):
        return jnp.stack(jnp.split(x, x.shape[1] // size, axis=1))

    def join(x):
        return jnp.concatenate(list(x), axis=1)

    log_probs, is_greedy = jax.lax.map(block, (split(hidden), split(targets)))
    return join(log_probs), join(is_greedy), cache
