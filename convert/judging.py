"""Judgement of plans on text that neither the calibration nor the search has read (ours).

A plan is judged in parts: first perplexity and questions about documents, then each task of `RULER_TASKS`. It
fails at the first part that does not hold its limits, so that a bad plan takes little time. After a failure,
plans are left out that would lose too much by the prediction of the search.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from convert.run_state import RunState
from zdc_jax.cache.kv_cache import free_bytes
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import EvaluationError
from zdc_jax.evaluation.evaluate import Evaluation, Material, prepare
from zdc_jax.evaluation.ruler.answer import score_task
from zdc_jax.evaluation.ruler.prompt import RulerTask
from zdc_jax.evaluation.ruler.score import LEAST_COUNTED, RulerScore, compare_scores
from zdc_jax.evaluation.text import Document
from zdc_jax.generation.api import generate
from zdc_jax.loading import LanguageModel, load
from zdc_jax.plan import CompressionPlan

MARGIN = 0.04
"""Distance that the lower end of the 95 % interval may have below the limit of a task.

With 0.02, plans failed by the width of the interval: lookups in 56 documents kept 0.98 with a lower end of
0.95."""
RULER_TASKS = ("niah_multivalue", "fwe", "niah_multikey_2", "vt", "niah_multikey_3")
"""Tasks of RULER, first those that lost most on Qwen2.5-Coder-1.5B. Perplexity does not show such losses."""
RULER_SAMPLES = 100
"""Most samples of a task of RULER in a block."""
MOST_BLOCKS = 4
"""Most blocks of samples of a task. Further blocks are answered while its interval is wider than `MARGIN`."""
LEAST_GROWTH = 1.03
"""Smallest size of the plan that is judged after a failure, relative to the one that failed. With few more
bytes it loses hardly less."""
MOST_PROMPTS = 16
"""Most prompts of RULER to read at once."""
CACHES = 4
"""Caches of all prompts that must fit into the free memory: the cache, and copies while it is updated."""
SPEED_TOKENS = 32
"""Tokens generated to measure speed."""


@dataclass(frozen=True)
class Row:
    """One line of the final table.

    Attributes:
      name: name of the plan, or `16 bits`.
      share: bytes of the cache, relative to 16 bits.
      tokens_that_fit: tokens of context that fit into the memory that the weights leave free.
      increase: relative increase of perplexity.
      kl: KL divergence from the unmodified model, in nats; None for that model.
      worst: smallest retention of a task that counts; None if none counts.
      tokens_per_second: speed of decoding one sequence of the context length.
    """

    name: str
    share: float
    tokens_that_fit: int | None
    increase: float
    kl: float | None
    worst: float | None
    tokens_per_second: float


class AnsweredBlock(NamedTuple):
    """Block of samples of a task of RULER.

    Attributes:
      samples: prompts and right answers.
      dense: score of the unmodified model on each sample, [samples].
    """

    samples: RulerTask
    dense: np.ndarray


class Failure(NamedTuple):
    """Limit that a plan does not hold.

    Attributes:
      reason: limit and what was measured, in words.
      excess: what the plan loses, in multiples of what it may lose.
    """

    reason: str
    excess: float


class Judge:
    """Measures plans, each part once, and keeps the reports.

    Args:
      checkpoint: converted and calibrated folder.
      material: text for perplexity and for questions about documents.
      documents: text in which tasks of RULER hide their needles.
      state: options, plans and reports.
      watch: receives a line of text at each stage.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        material: Material,
        documents: Sequence[Document],
        state: RunState,
        watch: Callable[[str], None],
    ):
        self.checkpoint, self.material, self.documents = checkpoint, material, documents
        self.state, self.options, self.watch = state, state.options, watch
        self.samples = min(2 * self.options.documents, RULER_SAMPLES)
        self.dense = load(checkpoint.path)
        self.model: tuple[str, LanguageModel] | None = None  # The plan that was loaded last.
        self.evaluation = Evaluation(self.dense.network, material, protocol="cached", batch=1)
        self.counts: dict[str, bool] = {}  # By task of RULER.
        self.blocks: dict[tuple[str, int], AnsweredBlock] = {}  # By task of RULER and number of the block.

    def choose(self) -> str | None:
        """Judge plans, the smallest first, and return the first that holds the limits; None if none does.

        After a failure, the next plan is that whose predicted loss is smaller by at least the excess. Plans
        without a prediction are not left out.
        """
        most_loss, least_bytes = math.inf, 0.0
        for name, candidate in self.state.candidates.items():
            size, loss = candidate.plan.bytes(self.material.context), candidate.loss
            if loss is not None and (loss > most_loss or size < least_bytes):
                continue
            if (failure := self.judge(name)) is None:
                return name
            if loss is not None:
                most_loss, least_bytes = loss / failure.excess, LEAST_GROWTH * size
        return None

    def judge(self, name: str) -> Failure | None:
        """Measure a plan until it fails, say why, and return the limit that it does not hold."""
        self.watch(f"judging {name}")
        failure = self._find_failure(name)
        self.watch(f"{name} holds the limits" if failure is None else f"{name} fails: {failure.reason}")
        return failure

    def _find_failure(self, name: str) -> Failure | None:
        report = self.report(name)
        limit, least = self.options.max_loss, self.options.min_retention
        if not (increase := report["perplexity"]["increase"]) <= limit:
            return Failure(f"perplexity rises by {increase:.2%}, limit {limit:.2%}", increase / limit)
        for task, kept in report["tasks"].items():
            if kept["counts"] and (failure := find_loss(task, kept["retention"], kept["interval"], least)):
                return failure
        for task, score in self._list_scores(name):
            if failure := find_loss(task, score["ratio"], score["ratio_interval"], least):
                return failure
        return None

    def report(self, name: str) -> Any:
        """Return the report of a plan: perplexity, document tasks, and tasks of RULER measured so far."""
        if name not in self.state.reports:
            self.state.reports[name] = self.evaluation.evaluate(self._load(name).network).to_json()
            self.state.save()
        return self.state.reports[name]

    def make_dense_row(self) -> Row:
        """Return the table's line for the unmodified model."""
        full = CompressionPlan.full(self.checkpoint.config)
        return Row("16 bits", 1.0, self._count_fitting(full), 0.0, None, None, self._time(self.dense))

    def make_row(self, name: str) -> Row:
        """Return the table's line for a judged plan."""
        plan, report = self.state.candidates[name].plan, self.report(name)
        full, context = CompressionPlan.full(self.checkpoint.config), self.material.context
        return Row(
            name,
            plan.bytes(context) / full.bytes(context),
            self._count_fitting(plan),
            report["perplexity"]["increase"],
            report["perplexity"]["kl"],
            _find_worst(report),
            self._time(self._load(name)),
        )

    def _list_scores(self, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield each task of RULER that counts with the plan's score, measured when it is asked for."""
        scores = self.report(name)["ruler"]
        for task in RULER_TASKS:
            if task not in scores and self._decide_whether_it_counts(task):
                score = self._compare(name, task)
                scores[task] = asdict(score)
                self.state.save()
                self.watch(
                    f"{task}: {score.score:.2f}; in 16 bits {score.dense:.2f}; {score.samples} samples"
                )
            if task in scores:
                yield task, scores[task]

    def _compare(self, name: str, task: str) -> RulerScore:
        """Return a plan's score, with enough blocks of samples for an interval no wider than `MARGIN`.

        The number of samples depends on the width only, so that it favours neither success nor failure.
        """
        dense, plan = np.empty(0), np.empty(0)
        for index in range(MOST_BLOCKS):
            block = self._answer_without_plan(task, index)
            dense = np.append(dense, block.dense)
            plan = np.append(plan, self._score(self._load(name), block.samples))
            score = compare_scores(dense, plan)
            if score.is_precise(MARGIN):
                break
        return score

    def _decide_whether_it_counts(self, task: str) -> bool:
        """Return whether a task of RULER counts; say once why it does not."""
        if task not in self.counts:
            try:
                self._check_that_it_counts(task)
            except EvaluationError as error:
                self.watch(f"{task} is not judged: {error}")
                self.counts[task] = False
            else:
                self.counts[task] = True
        return self.counts[task]

    def _check_that_it_counts(self, task: str) -> None:
        """Raise `EvaluationError` unless the unmodified model solves enough samples of the first block."""
        if self.samples < LEAST_COUNTED:
            raise EvaluationError(f"{self.samples} samples are fewer than {LEAST_COUNTED}")
        dense = self._answer_without_plan(task, 0).dense
        if (right := np.count_nonzero(dense)) < LEAST_COUNTED:
            raise EvaluationError(
                f"without a plan {right} of {len(dense)} answers are right, fewer than {LEAST_COUNTED}"
            )

    def _answer_without_plan(self, task: str, index: int) -> AnsweredBlock:
        """Return a block of samples with the scores of the unmodified model."""
        if (task, index) not in self.blocks:
            samples = self._prepare(task, self.options.seed + index).ruler[task]
            self.blocks[task, index] = AnsweredBlock(samples, self._score(self.dense, samples))
        return self.blocks[task, index]

    def _score(self, model: LanguageModel, samples: RulerTask) -> np.ndarray:
        batch = choose_batch(self.checkpoint, self.material.context)
        return score_task(model.network, samples, protocol="cached", batch=batch)

    def _prepare(self, task: str, seed: int) -> Material:
        config = self.checkpoint.config
        (material,) = prepare(
            config,
            self.checkpoint.tokenizer(),
            CompressionPlan.full(config),
            self.documents,
            tasks=(task,),
            contexts=(self.material.context,),
            split="report",
            max_documents=self.samples,
            seed=seed,
        )
        return material

    def _load(self, name: str) -> LanguageModel:
        """Return the model with a plan."""
        if self.model is None or self.model[0] != name:
            self.model = None  # Its weights leave the device first.
            self.model = name, load(self.checkpoint.path, self.state.candidates[name].plan)
        return self.model[1]

    def _count_fitting(self, plan: CompressionPlan) -> int | None:
        free, context = free_bytes(), self.material.context
        return None if free is None else int(free // plan.bytes(context) * context)

    def _time(self, model: LanguageModel) -> float:
        """Return the decoded tokens per second of one sequence; the first run compiles."""
        new = min(SPEED_TOKENS, self.material.context // 4)
        prompt = [next(iter(model.config.eos_ids), 0)] * (self.material.context - new)
        result = [generate(model, [prompt], new, stop_tokens=()) for _ in range(2)][-1]
        return (len(result.completions[0].tokens) - 1) / max(result.timings.decode, 1e-9)


def choose_batch(checkpoint: Checkpoint, context: int) -> int:
    """Return the number of prompts to read at once: a power of two, 1 if the free memory is unknown."""
    batch, free = MOST_PROMPTS, free_bytes() or 0
    needed = CACHES * CompressionPlan.full(checkpoint.config).bytes(context)
    while batch > 1 and batch * needed > free:
        batch //= 2
    return batch


def find_loss(task: str, kept: float, interval: tuple[float, float] | None, least: float) -> Failure | None:
    """Return what a plan loses in a task, or None if it holds the limits.

    In tasks of RULER gains count as losses do. Where the unmodified model is often wrong, any noise changes
    single answers.

    Args:
      task: name of the task, for the reason.
      kept: retention, or the ratio of mean scores.
      interval: its 95 % interval; None for one document.
      least: smallest share to keep.
    """
    reason, excess = f"{task} keeps {_round_down(kept)} (limit {least:.3f})", (1 - kept) / (1 - least)
    if interval is not None:
        bound = round(least - MARGIN, 6)
        reason += f", lowest {_round_down(interval[0])} (limit {bound:.3f})"
        excess = float(np.maximum(excess, (1 - interval[0]) / (1 - bound)))  # NaN if either is.
    return None if excess <= 1 else Failure(reason, excess)  # NaN is a failure.


def _round_down(x: float) -> str:
    """Return three digits, rounded down: a number just below its limit does not look like it."""
    return f"{np.floor(1e3 * x + 1e-6) / 1e3:.3f}"


def _find_worst(report: Mapping[str, Any]) -> float | None:
    """Return the smallest retention of the tasks that count, or None."""
    kept = [task["retention"] for task in report["tasks"].values() if task["counts"]]
    return min([*kept, *(score["ratio"] for score in report["ruler"].values())], default=None)
