"""Flags that several commands share (plan, search, sampling), and the text windows they measure on."""

import contextlib
import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console
from tyro.conf import Positional

from convert.calibration.calibrate import CalibrationOptions, calibration_windows
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
from zdc_jax.config import Dtype, ModelConfig
from zdc_jax.errors import EvaluationError, PlanError, PromptError, TextError, foreign_errors_as
from zdc_jax.evaluation.sheets import ALIGNMENT, TaskDocument, context_length, make_task_documents
from zdc_jax.evaluation.splits import Split, split_seed
from zdc_jax.evaluation.tasks import chosen, names
from zdc_jax.files import load_json
from zdc_jax.generation.grammar import Grammar
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import stored_basis
from zdc_jax.plan import CompressionPlan
from zdc_jax.planned_layers import MethodSettings
from zdc_jax.planning.certificate import plan_from_error
from zdc_jax.planning.choose import choose_plan
from zdc_jax.planning.profile import stored_profile
from zdc_jax.planning.spectrum import plan_from_spectrum
from zdc_jax.presets import default_plan, preset_plan, resolve_plan

MAX_DEGRADATION = 0.01
"""Default limit of a search on the relative increase of perplexity."""
WINDOW_TOKENS = 4096
"""Longest text window unless --context asks for more, in tokens."""


def show_default(words: str) -> Any:
    """Describe in the help a default that depends on the model or on other flags."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {words})")


def build_from_flags[T](options: Callable[..., T], flags: Any, **others: Any) -> T:
    """Create a dataclass of options from the flags of the same names, and from other values."""
    names = signature(options).parameters.keys() & {each.name for each in fields(flags)} - others.keys()
    return options(**{name: getattr(flags, name) for name in names}, **others)


def show_repeated(name: str, hint: str = "required") -> Any:
    """Show a positional argument in the help as repeatable, with a hint when it is required."""
    return tyro.conf.arg(metavar=f"{name} [{name} ...]", help_behavior_hint=f"({hint})")


ModelFolder = Annotated[Positional[Path], tyro.conf.arg(metavar="MODEL")]
"""Positional argument: the folder of a converted model."""
DtypeFlag = Annotated[Dtype | None, show_default("dtype of the stored weights")]
"""Flag: dtype of weights, activations and cache."""
MaxPositionsFlag = Annotated[int | None, show_default("positions in the model's config")]
"""Flag: longest context of the model."""


@dataclass(kw_only=True)
class PlanFlag:
    """The compression plan of a model.

    Attributes:
      plan: Preset, or JSON file of a plan as `zdc plan` writes it. 8bit and 4bit need no calibration, 3bit
        does. small is the plan that `zdc compress` stored in the folder, and none keeps 16 bits.
    """

    plan: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="8bit|4bit|3bit|small|none|PLAN.json",
            help_behavior_hint="(default: small if there is one)",
        ),
    ] = None

    def build(self, path: Path) -> CompressionPlan | None:
        """Return the plan for the converted folder at `path`; None keeps the cache in 16 bits.

        Raises:
          PlanError: there is no such plan, or it does not suit the model.
          CalibrationError: the plan needs a calibrated basis and the folder has none.
        """
        return default_plan(path) if self.plan is None else resolve_plan(self.plan, path)


@dataclass(kw_only=True)
class PlanFlags:
    """Description of a plan: a preset, the same rank in every layer, ranks per layer, or a method.

    Attributes:
      preset: Preset to write as a file: 8bit, 4bit or 3bit.
      qk: Coordinates of queries and keys (rank R) to keep in every layer.
      v: Coordinates of values and outputs (rank Z) to keep in every layer.
      budget: Share of the KV coordinates to keep for tokens outside the window, in (0, 1]. Ranks per layer
        come from the calibrated spectrum.
      max_score_error: Largest calibrated relative error of scores and values, in (0, 1). Ranks per layer come
        from the calibrated error certificate.
      window: Recent tokens that keep all coordinates.
      sinks: First tokens of a sequence that keep all coordinates.
      method: Storage of the tokens outside the window; see docs/methods.md. A method keeps all coordinates,
        unless --qk, --v, --budget or --max-score-error chooses ranks. Only coded, loki, palu and
        token_classes need a calibrated folder then.
      set: Settings of the method, such as bits=4.
    """

    preset: Annotated[Literal["8bit", "4bit", "3bit"] | None, show_default("none")] = None
    qk: Annotated[int | None, show_default("all")] = None
    v: Annotated[int | None, show_default("all")] = None
    budget: Annotated[float | None, show_default("none")] = None
    max_score_error: Annotated[float | None, show_default("none")] = None
    window: int = 0
    sinks: int = 0
    method: Annotated[str | None, show_default("zdc")] = None
    set: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="[NAME=VALUE [NAME=VALUE ...]]", help_behavior_hint="(default: those of the method)"
        ),
    ] = ()

    def build(self, path: Path) -> CompressionPlan | None:
        """Return the plan for the converted folder at `path`, or None where no flag describes one.

        Raises:
          PlanError: a flag has an impossible value, or flags exclude each other.
          CalibrationError: the plan needs a calibrated basis and the folder has none.
        """
        if self.preset is not None:
            if others := [flag for flag in list_changed(self) if flag != "--preset"]:
                raise PlanError(
                    f"{', '.join(others)}: a preset is a whole plan; drop {', '.join(others)} or --preset"
                )
            return preset_plan(self.preset, Checkpoint.open(path))
        if self.method is None:
            if self.set:
                raise PlanError(f"--set {' '.join(self.set)}: applies to a method only; add --method NAME")
            return self._build_from_ranks(path)
        settings = self._parse_settings(self.method)
        if any(each is not None for each in (self.qk, self.v, self.budget, self.max_score_error)):
            plan = self._build_from_ranks(path)
            assert plan is not None  # A choice of ranks is a plan.
            plan = replace(plan.with_shift(()), method=self.method, settings=settings)
            return _bind_to_basis(plan, Checkpoint.open(path))
        return self._keep_all_coordinates(Checkpoint.open(path), self.method, settings)

    def _keep_all_coordinates(
        self, checkpoint: Checkpoint, method: str, settings: MethodSettings
    ) -> CompressionPlan:
        """Return a plan of a method on all coordinates: the model's own, or calibrated ones if needed."""
        plan = self._make_uniform(checkpoint.config).for_model(checkpoint.fingerprint)
        calibrated = (checkpoint.calibration_path / "basis").exists()
        if not (settings.prefers_basis and calibrated):
            with contextlib.suppress(PlanError):
                return replace(plan, rotated=False, method=method, settings=settings)
        plan = replace(plan, method=method, settings=settings)  # Raises too, unless a basis is missing.
        return _bind_to_basis(plan, checkpoint)

    def _parse_settings(self, method: str) -> MethodSettings:
        if method not in methods.names():
            raise PlanError(f"--method {method}: unknown; must be one of {', '.join(methods.names())}")
        values = {}
        for item in self.set:
            name, equals, value = item.partition("=")
            if not equals:
                raise PlanError(f"--set {item}: must be NAME=VALUE, such as bits=4")
            with contextlib.suppress(json.JSONDecodeError):  # Anything else is a word.
                value = json.loads(value)
            values[name] = value
        with foreign_errors_as(PlanError, f"--set {' '.join(self.set)}"):
            return methods.settings_from_json(method, values)

    def _build_from_ranks(self, path: Path) -> CompressionPlan | None:
        is_uniform = self.qk is not None or self.v is not None
        if is_uniform + (self.budget is not None) + (self.max_score_error is not None) > 1:
            raise PlanError("give only one of --qk/--v, --budget, --max-score-error")
        checkpoint = Checkpoint.open(path)
        near = {"window": self.window, "sinks": self.sinks}
        if self.max_score_error is not None:
            plan = plan_from_error(stored_basis(checkpoint), max_score_error=self.max_score_error, **near)
            return plan.within(checkpoint.config)
        if self.budget is not None:
            plan = plan_from_spectrum(stored_basis(checkpoint), budget=self.budget, **near)
            return plan.within(checkpoint.config)
        if not (is_uniform or self.window or self.sinks):
            return None
        return _bind_to_basis(self._make_uniform(checkpoint.config), checkpoint)

    def _make_uniform(self, config: ModelConfig) -> CompressionPlan:
        """Return the plan with the same ranks in all layers; all coordinates by default."""
        qk, v = (config.head_dim if rank is None else rank for rank in (self.qk, self.v))
        return CompressionPlan.uniform(config, qk=qk, v=v, window=self.window, sinks=self.sinks)


def _bind_to_basis(plan: CompressionPlan, checkpoint: Checkpoint) -> CompressionPlan:
    """Return the plan bound to a model and to the basis in its folder."""
    basis = stored_basis(checkpoint)
    return plan.for_model(checkpoint.fingerprint, basis.coordinates_hash, basis.shifted)


@dataclass(kw_only=True)
class SamplingFlags:
    """Choice of the next token, for `generate` and `chat`.

    Attributes:
      temperature: Softmax temperature; 0 always takes the most likely token.
      top_k: Sample among this many most likely tokens.
      top_p: Sample among the fewest tokens whose probabilities sum to this value, in (0, 1].
      min_p: Sample among tokens with at least this share of the largest probability, from 0 to 1.
      presence_penalty: Lower the logits of tokens that were generated before, from -2 to 2.
      frequency_penalty: Lower a token's logit each time it is generated, from -2 to 2.
      repetition_penalty: Divide the logits of tokens in the prompt or the answer; 1 for none.
      json_schema: File with a JSON schema that the answer fits.
      regex: Regular expression that the answer matches as a whole.
      seed: Seed of the random choice.
    """

    temperature: float = 0.0
    top_k: Annotated[int | None, show_default("all")] = None
    top_p: Annotated[float | None, show_default("1")] = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: Annotated[Path | None, show_default("none")] = None
    regex: Annotated[str | None, show_default("none")] = None
    seed: int = 0

    def build(self) -> Sampling:
        """Return the sampling parameters.

        Raises:
          PromptError: a value is outside its range, or --json-schema is no file of JSON.
        """
        return build_from_flags(Sampling, self, grammar=self._build_grammar())

    def _build_grammar(self) -> Grammar | None:
        if self.json_schema is not None and self.regex is not None:
            raise PromptError("--json-schema and --regex: an answer has one grammar; drop one of them")
        if self.json_schema is not None:
            with foreign_errors_as(PromptError, f"--json-schema {self.json_schema}"):
                return Grammar.json(load_json(self.json_schema))
        return None if self.regex is None else Grammar.regex(self.regex)


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
        changed = list_changed(self)
        if not self.is_requested:
            if changed:
                raise PlanError(f"{', '.join(changed)}: applies to a search only; add --texts PATH")
            return
        allowed = ["--method"] if self.texts and methods.get_search_kind(plan.method or "") == "bits" else []
        if others := [flag for flag in list_changed(plan) if flag not in allowed]:
            raise PlanError(
                f"{', '.join(others)}: a search chooses the whole plan; "
                f"drop {', '.join(others)} (only --method coded may be given, with --texts)"
            )
        ignored = [flag for flag in changed if flag not in ("--max-degradation", "--texts")]
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
        options = build_from_flags(SearchOptions, self, max_degradation=limit)
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
        windows, _ = draw_windows(
            checkpoint,
            self.texts,
            count,
            self.context,
            batch=self.batch,
            seed=self.seed,
            split="search",
        )
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


def list_changed(flags: PlanFlags | SearchFlags) -> list[str]:
    """Return the flags that differ from their defaults, as a user types them."""
    changed = []
    for flag in fields(flags):
        value = getattr(flags, flag.name)
        if value != flag.default:
            changed.append(f"--{'no-' if value is False else ''}{flag.name.replace('_', '-')}")
    return changed


def draw_windows(
    checkpoint: Checkpoint,
    texts: Sequence[Path],
    count: int,
    context: int | None,
    *,
    batch: int,
    seed: int,
    split: Split | None = None,
) -> tuple[np.ndarray, list[str]]:
    """Return up to `count` windows of a text or of one split of it, int32 [W, T], and their topics.

    Text for fewer windows than `count` comes with a warning.

    Raises:
      TextError: no text, or not enough for one window.
      CalibrationError: an impossible `context`, `batch` or `seed`.
    """
    if count < 1:
        raise TextError(f"count={count}: must be at least 1 window")
    context = context or min(checkpoint.config.max_positions, WINDOW_TOKENS)
    options = CalibrationOptions(context=context, batch=batch, seed=seed)
    length = options.window_length(checkpoint.config)
    options = replace(options, tokens=count * length)
    windows, topics = calibration_windows(checkpoint, texts, length, options, split)
    if len(topics) < count:
        warnings.warn(
            f"the texts hold only {len(topics)} of the {count} windows of {length} tokens asked for",
            stacklevel=2,
        )
    return windows, topics
