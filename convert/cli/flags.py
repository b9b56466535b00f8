"""What the commands of `zdc` share: flags of a plan, of a search and of sampling, and windows of text."""

import contextlib
import json
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from convert.calibration.calibrate import CalibrationOptions, calibration_windows
from convert.progress import counted
from convert.search.coded_search import CodedSearch
from convert.search.plots import write_front
from convert.search.search import (
    Mode,
    Objective,
    Search,
    SearchOptions,
    class_block,
    describe,
    describe_bytes,
)
from convert.search.trials import Trial, TrialBook
from zdc_jax import methods
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import Dtype
from zdc_jax.errors import EvaluationError, PlanError, TextError, foreign_errors_as
from zdc_jax.evaluation.sheets import ALIGNMENT, TaskDocument, context_length, make_task_documents
from zdc_jax.evaluation.splits import Split, split_seed
from zdc_jax.evaluation.tasks import chosen, names
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import stored_basis
from zdc_jax.methods import MethodSettings
from zdc_jax.plan import CompressionPlan
from zdc_jax.planning.certificate import plan_from_error
from zdc_jax.planning.choose import choose_plan
from zdc_jax.planning.spectrum import plan_from_spectrum

MAX_DEGRADATION = 0.01
"""Default limit of a search."""


def at_least_one(name: str) -> Any:
    """Shows positional arguments as the one or more that they are."""
    return tyro.conf.arg(metavar=f"{name} [{name} ...]", help_behavior_hint="(required)")


WINDOW_TOKENS = 4096
"""Of text to search on, at most, where nothing is said."""


@dataclass(kw_only=True)
class PlanFlags:
    """A plan: from a file, uniform ranks, or per-layer ranks for a budget."""

    plan: Path | None = None
    """Plan JSON."""
    qk: int | None = None
    """Uniform coordinates kept of Q and K; default all."""
    v: int | None = None
    """Uniform coordinates kept of V and O; default all."""
    budget: float | None = None
    """Share of the KV coordinates to keep outside the window; ranks per layer from the spectrum."""
    max_score_error: float | None = None
    """Limit on the calibrated relative error of scores and values; ranks per layer from the certificate."""
    window: int = 0
    """Recent tokens kept at full rank."""
    sinks: int = 0
    """First tokens kept at full rank."""
    method: str | None = None
    """How distant tokens are kept (docs/methods.md). Without --qk, --v or such a choice of ranks it acts on
    the model's own coordinates, and needs no calibration."""
    set: tuple[str, ...] = ()
    """Settings of the method, each NAME=VALUE, such as bits=4."""

    def build(self, path: Path) -> CompressionPlan | None:
        """The plan these flags describe for the folder at `path`; None without any flag."""
        if self.method is None:
            if self.set:
                raise PlanError(f"--set {' '.join(self.set)}: of use to a method alone; add --method")
            return self._of_ranks(path)
        if self.plan is not None:
            raise PlanError("--plan already says the method; drop --method")
        settings = self._settings()
        if any(each is not None for each in (self.qk, self.v, self.budget, self.max_score_error)):
            plan = self._of_ranks(path)
            assert plan is not None  # A choice of ranks is a plan.
            return replace(plan, method=self.method, settings=settings)
        checkpoint = Checkpoint.open(path)
        H, near = checkpoint.config.head_dim, {"window": self.window, "sinks": self.sinks}
        plan = CompressionPlan.uniform(checkpoint.config, qk=H, v=H, **near)
        bound = plan.for_model(checkpoint.fingerprint)
        return replace(bound, rotated=False, method=self.method, settings=settings)

    def _settings(self) -> MethodSettings:
        assert self.method is not None
        given = {}
        for item in self.set:
            name, equals, value = item.partition("=")
            if not equals:
                raise PlanError(f"--set {item}: must be NAME=VALUE")
            with contextlib.suppress(json.JSONDecodeError):  # Else it is a word.
                value = json.loads(value)
            given[name] = value
        with foreign_errors_as(PlanError, f"--method {self.method}"):
            return methods.settings_from_json(self.method, given)

    def _of_ranks(self, path: Path) -> CompressionPlan | None:
        uniform = self.qk is not None or self.v is not None
        limited = self.max_score_error is not None
        if sum([self.plan is not None, uniform, self.budget is not None, limited]) > 1:
            raise PlanError("give one of --plan, --qk/--v, --budget, --max-score-error")
        if self.plan is not None:
            if self.window or self.sinks:
                raise PlanError("--plan already says window and sinks; drop --window and --sinks")
            return CompressionPlan.load(self.plan)
        checkpoint = Checkpoint.open(path)
        if self.max_score_error is not None:
            return plan_from_error(
                stored_basis(checkpoint),
                max_score_error=self.max_score_error,
                window=self.window,
                sinks=self.sinks,
            ).within(checkpoint.config)
        if self.budget is not None:
            basis = stored_basis(checkpoint)
            plan = plan_from_spectrum(basis, budget=self.budget, window=self.window, sinks=self.sinks)
            return plan.within(checkpoint.config)
        if not uniform and not self.window and not self.sinks:
            return None
        H = checkpoint.config.head_dim
        return CompressionPlan.uniform(
            checkpoint.config,
            qk=H if self.qk is None else self.qk,
            v=H if self.v is None else self.v,
            window=self.window,
            sinks=self.sinks,
        ).for_model(checkpoint.fingerprint)


@dataclass(kw_only=True)
class SamplingFlags:
    """How the next token is chosen, for `generate` and `chat`."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int | None = None
    """Choose among this many most likely tokens."""
    top_p: float | None = None
    """Choose among the fewest most likely tokens of this much probability."""
    seed: int = 0
    """Seed of the choice."""

    def build(self) -> Sampling:
        """The sampling these flags describe."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


@dataclass(kw_only=True)
class SearchFlags:
    """A plan by search: the fewest bytes, or the least time, within limits on perplexity and on tasks."""

    max_degradation: float | None = None
    """Limit on the relative increase of perplexity; default 0.01 (1 %) for a search."""
    texts: tuple[Path, ...] = ()
    """Text to search on with the flags below, as for calibrate. A third of it is used, `zdc evaluate` takes
    another. None: a plan predicted from perplexity alone, without search. With --method coded plans of that
    method are searched, by mode window and objective bytes or read."""
    min_retention: float = 0.97
    """Limit on what is retained of each long-range task that the unmodified model can do; 0: no tasks."""
    documents: int = 16
    """Contexts on which tasks are asked."""
    mode: Mode = "window"
    """What plans may do: recent tokens at full rank and ranks per layer; one pair of ranks for all; two token
    classes, without and with a window."""
    objective: Objective = "bytes"
    """What is to be least: bytes of the KV cache, time of attention as predicted for one H200, or what a
    decoded token reads."""
    constrained: bool = True
    """Whether token classes keep to the paper's Eq. 6: more important tokens in deeper layers, fewer
    coordinates for the rest, and no more of Q/K than of V."""
    on_kernels: bool = False
    """With --method coded: layers choose tokens by such indexes alone as GPU kernels read."""
    trials: int = 400
    """Most plans to measure."""
    minutes: float = math.inf
    """No plan is begun after so many; what the unmodified model takes counts. Taken up again with the same
    output, a search has as many once more."""
    text_windows: int = 12
    """Windows of text to measure on, drawn round robin over topics."""
    context: int | None = None
    """Tokens a window of text; default the model's positions, at most 4096."""
    seed: int = 1
    """Chooses the windows; another than calibration's."""
    batch: int = 1
    """Windows at a time."""
    dtype: Dtype | None = None
    """Dtype to run in; default that of the stored weights."""

    def check(self, plan: PlanFlags) -> None:
        """Raises `PlanError` where one of these flags, or of those beside them, would be passed over."""
        named = given(self)
        if not self.asked:
            if named:
                raise PlanError(f"{', '.join(named)}: of use to a search alone; add --texts to search on")
            return
        allowed = ["--method"] if plan.method == "coded" and self.texts else []
        if others := [flag for flag in given(plan) if flag not in allowed]:
            raise PlanError(
                f"a search is for the whole plan; drop {', '.join(others)} (--method coded goes with --texts)"
            )
        unused = [flag for flag in named if flag not in ("--max-degradation", "--texts")]
        if unused and not self.texts:
            raise PlanError(f"{', '.join(unused)}: of use to a search alone; add --texts to search on")

    @property
    def asked(self) -> bool:
        """Whether these flags ask for a plan."""
        return bool(self.texts) or self.max_degradation is not None

    def search(
        self, path: Path, output: Path, console: Console, method: str | None = None
    ) -> CompressionPlan:
        """Searches, showing the best so far; a journal beside `output` lets a broken-off search go on.

        method: of the plans, `coded` or by default `zdc`. Without texts the plan is predicted.
        """
        limit = MAX_DEGRADATION if self.max_degradation is None else self.max_degradation
        options = SearchOptions(
            limit,
            self.mode,
            self.trials,
            self.objective,
            self.constrained,
            self.min_retention,
            self.minutes,
            self.on_kernels,
        )
        kind = CodedSearch if method == "coded" else Search
        kind.check(options)
        checkpoint = Checkpoint.open(path)
        if not self.texts:
            plan = choose_plan(path, max_degradation=limit)
            assert plan is not None  # Nothing was checked.
            return plan
        windows, documents = self._judged_on(checkpoint)
        began = time.monotonic()  # What the unmodified model takes counts too.
        with counted("plans", "measuring the unmodified model") as show:
            book = TrialBook(
                path,
                windows,
                documents,
                dtype=self.dtype,
                batch=self.batch,
                journal=output.with_suffix(".journal.jsonl"),
            )

            def watch(_: Trial, best: Trial | None) -> None:
                best_yet = "none" if best is None else f"{describe_bytes(best)} at {best.increase:+.2%}"
                show(f"best within the limits: {best_yet}")

            best = kind(book, options, watch, began).run()
        if documents and not book.counting:
            message = "the unmodified model does no task: the plan is held to perplexity alone"
            warnings.warn(message, stacklevel=2)
        console.print(describe(book.config, best), soft_wrap=True, highlight=False)
        write_front(book, best, options, output.with_suffix(".front.json"))
        return book.bound(best.plan)

    def _judged_on(self, checkpoint: Checkpoint) -> tuple[np.ndarray, list[TaskDocument]]:
        """Windows for perplexity, and sheets of other text for tasks."""
        if self.documents < 1:
            raise EvaluationError(
                f"documents={self.documents} must be >= 1; --min-retention 0 leaves tasks out"
            )
        if self.text_windows < 1:
            raise EvaluationError(f"text_windows={self.text_windows} must be >= 1")
        wanted = self.text_windows + (self.documents if self.min_retention else 0)
        windows, _ = text_windows(
            checkpoint,
            self.texts,
            wanted,
            self.context,
            batch=self.batch,
            seed=self.seed,
            split="search",
        )
        if not self.min_retention:
            return windows, []
        # Fewer windows than were asked for are divided alike.
        for_tasks = max(1, len(windows) * self.documents // wanted)
        if for_tasks == len(windows):
            raise TextError(f"the texts hold one window of {windows.shape[1]} tokens; tasks need another")
        length, config = windows.shape[1], checkpoint.config
        # Questions begin where all plans of the search can begin a piece.
        block = class_block(length) if "classes" in self.mode else 1
        S = context_length(length, math.lcm(ALIGNMENT, block))
        tokenizer = checkpoint.tokenizer()
        assert tokenizer is not None  # Text was read with it.
        documents = make_task_documents(
            chosen(names(), length),
            windows[-for_tasks:, :S],
            tokenizer,
            seed=split_seed("search", self.seed),
            not_drawn=config.eos_ids,
        )
        return windows[:-for_tasks], documents


def given(flags: PlanFlags | SearchFlags) -> list[str]:
    """The flags that are not at their defaults, as they are typed."""
    named = []
    for flag in fields(flags):
        value = getattr(flags, flag.name)
        if value != flag.default:
            named.append(f"--{'no-' if value is False else ''}{flag.name.replace('_', '-')}")
    return named


def text_windows(
    checkpoint: Checkpoint,
    texts: Sequence[Path],
    count: int,
    context: int | None,
    *,
    batch: int,
    seed: int,
    split: Split | None = None,
) -> tuple[np.ndarray, list[str]]:
    """At most `count` windows of text or of a split of it, int32 [W, T], and topics; fewer with a warning.

    Raises:
      TextError, CalibrationError: `count`, `context`, `batch` or `seed` is impossible, or no text.
    """
    if count < 1:
        raise TextError(f"text windows={count} must be >= 1")
    context = context or min(checkpoint.config.max_positions, WINDOW_TOKENS)
    options = CalibrationOptions(context=context, batch=batch, seed=seed)
    length = options.window_length(checkpoint.config)
    options = replace(options, tokens=count * length)
    found = calibration_windows(checkpoint, texts, length, options, split)
    if len(found[1]) < count:
        warnings.warn(
            f"the texts hold {len(found[1])} windows of {length} tokens, not the {count} asked for",
            stacklevel=2,
        )
    return found
