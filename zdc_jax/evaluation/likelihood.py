"""Log-likelihoods of continuations under a model that reads them through its compressed cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.errors import MeshError, PromptError
from zdc_jax.evaluation.batches import padded_batches
from zdc_jax.generation.chunks import PREFILL_CHUNK, bucket, padded
from zdc_jax.generation.request import capacity_for, check_chunk, encode, warn_beyond_calibration
from zdc_jax.generation.sampling import is_whole
from zdc_jax.loading import LanguageModel
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.xla import by_query_blocks

_SMALLEST_COUNT = 8
"""Smallest padded number of scored tokens. Larger ones are padded to powers of two to limit compilation."""
_POSITIONS_PER_BLOCK = 64
"""Positions of each sequence whose logits are in memory at the same time."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Scores of the C tokens of a continuation.

    Attributes:
      log_probs: log-probabilities in nats, float32 [C].
      is_greedy: whether each token is the most likely one, bool [C].
    """

    log_probs: Float[np.ndarray, " C"]
    is_greedy: Bool[np.ndarray, " C"]


def score_continuations(
    model: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch: int = 1,
    prefill_chunk: int = PREFILL_CHUNK,
) -> Iterator[tuple[int, TokenScores]]:
    """Score each continuation after its context. The longest sequences are scored first.

    Context and continuation are read like a prompt of `generate`: into an empty cache, in chunks of
    `prefill_chunk` tokens. Sequences of similar length share a batch.

    Args:
      model: model on one device.
      pairs: token ids of each context and its continuation, at least one token each.
      batch: sequences per batch, at least 1. An incomplete batch is padded so that shapes repeat.
      prefill_chunk: tokens per chunk, as in `generate`.

    Returns:
      iterator over an index into `pairs` and its scores.

    Raises:
      PromptError: a context or continuation is empty, contains an id outside the vocabulary, or exceeds the
        positions of the model (the last token needs no position); `batch` is less than 1; `prefill_chunk` is
        invalid.
      MeshError: the model is on a mesh.
      CacheMemoryError: the KV cache does not fit into memory.
    """
    if model.network.mesh is not None:
        raise MeshError("scoring continuations does not support a mesh; load the model without mesh=")
    if not is_whole(batch) or batch < 1:
        raise PromptError(f"{batch=} must be a whole number >= 1")
    check_chunk(model, prefill_chunk)
    for index, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise PromptError(
                f"pair {index} has {len(context)} context tokens and {len(continuation)} continuation "
                "tokens; each must have at least one"
            )
        encode(model, list(continuation), 0)
    sequences = [
        _make_sequence(index, encode(model, [*context, *continuation[:-1]], 0), continuation)
        for index, (context, continuation) in enumerate(pairs)
    ]
    if sequences:
        warn_beyond_calibration(model, max(len(each.tokens) for each in sequences), stacklevel=3)
    sequences.sort(key=lambda sequence: -len(sequence.tokens))
    return _score_sequences(model.network, sequences, batch, prefill_chunk)


@dataclass(frozen=True, eq=False)
class _Sequence:
    """Tokens of one pair that are read.

    Attributes:
      index: index of the pair.
      tokens: token ids of the context and the continuation without its last token, int32 [T].
      targets: token to score after each of `tokens`, int32 [T]; -1 for none.
    """

    index: int
    tokens: np.ndarray
    targets: np.ndarray


def _make_sequence(index: int, tokens: np.ndarray, continuation: Sequence[int]) -> _Sequence:
    targets = np.full(len(tokens), -1, np.int32)
    targets[len(tokens) - len(continuation) :] = continuation
    return _Sequence(index, tokens, targets)


def _score_sequences(
    network: Transformer, sequences: list[_Sequence], batch: int, chunk: int
) -> Iterator[tuple[int, TokenScores]]:
    for part, count in padded_batches(sequences, batch):
        scored = zip(part, _score_batch(network, part, chunk), strict=True)
        yield from ((sequence.index, scores) for sequence, scores in islice(scored, count))


def _score_batch(network: Transformer, sequences: list[_Sequence], chunk: int) -> list[TokenScores]:
    """Score one batch. The first sequence must be the longest."""
    longest = len(sequences[0].tokens)
    capacity = capacity_for(longest, network.config.max_positions)
    cache = network.new_cache(batch=len(sequences), capacity=capacity)
    parts: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in sequences]
    for start in range(0, longest, chunk):
        width = min(bucket(longest - start), chunk, capacity)
        tokens = padded([each.tokens[start:][:width] for each in sequences], width)
        chunk_targets = [each.targets[start:][:width] for each in sequences]
        scored = [np.flatnonzero(targets >= 0) for targets in chunk_targets]
        count = bucket(max(map(len, scored)), _SMALLEST_COUNT)
        columns = padded(scored, count)
        targets = padded([each[at] for each, at in zip(chunk_targets, scored, strict=True)], count)
        end = np.array([min(len(each.tokens), start + width) for each in sequences], np.int32)
        log_probs, is_greedy, cache = _score_chunk(network, cache, tokens, end, columns, targets)
        for row, at in enumerate(scored):
            parts[row].append((np.asarray(log_probs)[row, : len(at)], np.asarray(is_greedy)[row, : len(at)]))
    return [TokenScores(*map(np.concatenate, zip(*each, strict=True))) for each in parts]


@partial(jax.jit, donate_argnums=1)
def _score_chunk(
    network: Transformer,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    end: Int[Array, " B"],
    columns: Int[Array, "B C"],
    targets: Int[Array, "B C"],
) -> tuple[Float[Array, "B C"], Bool[Array, "B C"], KVCache]:
    """Read a chunk, and score `targets` as the tokens that follow the columns `columns` of the chunk."""
    hidden, cache = network.extend(cache, tokens, end)
    hidden = jnp.take_along_axis(hidden, columns[..., None], axis=1)

    def score_block(hidden: Array, targets: Array) -> tuple[Array, Array]:
        logits = network.embeddings.unembed(hidden)
        target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return target_logits - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == targets

    log_probs, is_greedy = by_query_blocks(score_block, _POSITIONS_PER_BLOCK, hidden, targets)
    return log_probs, is_greedy, cache
