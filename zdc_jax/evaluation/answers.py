"""What a network answers: contexts are read once, then each question goes on from the same cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache, free_bytes
from zdc_jax.evaluation.questions import QUESTION_TOKENS, Question
from zdc_jax.evaluation.sheets import TaskDocument
from zdc_jax.generation.steps import PREFILL_CHUNK, bucket
from zdc_jax.model.transformer import Embeddings, Transformer

Protocol = Literal["cached", "exact"]
"""How a context is read. `cached`: each token sees those before it as the cache holds them. `exact`: tokens
of the context see each other as they are, and only what follows sees them as the cache holds them."""
COPIES_SHARE = 0.4
"""Of free memory that copies of a cache may take; writing to them takes as much again."""
SMALLEST_ANSWERS = 8
"""Answers are padded to powers of two from here on, so that shapes are few."""


@dataclass(frozen=True, eq=False)
class Answer:
    """One answer, token by token.

    log_probability: float32 [A], nats, of the right tokens, each behind those before it. right: bool [A],
    whether they are the most likely. depth: of the question.
    """

    log_probability: Float[np.ndarray, " A"]
    right: Bool[np.ndarray, " A"]
    depth: float | None = None


def read_contexts(
    network: Transformer, contexts: Int[np.ndarray, "B S"], *, room: int, protocol: Protocol
) -> tuple[Float[Array, "B D"], KVCache]:
    """Last hidden states of contexts, and a cache that holds them with `room` for more tokens.

    Layers run one after another, so that a plan not seen before compiles only the layers that are new.

    Raises:
      CacheMemoryError: the cache does not fit.
    """
    tokens = jnp.asarray(contexts)
    B, S = tokens.shape
    if protocol == "exact":
        hidden, cache = network.read_prompt(tokens, jnp.full(B, S, jnp.int32), capacity=S + room)
        return hidden[:, -1], cache
    cache, width = network.new_cache(batch=B, capacity=S + room), min(S, PREFILL_CHUNK)
    tokens = jnp.pad(tokens, ((0, 0), (0, -S % width)))  # Pieces of one width compile once.
    for start in range(0, S, width):
        end = jnp.full(B, min(S, start + width), jnp.int32)
        hidden, cache = network.extend(cache, tokens[:, start : start + width], end)
    return hidden[:, (S - 1) % width], cache


def answers_on(
    network: Transformer, documents: Sequence[TaskDocument], *, protocol: Protocol, batch: int = 1
) -> dict[str, list[tuple[Answer, ...]]]:
    """The answers to all questions of each task, sheet by sheet, `batch` sheets at a time.

    All questions are padded to one width, so that a plan not seen before compiles few programs.
    """
    found: dict[str, list[tuple[Answer, ...]]] = {}
    for start in range(0, len(documents), batch):
        piece = documents[start : start + batch]
        rows = [*piece, *[piece[-1]] * (batch - len(piece))]
        contexts = np.stack([document.context for document in rows])
        _, cache = read_contexts(network, contexts, room=QUESTION_TOKENS, protocol=protocol)
        for name, given in answer_questions(network, cache, rows).items():
            found.setdefault(name, []).extend(given[: len(piece)])
    return found


def answer_questions(
    network: Transformer, cache: KVCache, documents: Sequence[TaskDocument]
) -> dict[str, list[tuple[Answer, ...]]]:
    """The answers of each row of a cache to all questions of its sheet, by task.

    All are read in one call, each on a copy of its row; one after another where memory has no room for that.
    """
    questions = [[q for asked in document.questions.values() for q in asked] for document in documents]
    each = len(questions[0])
    needed, free = each * cache.bytes(), free_bytes()
    if free is not None and COPIES_SHARE * free < needed:
        by_question = [
            answers(network, cache, list(row), width=QUESTION_TOKENS) for row in zip(*questions, strict=True)
        ]
        rows = [iter(row) for row in zip(*by_question, strict=True)]
    else:
        copies = jax.tree.map(lambda leaf: jnp.repeat(leaf, each, axis=0), cache)
        flat = answers(network, copies, [q for row in questions for q in row], width=QUESTION_TOKENS)
        rows = [iter(flat[start : start + each]) for start in range(0, len(flat), each)]
    return {
        name: [tuple(islice(row, len(asked))) for row in rows]
        for name, asked in documents[0].questions.items()
    }


def answers(
    network: Transformer, cache: KVCache, questions: Sequence[Question], *, width: int | None = None
) -> list[Answer]:
    """The answer of each row of a cache to its own question; the cache stays as it was.

    width: tokens that questions are padded to; default what the longest needs.
    """
    B, width = len(questions), width or bucket(max(len(question.tokens) for question in questions))
    most = bucket(max(int(question.answer.sum()) for question in questions), SMALLEST_ANSWERS)
    tokens, at, right = (np.zeros((B, n), np.int32) for n in (width, most, most))
    for row, question in enumerate(questions):
        where = np.flatnonzero(question.answer)
        tokens[row, : len(question.tokens)] = question.tokens
        at[row, : len(where)] = where - 1  # A token is predicted where the one before it is read.
        right[row, : len(where)] = question.tokens[where]
    lengths = jnp.array([len(question.tokens) for question in questions], jnp.int32)
    hidden, _ = network.extend(cache, jnp.asarray(tokens), cache.lengths + lengths)
    log_probability, chosen = (
        np.asarray(each) for each in _scored(network.embeddings, hidden, jnp.asarray(at), jnp.asarray(right))
    )
    return [
        Answer(log_probability[row, :count], chosen[row, :count] == right[row, :count], question.depth)
        for row, question in enumerate(questions)
        for count in [int(question.answer.sum())]
    ]


@jax.jit
def _scored(
    embeddings: Embeddings,
    hidden: Float[Array, "B T D"],
    at: Int[Array, "B A"],
    right: Int[Array, "B A"],
) -> tuple[Float[Array, "B A"], Int[Array, "B A"]]:
    """Log-probability of `right` behind the positions `at`, float32, and the most likely token there.

    Row by row: at no time are there logits of all.
    """

    def row(given: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        hidden, at, right = given
        logits = embeddings.unembed(hidden[at])
        found = jnp.take_along_axis(logits, right[:, None], axis=-1)[:, 0]
        return found - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1)

    return jax.lax.map(row, (hidden, at, right))
