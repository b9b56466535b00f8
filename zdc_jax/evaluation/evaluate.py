"""A plan's model beside the unmodified one: perplexity, tasks over long ranges, and how each goes on."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.config import ModelConfig
from zdc_jax.errors import EvaluationError, TextError
from zdc_jax.evaluation import tasks as known
from zdc_jax.evaluation.agreement import (
    Agreement,
    Continuation,
    Departure,
    continuations,
    departures,
)
from zdc_jax.evaluation.answers import Answer, Protocol, answer_questions, read_contexts
from zdc_jax.evaluation.perplexity import PerplexityReport, compare, token_nll
from zdc_jax.evaluation.questions import QUESTION_TOKENS
from zdc_jax.evaluation.retention import Retention, retention
from zdc_jax.evaluation.sheets import ALIGNMENT, TaskDocument, context_length, make_task_documents
from zdc_jax.evaluation.splits import Split, documents_of, split_seed
from zdc_jax.evaluation.text import Document, token_windows
from zdc_jax.generation.steps import PREFILL_CHUNK
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

PERPLEXITY, AGREEMENT = "perplexity", "agreement"
"""What can be asked for beside the tasks of `zdc_jax.evaluation.tasks`."""
TASKS = (PERPLEXITY, AGREEMENT, *known.names())
LEAST_DOCUMENTS = 8
"""Sheets between two looks at whether there are enough; fewer say little about other text."""
FIRST_LOOK = 32
"""Sheets before the first look. Of what one sheet in twenty loses, eight show nothing two times in three, and
their interval closes on nothing lost."""
MOST_WINDOWS = 24
"""Windows of text for perplexity."""


@dataclass(frozen=True, eq=False)
class Material:
    """What is read at one length of contexts: windows of text for perplexity [W, context], and sheets."""

    context: int
    windows: Int[np.ndarray, "W T"] | None
    task_documents: Sequence[TaskDocument]
    agreement: bool


@dataclass(frozen=True)
class ContextReport:
    """What a plan costs in contexts of so many tokens; None and {} for what was not asked."""

    context: int
    perplexity: PerplexityReport | None
    agreement: Agreement | None
    tasks: Mapping[str, Retention]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value."""
        return asdict(self)


def prepare(
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    plan: CompressionPlan,
    documents: Iterable[Document],
    *,
    tasks: Sequence[str] = TASKS,
    contexts: Sequence[int] = (),
    split: Split = "report",
    max_documents: int = 128,
    seed: int = 0,
) -> list[Material]:
    """Text for `evaluate`, one item for each of `contexts`; checks all there is to check, without weights.

    Args:
      plan: sheets suit its caches; others that are to be read must have caches that begin pieces as its do.
      documents: of which the share of `split` is read.
      tasks: `perplexity`, `agreement` and names of `zdc_jax.evaluation.tasks`.
      contexts: tokens, questions included; default the model's positions, at most 4096.
      max_sheets: sheets at most, and windows of perplexity, of which there are at most `MOST_WINDOWS`.

    Raises:
      EvaluationError: no tokenizer, an unknown task, one that does not fit into a context, or an impossible
        number.
      TextError: too little text.
    """
    if tokenizer is None:
        raise EvaluationError("the model has no tokenizer, so no text can be read")
    for name, value, least in (("max_documents", max_documents, 1), ("seed", seed, 0)):
        if value < least:
            raise EvaluationError(f"{name}={value} must be >= {least}")
    if not tasks:
        raise EvaluationError(f"tasks={tasks!r} must name at least one of {', '.join(TASKS)}")
    for task in tasks:
        if task.partition("@")[0] not in TASKS:
            raise EvaluationError(f"task {task!r} must be one of {', '.join(TASKS)}")
    contexts = contexts or (min(config.max_positions, 4096),)
    for context in contexts:
        if not 2 <= context <= config.max_positions:
            raise EvaluationError(f"{context=} must be 2 to the model's {config.max_positions} positions")
    chosen = list(documents_of(split, documents))
    return [
        _material(config, tokenizer, plan, chosen, tasks, each, max_documents, split, seed)
        for each in contexts
    ]


def _material(
    config: ModelConfig,
    tokenizer: Tokenizer,
    plan: CompressionPlan,
    documents: list[Document],
    tasks: Sequence[str],
    context: int,
    max_documents: int,
    split: Split,
    seed: int,
) -> Material:
    seed = split_seed(split, seed)

    def windows(length: int, most: int) -> np.ndarray:
        eos_id = next(iter(config.eos_ids), None)
        found, _ = token_windows(
            documents, tokenizer, length=length, num_windows=most, seed=seed, eos_id=eos_id
        )
        if len(found) < (least := min(LEAST_DOCUMENTS, most)):
            raise TextError(
                f"too little text: {least} windows of {length} tokens ({least * length:,}) needed, "
                f"{len(found)} ({found.size:,}) found in the third of the text that {split!r} may read"
            )
        return found

    posed = known.chosen((task for task in tasks if task not in (PERPLEXITY, AGREEMENT)), context)
    task_documents: list[TaskDocument] = []
    if posed or AGREEMENT in tasks:
        length = context_length(context, _alignment(plan, config))
        task_documents = make_task_documents(
            posed, windows(length, max_documents), tokenizer, seed=seed, not_drawn=config.eos_ids
        )
    text = windows(context, min(max_documents, MOST_WINDOWS)) if PERPLEXITY in tasks else None
    return Material(context, text, task_documents, AGREEMENT in tasks)


def _alignment(plan: CompressionPlan, config: ModelConfig) -> int:
    """Where pieces of prompts and questions begin."""
    alignment = math.lcm(ALIGNMENT, *(spec.alignment for spec in plan.layer_caches(config.dtype)))
    if PREFILL_CHUNK % alignment:
        raise EvaluationError(
            f"the plan's caches begin pieces at multiples of {alignment}; {PREFILL_CHUNK} is none, at which "
            "contexts are cut"
        )
    return alignment


def evaluate(
    dense: Transformer,
    network: Transformer,
    materials: Sequence[Material],
    *,
    protocol: Protocol = "cached",
    batch: int = 1,
    watch: Callable[[str], None] = lambda _: None,
) -> tuple[ContextReport, ...]:
    """What `network` keeps of what `dense`, the unmodified one, can do; a report for each length of contexts.

    Args:
      materials: from `prepare`.
      protocol: how contexts of sheets are read. Perplexity is always that of text seen through the cache.
      batch: contexts at a time. watch: called after each batch, with how far it is.

    Raises:
      EvaluationError: `batch` below 1. CacheMemoryError: the caches do not fit.
    """
    options: dict[str, Any] = {"protocol": protocol, "batch": batch, "watch": watch}
    return tuple(Evaluation(dense, each, **options).of(network) for each in materials)


@dataclass(frozen=True, eq=False)
class Read:
    """What one model did on one sheet: answers by task, and how it went on.

    continuation: of the unmodified model. departure: of a plan's.
    """

    answers: Mapping[str, tuple[Answer, ...]]
    continuation: Continuation | None = None
    departure: Departure | None = None


class Evaluation:
    """Measures plans on the same material; what the unmodified model does is found once."""

    def __init__(
        self,
        dense: Transformer,
        material: Material,
        *,
        protocol: Protocol,
        batch: int,
        watch: Callable[[str], None] = lambda _: None,
    ):
        if batch < 1:
            raise EvaluationError(f"{batch=} must be >= 1")
        self.watch = watch
        self.dense, self.material, self.protocol, self.batch = dense, material, protocol, batch
        self._dense_read: list[Read] = []
        self._dense_nll: np.ndarray | None = None

    def of(self, network: Transformer) -> ContextReport:
        """Of one plan. Sheets are read until the retention of each task that counts is known well."""
        found, agreement = self._judge_documents(network)
        return ContextReport(self.material.context, self._perplexity(network), agreement, found)

    def _perplexity(self, network: Transformer) -> PerplexityReport | None:
        windows = self.material.windows
        if windows is None:
            return None
        if self._dense_nll is None:
            self._dense_nll = token_nll(self.dense, windows, batch=self.batch)
        return compare(network, self._dense_nll, windows, batch=self.batch)

    def _judge_documents(self, network: Transformer) -> tuple[dict[str, Retention], Agreement | None]:
        own, found, count = list[Read](), dict[str, Retention](), len(self.material.task_documents)
        while len(own) < count:
            enough = min(max(len(own) + LEAST_DOCUMENTS, FIRST_LOOK), count)
            while len(own) < enough:
                own += self._read(network, len(own))
                self.watch(f"{len(own)} of at most {count} contexts of {self.material.context} tokens")
            dense = self._dense_read[: len(own)]
            found = {
                task: retention(*([each.answers[task] for each in side] for side in (dense, own)))
                for task in own[0].answers
            }
            if all(each.known for each in found.values() if each.counts):
                break
        departures = [each.departure for each in own if each.departure is not None]
        return found, Agreement.of(departures) if departures else None

    def _read(self, network: Transformer, start: int) -> list[Read]:
        """What a plan's model does on the sheets from `start` on; the unmodified one reads them once."""
        if start >= len(self._dense_read):
            hidden, cache = self._contexts(self.dense, start)
            theirs = self._answers(self.dense, cache, start)
            if self.material.agreement:
                each = continuations(self.dense, hidden, cache)
                theirs = [replace(read, continuation=one) for read, one in zip(theirs, each, strict=False)]
            self._dense_read += theirs
        hidden, cache = self._contexts(network, start)
        own = self._answers(network, cache, start)
        if self.material.agreement:
            dense = self._batch(self._dense_read, start)
            each = [read.continuation for read in dense if read.continuation is not None]
            parted = departures(network, self.dense.embeddings, hidden, cache, each)
            own = [replace(read, departure=one) for read, one in zip(own, parted, strict=False)]
        return own

    def _contexts(self, network: Transformer, start: int) -> tuple[Array, KVCache]:
        contexts = np.stack(
            [document.context for document in self._batch(self.material.task_documents, start)]
        )
        return read_contexts(network, contexts, room=QUESTION_TOKENS, protocol=self.protocol)

    def _answers(self, network: Transformer, cache: KVCache, start: int) -> list[Read]:
        found = answer_questions(network, cache, self._batch(self.material.task_documents, start))
        rows = len(self.material.task_documents[start : start + self.batch])
        return [Read({task: given[row] for task, given in found.items()}) for row in range(rows)]

    def _batch[T](self, rows: Sequence[T], start: int) -> list[T]:
        """Those from `start` on, the last repeated where too few are left."""
        some = list(rows[start : start + self.batch])
        return some + some[-1:] * (self.batch - len(some))
