"""Answers of a network to questions: each context is read once, and all its questions use the same cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched, islice
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache, free_bytes
from zdc_jax.evaluation.batches import padded_batches
from zdc_jax.evaluation.questions import QUESTION_TOKENS, Question
from zdc_jax.evaluation.sheets import TaskDocument
from zdc_jax.generation.chunks import PREFILL_CHUNK, bucket, padded
from zdc_jax.generation.steps import take_last
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.model.transformer import Transformer

Protocol = Literal["cached", "exact"]
"""Protocol for reading a context. `cached`: each token attends to earlier tokens as the cache stores them.
`exact`: tokens of the context attend to each other without compression; only later tokens read the cache."""
COPIES_SHARE = 0.4
"""Share of the free memory for copies of a cache. Writing to the copies needs the same amount again."""
SMALLEST_ANSWERS = 8
"""Smallest padded number of answer tokens. Larger ones are padded to powers of two to limit compilation."""


@dataclass(frozen=True, eq=False)
class Answer:
    """Probabilities of the A tokens of one correct answer.

    Attributes:
      log_probability: log-probability of each token in nats, given all tokens before it; float32 [A].
      right: whether each token is the most likely one, bool [A].
      depth: depth of the question (`Question.depth`).
    """

    log_probability: Float[np.ndarray, " A"]
    right: Bool[np.ndarray, " A"]
    depth: float | None = None


def read_contexts(
    network: Transformer, contexts: Int[np.ndarray, "B S"], *, room: int, protocol: Protocol
) -> tuple[Float[Array, "B D"], KVCache]:
    """Read contexts into a new cache.

    Layers run one after another, so that a new plan compiles only layers that no earlier plan had.

    Args:
      network: network to run.
      contexts: token ids, int32.
      room: tokens that can be added to the cache later.
      protocol: how contexts are read (`Protocol`).

    Returns:
      last hidden states, and the cache.

    Raises:
      CacheMemoryError: the cache does not fit into memory.
    """
    B, S = contexts.shape
    lengths = np.full(B, S, np.int32)
    return read_prompts(network, contexts, lengths, capacity=S + room, protocol=protocol)


def read_prompts(
    network: Transformer,
    tokens: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, " B"],
    *,
    capacity: int,
    protocol: Protocol,
) -> tuple[Float[Array, "B D"], KVCache]:
    """Read prompts of different lengths into a new cache, as `read_contexts` does.

    Args:
      network: network to run.
      tokens: token ids, int32, padded on the right.
      lengths: tokens of each prompt, int32, at least 1.
      capacity: tokens that the cache can hold for each sequence.
      protocol: how prompts are read (`Protocol`).

    Returns:
      hidden states of the last token of each prompt, and the cache.

    Raises:
      CacheMemoryError: the cache does not fit into memory.
    """
    (B, T), ends = tokens.shape, jnp.asarray(lengths)
    if protocol == "exact":
        hidden, cache = network.read_prompt(jnp.asarray(tokens), ends, capacity=capacity)
        return take_last(hidden, ends), cache
    cache, width = network.new_cache(batch=B, capacity=capacity), min(T, PREFILL_CHUNK)
    chunks = jnp.pad(jnp.asarray(tokens), ((0, 0), (0, -T % width)))  # Chunks of one width compile once.
    last = None
    for start in range(0, T, width):
        chunk = chunks[:, start : start + width]
        hidden, cache = network.extend(cache, chunk, jnp.minimum(ends, start + width))
        newest = take_last(hidden, jnp.minimum(ends - start, width))
        last = newest if last is None else jnp.where((ends > start)[:, None], newest, last)
    assert last is not None  # There is at least one token.
    return last, cache


def answers_on(
    network: Transformer, documents: Sequence[TaskDocument], *, protocol: Protocol, batch: int = 1
) -> dict[str, list[tuple[Answer, ...]]]:
    """Return the answers to all questions of task documents, which are read `batch` at a time.

    All questions are padded to one width, so that a new plan compiles few programs.

    Returns:
      for each task, the answers of each document.
    """
    by_task: dict[str, list[tuple[Answer, ...]]] = {}
    for part, count in padded_batches(documents, batch):
        contexts = np.stack([document.context for document in part])
        _, cache = read_contexts(network, contexts, room=QUESTION_TOKENS, protocol=protocol)
        for name, by_document in answer_questions(network, cache, part).items():
            by_task.setdefault(name, []).extend(by_document[:count])
    return by_task


def answer_questions(
    network: Transformer, cache: KVCache, documents: Sequence[TaskDocument]
) -> dict[str, list[tuple[Answer, ...]]]:
    """Return the answers to all questions of task documents whose contexts are in a cache.

    All questions run in one call, each on a copy of its sequence in the cache. If memory is short, they run
    one question per document at a time.

    Args:
      network: network that read the contexts.
      cache: cache with one sequence per document; it is not modified.
      documents: task documents with the same number of questions of each task.

    Returns:
      for each task, the answers of each document.
    """
    questions = [
        [question for of_task in document.questions.values() for question in of_task]
        for document in documents
    ]
    count = len(questions[0])
    needed, free = count * cache.bytes(), free_bytes()
    if free is not None and COPIES_SHARE * free < needed:
        by_question = [
            answers(network, cache, list(one_each), width=QUESTION_TOKENS)
            for one_each in zip(*questions, strict=True)
        ]
        by_document = [iter(row) for row in zip(*by_question, strict=True)]
    else:
        copies = jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), cache)
        flat = answers(network, copies, [q for row in questions for q in row], width=QUESTION_TOKENS)
        by_document = [iter(row) for row in batched(flat, count)]
    return {
        name: [tuple(islice(row, len(of_task))) for row in by_document]
        for name, of_task in documents[0].questions.items()
    }


def answers(
    network: Transformer, cache: KVCache, questions: Sequence[Question], *, width: int | None = None
) -> list[Answer]:
    """Return the answer of each sequence in a cache to its own question. The cache is not modified.

    Args:
      network: network that filled the cache.
      cache: cache with one sequence per question.
      questions: questions to ask.
      width: tokens that questions are padded to. Default: a width that fits the longest question.
    """
    lengths = np.array([len(question.tokens) for question in questions], np.int32)
    tokens = padded([question.tokens for question in questions], width or bucket(int(lengths.max())))
    counts = [int(question.answer.sum()) for question in questions]
    most = bucket(max(counts), SMALLEST_ANSWERS)
    # A token is predicted where the one before it is read.
    at = padded([np.flatnonzero(question.answer) - 1 for question in questions], most)
    right = padded([question.tokens[question.answer] for question in questions], most)
    hidden, _ = network.extend(cache, jnp.asarray(tokens), cache.lengths + jnp.asarray(lengths))
    log_probability, most_likely = map(
        np.asarray, _score_tokens(network.embeddings, hidden, jnp.asarray(at), jnp.asarray(right))
    )
    return [
        Answer(log_probability[row, :count], most_likely[row, :count] == right[row, :count], question.depth)
        for row, (question, count) in enumerate(zip(questions, counts, strict=True))
    ]


@jax.jit
def _score_tokens(
    embeddings: Embeddings,
    hidden: Float[Array, "B T D"],
    at: Int[Array, "B A"],
    right: Int[Array, "B A"],
) -> tuple[Float[Array, "B A"], Int[Array, "B A"]]:
    """Return the log-probabilities of the tokens `right` after the positions `at`, and the likeliest tokens.

    Sequences are mapped one by one, so that only the logits of one sequence are in memory.
    """

    def score_sequence(arrays: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        hidden, at, right = arrays
        logits = embeddings.unembed(hidden[at])
        right_logits = jnp.take_along_axis(logits, right[:, None], axis=-1)[:, 0]
        return right_logits - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1)

    return jax.lax.map(score_sequence, (hidden, at, right))
