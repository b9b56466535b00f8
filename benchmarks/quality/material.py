"""Material that methods are judged on: windows of text, and documents with questions.

One network is measured under two protocols. `cached`: every token sees earlier ones through the cache, and
the context is read in chunks. `exact`: the context sees itself exactly and is then compressed, and only the
tokens after it are scored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.evaluation.answers import Answer, Protocol, answer_questions
from zdc_jax.evaluation.compile_ahead import compile_ahead
from zdc_jax.evaluation.perplexity import next_token_nll
from zdc_jax.evaluation.questions import QUESTION_TOKENS
from zdc_jax.evaluation.sheets import TaskDocument, context_length, make_task_documents
from zdc_jax.evaluation.tasks import chosen, names
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.generation.chunks import PREFILL_CHUNK
from zdc_jax.model.transformer import Transformer

CONTINUATION = 512
"""Tokens at the end of a window that are scored after an exact context, in chunks of `QUESTION_TOKENS`."""
TOPICS_LEFT_OUT = ("tinystories",)
"""Topics whose documents are too short for one window."""
TOKENS_AT_A_TIME = 131_072
"""Tokens of all sequences that are read together."""


@dataclass(frozen=True, eq=False)
class Material:
    """Windows of text, int32 [W, context], their topics, and documents whose questions fit into `context`."""

    windows: Int[np.ndarray, "W S"]
    topics: tuple[str, ...]
    documents: tuple[TaskDocument, ...]

    @property
    def context(self) -> int:
        """Tokens of a window, and of a document with any of its questions."""
        return self.windows.shape[1]

    @property
    def rows(self) -> int:
        """Largest number of windows, or documents, that are read together."""
        return TOKENS_AT_A_TIME // self.context

    def single(self) -> Self:
        """Return as much material as is read at once."""
        windows, documents = (_group(len(items), self.rows) for items in (self.windows, self.documents))
        return replace(self, windows=self.windows[:windows], documents=self.documents[:documents])


@dataclass(frozen=True, eq=False)
class Measured:
    """Results of one network.

    Attributes:
      nll: nats a token of each window, [W].
      answers: answers of each task, by document.
    """

    nll: Float[np.ndarray, " W"]
    answers: dict[str, list[tuple[Answer, ...]]]


def draw(
    checkpoint: Checkpoint, corpus: Path, split: str, *, context: int, windows: int, documents: int, seed: int
) -> Material:
    """Draw material from `corpus/<topic>/<split>.txt.xz`; windows and documents have different text."""
    files = sorted(corpus.glob(f"*/{split}.txt.xz"))
    tokens, topics = token_windows(
        read_documents([file for file in files if file.parent.name not in TOPICS_LEFT_OUT]),
        checkpoint.tokenizer(),
        length=context,
        num_windows=windows + documents,
        seed=seed,
        eos_id=checkpoint.config.eos_ids[0],
    )
    if len(tokens) < windows + documents:
        raise ValueError(
            f"{corpus} gives {len(tokens)} windows of {context} tokens, {windows + documents} asked"
        )
    S = context_length(context)
    documents_of_text = make_task_documents(
        chosen(names(), S),
        tokens[windows:, :S],
        checkpoint.tokenizer(),
        seed=seed,
        not_drawn=checkpoint.config.eos_ids,
    )
    return Material(tokens[:windows], tuple(topics[:windows]), tuple(documents_of_text))


def measure(network: Transformer, material: Material, protocol: Protocol) -> Measured:
    """Measure perplexity and answers of a network under one protocol.

    All chunks of a context have one width, and so have all questions, so that a new plan compiles few
    programs.
    """
    compile_ahead(network, lambda single: _measure(single, material.single(), protocol))
    return _measure(network, material, protocol)


def _measure(network: Transformer, material: Material, protocol: Protocol) -> Measured:
    def together(items):
        return _alike(items, material.rows)

    windows = [_window_nll(network, some, protocol) for some in together(list(material.windows))]
    collected: dict[str, list[tuple[Answer, ...]]] = {name: [] for name in material.documents[0].questions}
    for documents in together(material.documents):
        contexts = np.stack([document.context for document in documents])
        _, cache = read(network, contexts, material.context, protocol)
        for name, answers in answer_questions(network, cache, documents).items():
            collected[name] += answers
    return Measured(np.concatenate(windows), collected)


def _alike[T](items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Yield groups of one size, the largest up to `most`; another size would need another program."""
    size = _group(len(items), most)
    return (items[start : start + size] for start in range(0, len(items), size))


def _group(count: int, most: int) -> int:
    return next(size for size in range(max(1, min(most, count)), 0, -1) if count % size == 0)


def read(
    network: Transformer, contexts: Int[np.ndarray, "B S"], capacity: int, protocol: Protocol
) -> tuple[list[Array], KVCache]:
    """Read contexts; return hidden states of the chunks and the cache."""
    B, S = contexts.shape
    padded = np.zeros((B, capacity), np.int32)
    padded[:, :S] = contexts
    end = jnp.full(B, S, jnp.int32)
    if protocol == "exact":
        hidden, cache = network.read_prompt(jnp.asarray(padded), end, capacity=capacity)
        return [hidden], cache
    cache, chunks = network.new_cache(batch=B, capacity=capacity), []
    for start in range(0, S, PREFILL_CHUNK):
        chunk = jnp.asarray(padded[:, start : start + PREFILL_CHUNK])
        hidden, cache = network.extend(cache, chunk, jnp.minimum(end, start + PREFILL_CHUNK))
        chunks.append(hidden)
    return chunks, cache


def _window_nll(
    network: Transformer, windows: Sequence[np.ndarray], protocol: Protocol
) -> Float[np.ndarray, " B"]:
    """Return nats a token: of all tokens read through the cache, or of those after an exact context."""
    tokens = np.stack(windows)
    T = tokens.shape[1]
    if protocol == "cached":
        chunks, _ = read(network, tokens, T, protocol)
        nll = next_token_nll(network.embeddings, jnp.concatenate(chunks, 1), jnp.asarray(tokens))
        return np.asarray(nll).mean(1, dtype=np.float64)
    S = T - CONTINUATION
    _, cache = read(network, tokens[:, :S], T, protocol)
    chunks = []
    for start in range(S, T, QUESTION_TOKENS):
        chunk = jnp.asarray(tokens[:, start : start + QUESTION_TOKENS])
        hidden, cache = network.extend(cache, chunk, cache.lengths + QUESTION_TOKENS)
        chunks.append(hidden)
    nll = next_token_nll(network.embeddings, jnp.concatenate(chunks, 1), jnp.asarray(tokens[:, S:]))
    return np.asarray(nll).mean(1, dtype=np.float64)
