"""A plan's model beside the unmodified one: perplexity, tasks over long ranges, and how each goes on."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

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
from zdc_jax.evaluation.answers import Answer, Reading, answers, read_contexts
from zdc_jax.evaluation.perplexity import PerplexityReport, compare, token_nll
from zdc_jax.evaluation.questions import QUESTION_TOKENS
from zdc_jax.evaluation.retention import Retention, retention
from zdc_jax.evaluation.sheets import ALIGNMENT, Sheet, context_length, make_sheets
from zdc_jax.evaluation.splits import Split, documents_of, split_seed
from zdc_jax.evaluation.text import Document, token_windows
from zdc_jax.generation.steps import PREFILL_CHUNK
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

PERPLEXITY, AGREEMENT = "perplexity", "agreement"
"""What can be asked for beside the tasks of `zdc_jax.evaluation.tasks`."""
TASKS = (PERPLEXITY, AGREEMENT, *known.names())
LEAST_SHEETS = 8
"""Sheets between two looks at whether there are enough; fewer say little about other text."""
MOST_WINDOWS = 24
"""Windows of text for perplexity."""


@dataclass(frozen=True, eq=False)
class Material:
    """What is read at one length of contexts: windows of text for perplexity [W, context], and sheets."""

    context: int
    windows: Int[np.ndarray, "W T"] | None
    sheets: Sequence[Sheet]
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
    max_sheets: int = 128,
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
    for name, value, least in (("max_sheets", max_sheets, 1), ("seed", seed, 0)):
        if value < least:
            raise EvaluationError(f"{name}={value} must be >= {least}")
    for task in tasks:
        if task.partition("@")[0] not in TASKS:
            raise EvaluationError(f"task {task!r} must be one of {', '.join(TASKS)}")
    contexts = contexts or (min(config.max_positions, 4096),)
    for context in contexts:
        if not 2 <= context <= config.max_positions:
            raise EvaluationError(f"{context=} must be 2 to the model's {config.max_positions} positions")
    chosen = list(documents_of(split, documents))
    return [
        _material(config, tokenizer, plan, chosen, tasks, each, max_sheets, split, seed) for each in contexts
    ]


def _material(
    config: ModelConfig,
    tokenizer: Tokenizer,
    plan: CompressionPlan,
    documents: list[Document],
    tasks: Sequence[str],
    context: int,
    max_sheets: int,
    split: Split,
    seed: int,
) -> Material:
    seed = split_seed(split, seed)

    def windows(length: int, most: int) -> np.ndarray:
        eos_id = next(iter(config.eos_ids), None)
        found, _ = token_windows(
            documents, tokenizer, length=length, num_windows=most, seed=seed, eos_id=eos_id
        )
        if len(found) < (least := min(LEAST_SHEETS, most)):
            raise TextError(
                f"too little text: {least} windows of {length} tokens ({least * length:,}) needed, "
                f"{len(found)} ({found.size:,}) found in the third of the text that {split!r} may read"
            )
        return found

    posed = known.chosen((task for task in tasks if task not in (PERPLEXITY, AGREEMENT)), context)
    sheets: list[Sheet] = []
    if posed or AGREEMENT in tasks:
        length = context_length(context, _alignment(plan, config))
        sheets = make_sheets(
            posed, windows(length, max_sheets), tokenizer, seed=seed, not_drawn=config.eos_ids
        )
    text = windows(context, min(max_sheets, MOST_WINDOWS)) if PERPLEXITY in tasks else None
    return Material(context, text, sheets, AGREEMENT in tasks)


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
    reading: Reading = "cached",
    batch: int = 1,
) -> tuple[ContextReport, ...]:
    """What `network` keeps of what `dense`, the unmodified one, can do; a report for each length of contexts.

    Args:
      materials: from `prepare`.
      reading: how contexts of sheets are read. Perplexity is always that of text seen through the cache.
      batch: contexts at a time.

    Raises:
      EvaluationError: `batch` below 1. CacheMemoryError: the caches do not fit.
    """
    return tuple(Evaluation(dense, each, reading=reading, batch=batch).of(network) for each in materials)


class Evaluation:
    """Measures plans on the same material; what the unmodified model does is found once."""

    def __init__(self, dense: Transformer, material: Material, *, reading: Reading, batch: int):
        if batch < 1:
            raise EvaluationError(f"{batch=} must be >= 1")
        self.dense, self.material, self.reading, self.batch = dense, material, reading, batch
        self._dense_answers: list[dict[str, list[Answer]]] = []
        self._continuations: list[Continuation] = []
        self.next_token_nll: np.ndarray | None = None

    def of(self, network: Transformer) -> ContextReport:
        """Of one plan. Sheets are read until the retention of each task that counts is known well."""
        found, agreement = self._sheets(network)
        return ContextReport(self.material.context, self._perplexity(network), agreement, found)

    def _perplexity(self, network: Transformer) -> PerplexityReport | None:
        windows = self.material.windows
        if windows is None:
            return None
        if self.next_token_nll is None:
            self.next_token_nll = token_nll(self.dense, windows, batch=self.batch)
        return compare(network, self.next_token_nll, windows, batch=self.batch)

    def _sheets(self, network: Transformer) -> tuple[dict[str, Retention], Agreement | None]:
        sheets, own, parted = self.material.sheets, list[dict[str, list[Answer]]](), list[Departure]()
        found: dict[str, Retention] = {}
        while len(own) < len(sheets):
            look = len(own) + LEAST_SHEETS
            while len(own) < min(look, len(sheets)):
                start = len(own)
                self._read_dense(start)
                some, others = self._read(network, start)
                own += some
                parted += others
            dense = self._dense_answers[: len(own)]
            found = {task: retention(*([s[task] for s in side] for side in (dense, own))) for task in own[0]}
            if all(each.known for each in found.values() if each.counts):
                break
        return found, Agreement.of(parted) if parted else None

    def _read_dense(self, start: int) -> None:
        """Finds what the unmodified model does on the sheets from `start` on, unless it is known."""
        if start < len(self._dense_answers):
            return
        batch, rows = self._batch(start)
        contexts = np.stack([sheet.context for sheet in batch])
        hidden, cache = read_contexts(self.dense, contexts, room=QUESTION_TOKENS, reading=self.reading)
        self._dense_answers += _answered(self.dense, cache, batch)[:rows]
        if self.material.agreement:
            self._continuations += continuations(self.dense, hidden, cache)[:rows]

    def _read(
        self, network: Transformer, start: int
    ) -> tuple[list[dict[str, list[Answer]]], list[Departure]]:
        """Answers on the sheets from `start` on, and where continuations part."""
        batch, rows = self._batch(start)
        contexts = np.stack([sheet.context for sheet in batch])
        hidden, cache = read_contexts(network, contexts, room=QUESTION_TOKENS, reading=self.reading)
        found = _answered(network, cache, batch)[:rows]
        if not self.material.agreement:
            return found, []
        theirs = self._continuations[start:][: len(batch)]
        theirs += theirs[-1:] * (len(batch) - len(theirs))
        parted = departures(network, self.dense.embeddings, hidden, cache, theirs)
        return found, parted[:rows]

    def _batch(self, start: int) -> tuple[list[Sheet], int]:
        """The sheets from `start` on, the last repeated where too few are left, and how many there were."""
        some = list(self.material.sheets[start : start + self.batch])
        return some + some[-1:] * (self.batch - len(some)), len(some)


def _answered(network: Transformer, cache: Any, sheets: Sequence[Sheet]) -> list[dict[str, list[Answer]]]:
    """Answers of each row of a cache to the questions of its sheet, by task."""
    found: list[dict[str, list[Answer]]] = [{} for _ in sheets]
    for task in sheets[0].questions:
        asked = zip(*(sheet.questions[task] for sheet in sheets), strict=True)
        by_question = [answers(network, cache, questions) for questions in asked]
        for row, each in enumerate(zip(*by_question, strict=True)):
            found[row][task] = list(each)
    return found
