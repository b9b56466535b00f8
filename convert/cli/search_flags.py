"""Flags of a search for a plan (`zdc plan --texts`), and the text that it reads."""

import math
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from convert.calibration.calibrate import CalibrationOptions, calibration_windows
from convert.cli.flags import DtypeFlag, call_with_flags, list_changed, show_default
from convert.cli.plan_flags import PlanFlags
from convert.progress import counted
from convert.search.class_search import class_block
from convert.search.coded_search import CodedBooks, CodedSearch
from convert.search.search import (
    Mode,
    Objective,
    Search,
    SearchOptions,
    describe,
    describe_bytes,
)
from convert.search.trials import Trial, TrialBook
from zdc_jax import methods
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import EvaluationError, PlanError, TextError
from zdc_jax.evaluation.sheets import ALIGNMENT, TaskDocument, context_length, make_task_documents
from zdc_jax.evaluation.splits import split_seed
from zdc_jax.evaluation.tasks import chosen, names
from zdc_jax.loading import stored_basis
from zdc_jax.plan import CompressionPlan
from zdc_jax.planning.choose import choose_plan
from zdc_jax.planning.profile import stored_profile

MAX_DEGRADATION = 0.01
"""Default limit of a search on the relative increase of perplexity."""
WINDOW_TOKENS = 4096
"""Longest text window unless --context asks for more, in tokens."""


@dataclass(kw_only=True)
class SearchFlags:
    """A search for the plan of smallest cost within limits on perplexity and on tasks.

    Attributes:
      max_degradation: Largest relative increase of perplexity, such as 0.01 for 1 %. Without --texts, the
        plan is predicted from the calibration profile.
      texts: Text files or folders to search on. The search reads a third of the text; `zdc evaluate` reads
        another third. With --method coded, the search covers plans of that method; --mode must be window and
        the --objective bytes or read.
      min_retention: Smallest retention of each long-range task that the unmodified model can solve; 0
        measures no tasks.
      documents: Documents with task questions to measure on.
      mode: Plans to search. window: recent tokens at full rank, ranks per layer; uniform: the same ranks in
        all layers; classes: two classes of tokens; window+classes: both.
      objective: Quantity to minimize. bytes: KV cache; time: predicted attention time on one H200; read:
        bytes of the cache that decoding a token reads.
      on_kernels: With --method coded, use only indexes that the GPU kernels can read.
      trials: Most plans to measure.
      minutes: Time after which no further plan is measured. The time of the unmodified model counts. A search
        that is run again with the same output gets the whole time once more.
      text_windows: Windows of text to measure perplexity on, drawn in turn from all topics.
      context: Tokens in a window.
      seed: Seed that chooses the windows. Use another seed than in calibration.
      batch: Windows to run at once.
      dtype: Dtype to run in.
    """

    max_degradation: Annotated[float | None, show_default(f"{MAX_DEGRADATION} with --texts")] = None
    texts: Annotated[tuple[Path, ...], show_default("none, no search")] = ()
    min_retention: float = 0.97
    documents: int = 16
    mode: Mode = "window"
    objective: Objective = "bytes"
    on_kernels: bool = False
    trials: int = 400
    minutes: Annotated[float, show_default("no limit")] = math.inf
    text_windows: int = 12
    context: Annotated[int | None, show_default(f"the model's positions, at most {WINDOW_TOKENS}")] = None
    seed: int = 1
    batch: int = 1
    dtype: DtypeFlag = None

    def check(self, plan: PlanFlags) -> None:
        """Raise `PlanError` where one of these flags, or of a plan's, would be ignored."""
        chooses_bits = methods.get_search_kind(plan.method or "") == "bits"
        allowed = ["--method"] if self.texts and chooses_bits else []
        others = [flag for flag in list_changed(plan) if flag not in allowed]
        if self.is_requested and others:
            raise PlanError(
                f"{', '.join(others)}: a search chooses the whole plan; "
                f"drop {', '.join(others)} (only --method coded may be given, with --texts)"
            )
        ignored = [flag for flag in list_changed(self) if flag not in ("--max-degradation", "--texts")]
        if ignored and not self.texts:
            raise PlanError(f"{', '.join(ignored)}: applies to a search only; add --texts PATH")

    @property
    def is_requested(self) -> bool:
        """Whether these flags ask for a plan, searched or predicted."""
        return bool(self.texts) or self.max_degradation is not None

    def search(self, path: Path, output: Path, console: Console, method: str = "zdc") -> CompressionPlan:
        """Return the best plan found; without texts, the plan predicted from calibration.

        Progress goes to standard error. A journal next to `output` lets an interrupted search resume.

        Args:
          path: converted and calibrated folder.
          output: path of the plan's JSON, from which the names of journal and front derive.
          console: receives one line about the result.
          method: method of the plans, `zdc` or `coded`.
        """
        chooses_bits = methods.get_search_kind(method) == "bits"
        limit = MAX_DEGRADATION if self.max_degradation is None else self.max_degradation
        options = call_with_flags(SearchOptions, self, max_degradation=limit)
        from convert.search.plots import write_front  # Matplotlib takes a second to import.

        (CodedSearch if chooses_bits else Search).check(options)
        checkpoint = Checkpoint.open(path)
        if not self.texts:
            plan = choose_plan(path, max_degradation=limit)
            assert plan is not None  # None is the answer only where a plan was measured.
            return plan
        basis = stored_basis(checkpoint)  # Reports a missing basis before much text is read.
        if not chooses_bits and self.mode == "window":
            stored_profile(checkpoint, basis)
        windows, documents = self._draw_texts(checkpoint)
        began = time.monotonic()  # Before the books, which measure the unmodified model.
        journal = output.with_suffix(".journal.jsonl")
        with counted("plans", "measuring the unmodified model") as show:

            def show_best(_: Trial, best: Trial | None) -> None:
                words = "none" if best is None else f"{describe_bytes(best)} at {best.increase:+.2%}"
                show(f"best within the limits: {words}")

            measuring: dict[str, Any] = {"dtype": self.dtype, "batch": self.batch, "journal": journal}
            if chooses_bits:
                books = CodedBooks.open(path, windows, documents, **measuring)
                book = books.simulated
                best = CodedSearch(books, options, show_best, began).run()
            else:
                book = TrialBook(path, windows, documents, **measuring)
                best = Search(book, options, show_best, began).run()
        if documents and not book.counting:
            message = "the unmodified model solves none of the tasks: only perplexity limits the plan"
            warnings.warn(message, stacklevel=2)
        console.print(describe(book.config, best), soft_wrap=True, highlight=False)
        write_front(book, best, options, output.with_suffix(".front.json"))
        return book.bind(best.plan)

    def _draw_texts(self, checkpoint: Checkpoint) -> tuple[np.ndarray, list[TaskDocument]]:
        """Return windows for perplexity, and documents with questions made from other windows."""
        if self.documents < 1:
            raise EvaluationError(
                f"--documents {self.documents}: must be at least 1; --min-retention 0 measures no tasks"
            )
        if self.text_windows < 1:
            raise EvaluationError(f"--text-windows {self.text_windows}: must be at least 1")
        count = self.text_windows + (self.documents if self.min_retention else 0)
        windows = self._draw_windows(checkpoint, count)
        if not self.min_retention:
            return windows, []
        # Where the text gives fewer windows, perplexity and tasks get the same shares of them.
        for_tasks = max(1, len(windows) * self.documents // count)
        if for_tasks == len(windows):
            raise TextError(
                f"--texts {' '.join(map(str, self.texts))}: one window of {windows.shape[1]} tokens, but "
                "perplexity and tasks need one each; add text, lower --context or use --min-retention 0"
            )
        length, config = windows.shape[1], checkpoint.config
        # Questions begin where all plans of the search can begin a chunk.
        block = class_block(length) if "classes" in self.mode else 1
        S = context_length(length, math.lcm(ALIGNMENT, block))
        tokenizer = checkpoint.tokenizer()
        assert tokenizer is not None  # The text was tokenized with it.
        documents = make_task_documents(
            chosen(names(), length),
            windows[-for_tasks:, :S],
            tokenizer,
            seed=split_seed("search", self.seed),
            not_drawn=config.eos_ids,
        )
        return windows[:-for_tasks], documents

    def _draw_windows(self, checkpoint: Checkpoint, count: int) -> np.ndarray:
        """Return up to `count` windows of the part of the text that searches read, int32 [W, T].

        Text for fewer windows than `count` comes with a warning.

        Raises:
          TextError: no text, or not enough for one window.
          CalibrationError: an impossible --context, --batch or --seed.
        """
        context = self.context
        if context is None:
            context = min(checkpoint.config.max_positions, WINDOW_TOKENS)
        options = CalibrationOptions(context=context, batch=self.batch, seed=self.seed)
        length = options.window_length(checkpoint.config)
        options = replace(options, tokens=count * length)
        windows, _ = calibration_windows(checkpoint, self.texts, length, options, "search")
        if len(windows) < count:
            warnings.warn(
                f"the texts hold only {len(windows)} of the {count} windows of {length} tokens asked for",
                stacklevel=2,
            )
        return windows
