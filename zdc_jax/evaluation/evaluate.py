"""Evaluation of a plan compared with the unmodified model: perplexity, long-context tasks and agreement."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.config import ModelConfig
from zdc_jax.errors import EvaluationError, TextError
from zdc_jax.evaluation import tasks as task_modules
from zdc_jax.evaluation.agreement import (
    Agreement,
    Continuation,
    Divergence,
    compare_continuations,
    continue_contexts,
)
from zdc_jax.evaluation.answers import Answer, Protocol, answer_questions, answers_on, read_contexts
from zdc_jax.evaluation.batches import pad_batch
from zdc_jax.evaluation.compile_ahead import compile_ahead
from zdc_jax.evaluation.long_agreement import (
    LONG_TOKENS,
    MAX_PROMPTS,
    LongAgreement,
    compare_texts,
    write_texts,
)
from zdc_jax.evaluation.perplexity import PerplexityReport, compare, predict
from zdc_jax.evaluation.questions import QUESTION_TOKENS
from zdc_jax.evaluation.retention import Retention, retention
from zdc_jax.evaluation.ruler import ALL as RULER
from zdc_jax.evaluation.ruler import RECIPES
from zdc_jax.evaluation.ruler.answer import score_task
from zdc_jax.evaluation.ruler.haystack import collect_words
from zdc_jax.evaluation.ruler.prompt import RulerTask, Setting, make_task
from zdc_jax.evaluation.ruler.score import RulerScore, compare_scores
from zdc_jax.evaluation.sheets import ALIGNMENT, TaskDocument, context_length, make_task_documents
from zdc_jax.evaluation.splits import Split, documents_of, split_seed
from zdc_jax.evaluation.text import Document, token_windows
from zdc_jax.generation.chunks import PREFILL_CHUNK
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

PERPLEXITY, AGREEMENT, LONG_AGREEMENT = "perplexity", "agreement", "long_agreement"
"""Names of the measurements that are not tasks."""
TASKS = (PERPLEXITY, AGREEMENT, *task_modules.names())
"""Measurements that are made by default."""
ALL_TASKS = (*TASKS, LONG_AGREEMENT, RULER, *RECIPES)
"""All names that `prepare` accepts. Some tasks also accept a distance, for example `copy@1024`."""
MIN_DOCUMENTS = 8
"""Fewest task documents to evaluate, and documents between two checks of the retention intervals."""
FIRST_CHECK = 32
"""Task documents before the first check. A sample of eight often misses a loss in one document of twenty (two
times in three), and its interval is then too narrow."""
MAX_WINDOWS = 25
"""Largest number of windows of text for perplexity; above 200,000 tokens at a context of 8,192."""


@dataclass(frozen=True, eq=False)
class Material:
    """Text for the evaluation at one context length.

    Attributes:
      context: context length in tokens, including questions.
      windows: windows of text for perplexity, int32 [W, context]; None if perplexity was not requested.
      task_documents: documents for tasks and agreement.
      agreement: whether to measure agreement.
      long_prompts: prompts of long texts, int32 [n, context]; None if long agreement was not requested.
      ruler: samples of each requested task of RULER.
    """

    context: int
    windows: Int[np.ndarray, "W T"] | None
    task_documents: Sequence[TaskDocument]
    agreement: bool
    long_prompts: Int[np.ndarray, "n T"] | None
    ruler: Mapping[str, RulerTask]


@dataclass(frozen=True)
class ContextReport:
    """Evaluation of a plan at one context length.

    Attributes:
      context: context length in tokens.
      perplexity: perplexity report; None if not requested.
      agreement: agreement of continuations; None if not requested.
      tasks: retention of each requested task of `zdc_jax.evaluation.tasks`.
      long_agreement: agreement and repetition of long texts; None if not requested.
      ruler: score of each requested task of RULER.
    """

    context: int
    perplexity: PerplexityReport | None
    agreement: Agreement | None
    tasks: Mapping[str, Retention]
    long_agreement: LongAgreement | None
    ruler: Mapping[str, RulerScore]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
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
    """Prepare the text for `evaluate`, one item for each context length.

    All arguments are checked here, before any weights are loaded.

    Args:
      config: architecture of the model.
      tokenizer: tokenizer of the model.
      plan: plan to evaluate. The context lengths match the alignment of its caches, so other plans can use
        the same material only if their caches have the same alignment.
      documents: documents; only the passages of `split` are used. None are needed where no task reads text
        (`reads_text`).
      tasks: names from `ALL_TASKS`; `ruler` stands for all tasks of RULER.
      contexts: context lengths in tokens, including questions. Default: the positions of the model, at most
        4096.
      split: split of the text to use.
      max_documents: largest number of task documents, and of perplexity windows if less than `MAX_WINDOWS`;
        number of samples of each task of RULER.
      seed: seed for choosing text and for drawing tasks.

    Raises:
      EvaluationError: the tokenizer is missing, a task is unknown or does not fit into a context, or a number
        is out of range.
      TextError: the text is too short.
    """
    if tokenizer is None:
        raise EvaluationError("the model has no tokenizer, which is needed to read text")
    for name, value, least in (("max_documents", max_documents, 1), ("seed", seed, 0)):
        if value < least:
            raise EvaluationError(f"{name}={value} must be >= {least}")
    if not tasks:
        raise EvaluationError(f"tasks={tasks!r} must name at least one of {', '.join(ALL_TASKS)}")
    for task in tasks:
        if task.partition("@")[0] not in ALL_TASKS:
            near = get_close_matches(task, ALL_TASKS, n=1)
            advice = f"did you mean {near[0]}? It " if near else ""
            raise EvaluationError(f"task={task!r}: unknown; {advice}must be one of {', '.join(ALL_TASKS)}")
    contexts = contexts or (min(config.max_positions, 4096),)
    for context in contexts:
        if not 2 <= context <= config.max_positions:
            raise EvaluationError(f"{context=} must be 2 to the model's {config.max_positions} positions")
        if LONG_AGREEMENT in tasks and context + LONG_TOKENS > config.max_positions:
            raise EvaluationError(
                f"{context=}: task '{LONG_AGREEMENT}' generates {LONG_TOKENS} tokens after the context, but "
                f"the model has {config.max_positions} positions; choose contexts of at most "
                f"{config.max_positions - LONG_TOKENS} tokens or leave out the task"
            )
    own_documents, own_seed = list(documents_of(split, documents)), split_seed(split, seed)
    preparation = _Preparation(config, tokenizer, plan, own_documents, tasks, max_documents, split, own_seed)
    return [preparation.make_material(context) for context in contexts]


@dataclass(frozen=True)
class _Preparation:
    """Choice of the text for all context lengths; the attributes are the arguments of `prepare`."""

    config: ModelConfig
    tokenizer: Tokenizer
    plan: CompressionPlan
    documents: list[Document]
    tasks: Sequence[str]
    max_documents: int
    split: Split
    seed: int

    def make_material(self, context: int) -> Material:
        """Prepare the text of one context length."""
        alignment = self._compute_alignment()
        posed = (task for task in self.tasks if task.partition("@")[0] in task_modules.names())
        poses = task_modules.chosen(posed, context)
        windows, task_documents, long_prompts = None, list[TaskDocument](), None
        if poses or AGREEMENT in self.tasks:
            task_documents = make_task_documents(
                poses,
                self._cut_windows(context_length(context, alignment), self.max_documents),
                self.tokenizer,
                seed=self.seed,
                not_drawn=self.config.eos_ids,
            )
        if PERPLEXITY in self.tasks:
            windows = self._cut_windows(context, min(self.max_documents, MAX_WINDOWS))
        if LONG_AGREEMENT in self.tasks:
            long_prompts = self._cut_windows(context, min(self.max_documents, MAX_PROMPTS))
        return Material(
            context=context,
            windows=windows,
            task_documents=task_documents,
            agreement=AGREEMENT in self.tasks,
            long_prompts=long_prompts,
            ruler=self._make_ruler_tasks(context),
        )

    def _compute_alignment(self) -> int:
        """Return the alignment of the positions at which chunks and questions can begin."""
        if set(self.tasks) == {PERPLEXITY}:
            return ALIGNMENT
        specs = self.plan.layer_caches(self.config.dtype)
        alignment = math.lcm(ALIGNMENT, *(spec.alignment for spec in specs))
        if PREFILL_CHUNK % alignment:
            raise EvaluationError(
                f"the plan needs chunks aligned to {alignment} tokens, but contexts are read in chunks of "
                f"{PREFILL_CHUNK}; use a plan whose alignment divides {PREFILL_CHUNK}"
            )
        return alignment

    def _cut_windows(self, length: int, most: int) -> np.ndarray:
        eos_id = next(iter(self.config.eos_ids), None)
        windows, _ = token_windows(
            self.documents, self.tokenizer, length=length, num_windows=most, seed=self.seed, eos_id=eos_id
        )
        if len(windows) < (least := min(MIN_DOCUMENTS, most)):
            raise TextError(
                f"too little text: {least} windows of {length} tokens ({least * length:,}) are needed, but "
                f"split {self.split!r}, a third of the text, has {len(windows)} ({windows.size:,}); give "
                f"{-(-least // len(windows))} times as much text, or choose a shorter context"
            )
        return windows

    def _make_ruler_tasks(self, context: int) -> dict[str, RulerTask]:
        names = [name for name in RECIPES if name in self.tasks or RULER in self.tasks]
        words = collect_words(self.documents, context)  # A word has at least one token.
        if not words and (reading := [name for name in names if RECIPES[name].needs_text]):
            raise TextError(
                f"too little text: tasks {', '.join(reading)} hide their needles in text, but split "
                f"{self.split!r}, a third of the text, has none; add text"
            )
        setting, count = Setting(context, self.tokenizer, words), self.max_documents
        return {name: make_task(name, RECIPES[name], setting, count=count, seed=self.seed) for name in names}


def reads_text(task: str) -> bool:
    """Return whether a task needs documents: all do, except tasks of RULER without a haystack of text."""
    return task not in RECIPES or RECIPES[task].needs_text


def evaluate(
    dense: Transformer,
    network: Transformer,
    materials: Sequence[Material],
    *,
    protocol: Protocol = "cached",
    batch: int = 1,
    watch: Callable[[str], None] = lambda _: None,
) -> tuple[ContextReport, ...]:
    """Evaluate a network compared with the unmodified model.

    Args:
      dense: the unmodified model.
      network: network under a plan.
      materials: text from `prepare`.
      protocol: how the contexts of task documents are read. Perplexity always reads text through the cache.
      batch: contexts per batch.
      watch: function called with a progress message after each batch.

    Returns:
      one report for each item of `materials`.

    Raises:
      EvaluationError: `batch` is less than 1.
      CacheMemoryError: the caches do not fit into memory.
    """
    return tuple(
        Evaluation(dense, material, protocol=protocol, batch=batch, watch=watch).evaluate(network)
        for material in materials
    )


@dataclass(frozen=True, eq=False)
class DocumentResult[T]:
    """Result of one model on one task document.

    Attributes:
      answers: answers by task.
      continued: continuation of the context for the unmodified model, or the divergence from it for a plan;
        None if agreement is not measured.
    """

    answers: Mapping[str, tuple[Answer, ...]]
    continued: T | None


class Evaluation:
    """Evaluates plans on the same material. The unmodified model is run only once.

    Args:
      dense: the unmodified model.
      material: text from `prepare`.
      protocol: how the contexts of task documents are read.
      batch: contexts per batch, at least 1.
      first_check: task documents to read before the retention intervals are checked for the first time;
        default `FIRST_CHECK`.
      watch: function called with a progress message after each batch.

    Raises:
      EvaluationError: `batch` is less than 1.
    """

    def __init__(
        self,
        dense: Transformer,
        material: Material,
        *,
        protocol: Protocol,
        batch: int,
        first_check: int | None = None,
        watch: Callable[[str], None] = lambda _: None,
    ):
        if batch < 1:
            raise EvaluationError(f"{batch=} must be >= 1")
        self.watch = watch
        self.first_check = FIRST_CHECK if first_check is None else first_check
        self.dense, self.material, self.protocol, self.batch = dense, material, protocol, batch
        self._compiled: set[LayerCacheSpec] = set()
        self._dense_results: list[DocumentResult[Continuation]] = []
        # What the unmodified model predicts, writes and scores, by the name of the measurement.
        self._dense: dict[str, Any] = {}

    def evaluate(self, network: Transformer) -> ContextReport:
        """Evaluate one plan.

        First, kinds of layers that no earlier plan had are compiled in parallel. Task documents are read
        until the retention interval of each task that counts is narrow enough.
        """
        self._compiled = compile_ahead(network, self._run_first_batch, self._compiled)
        tasks, agreement = self._evaluate_documents(network)
        return ContextReport(
            context=self.material.context,
            perplexity=self._compute_perplexity(network),
            agreement=agreement,
            tasks=tasks,
            long_agreement=self._compare_texts(network),
            ruler={name: self._compare_scores(network, name) for name in self.material.ruler},
        )

    def _run_first_batch(self, network: Transformer) -> None:
        """Run what compiles most on the first batch of text."""
        material, first = self.material, slice(self.batch)
        if material.windows is not None:
            predict(network, material.windows[first], batch=self.batch)
        answers_on(network, material.task_documents[first], protocol=self.protocol, batch=self.batch)

    def _run_dense[T](self, name: str, run: Callable[..., T], *arguments: Any) -> T:
        """Return `run(dense, *arguments)`, which is called only once for each name."""
        if name not in self._dense:
            self._dense[name] = run(self.dense, *arguments)
        result: T = self._dense[name]
        return result

    def _compare_texts(self, network: Transformer) -> LongAgreement | None:
        if self.material.long_prompts is None:
            return None
        dense_texts = self._run_dense(LONG_AGREEMENT, self._write_texts, self.material.long_prompts)
        return compare_texts(dense_texts, self._write_texts(network, self.material.long_prompts))

    def _write_texts(self, network: Transformer, prompts: np.ndarray) -> np.ndarray:
        def watch(count: int) -> None:
            self.watch(f"{count} of {len(prompts)} texts of {LONG_TOKENS} tokens {self._describe(network)}")

        return write_texts(
            network, prompts, tokens=LONG_TOKENS, protocol=self.protocol, batch=self.batch, watch=watch
        )

    def _compare_scores(self, network: Transformer, name: str) -> RulerScore:
        score = compare_scores(self._run_dense(name, self._score, name), self._score(network, name))
        self.watch(f"{name}: {score.score:.2f} under the plan, {score.dense:.2f} by the unmodified model")
        return score

    def _score(self, network: Transformer, name: str) -> np.ndarray:
        task = self.material.ruler[name]

        def watch(count: int) -> None:
            self.watch(
                f"{count} of {len(task.samples)} samples of {name} with {self.material.context} tokens "
                f"{self._describe(network)}"
            )

        return score_task(network, task, protocol=self.protocol, batch=self.batch, watch=watch)

    def _describe(self, network: Transformer) -> str:
        return "by the unmodified model" if network is self.dense else "under the plan"

    def _compute_perplexity(self, network: Transformer) -> PerplexityReport | None:
        windows = self.material.windows
        if windows is None:
            return None
        dense_predictions = self._run_dense(PERPLEXITY, partial(predict, batch=self.batch), windows)
        return compare(network, dense_predictions, windows, batch=self.batch)

    def _evaluate_documents(self, network: Transformer) -> tuple[dict[str, Retention], Agreement | None]:
        results, tasks = list[DocumentResult[Divergence]](), dict[str, Retention]()
        count = len(self.material.task_documents)
        while len(results) < count:
            next_check = min(max(len(results) + MIN_DOCUMENTS, self.first_check), count)
            while len(results) < next_check:
                results += self._run_batch(network, len(results))
                self.watch(f"{len(results)} of at most {count} contexts of {self.material.context} tokens")
            dense_results = self._dense_results[: len(results)]
            tasks = {
                task: retention(
                    dense=[result.answers[task] for result in dense_results],
                    plan=[result.answers[task] for result in results],
                )
                for task in results[0].answers
            }
            if all(each.is_precise for each in tasks.values() if each.counts):
                break
        divergences = [each.continued for each in results if each.continued is not None]
        return tasks, Agreement.summarize(divergences) if divergences else None

    def _run_batch(self, network: Transformer, start: int) -> list[DocumentResult[Divergence]]:
        """Run a network on the documents from `start` on, and the unmodified model if it has not run yet."""
        if start >= len(self._dense_results):
            self._dense_results += self._run_documents(self.dense, start, continue_contexts)

        def compare_with_dense(network: Transformer, hidden: Array, cache: KVCache) -> list[Divergence]:
            dense_results = pad_batch(self._dense_results[start:], self.batch)
            continuations = [each.continued for each in dense_results if each.continued is not None]
            return compare_continuations(network, self.dense.embeddings, hidden, cache, continuations)

        return self._run_documents(network, start, compare_with_dense)

    def _run_documents[T](
        self,
        network: Transformer,
        start: int,
        continue_: Callable[[Transformer, Array, KVCache], Sequence[T]],
    ) -> list[DocumentResult[T]]:
        """Answer the questions about a batch of documents, and continue their contexts if requested."""
        left = self.material.task_documents[start:]
        documents = pad_batch(left, self.batch)
        contexts = np.stack([document.context for document in documents])
        hidden, cache = read_contexts(network, contexts, room=QUESTION_TOKENS, protocol=self.protocol)
        by_task = answer_questions(network, cache, documents)
        continued = continue_(network, hidden, cache) if self.material.agreement else [None] * self.batch
        return [
            DocumentResult({task: answers[index] for task, answers in by_task.items()}, continued[index])
            for index in range(min(self.batch, len(left)))
        ]
