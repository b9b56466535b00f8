"""One command from a checkpoint to a judged plan: conversion, calibration, choice and judgement (ours).

Plans have the same bits in all layers, so that few are tried: those of `CANDIDATES`. The choice begins at the
preset `3bit` and moves to fewer bytes while the limits hold, else to more. The chosen plan is then judged on
text that neither the calibration nor the choice has read.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax.numpy as jnp

from convert.calibration.calibrate import CalibrationOptions, calibrate
from convert.conversion import convert
from convert.default_text import write_default_text
from zdc_jax.cache.kv_cache import free_bytes
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import CheckpointError, EvaluationError
from zdc_jax.evaluation.evaluate import ContextReport, Evaluation, prepare
from zdc_jax.evaluation.splits import SPLITS, Split, documents_of
from zdc_jax.evaluation.text import Document, read_documents
from zdc_jax.files import load_json, whole_file
from zdc_jax.generation.api import generate
from zdc_jax.loading import LanguageModel, load, stored_basis
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan
from zdc_jax.presets import PLAN_FILE, coded_plan, index_size

STATE_FILE = "compress.json"
"""File in the output that lets an interrupted run continue, and keeps what was measured."""
TASKS = ("perplexity", "copy", "induction", "lookup", "passkey")
SEARCH_RETENTION, JUDGED_RETENTION = 0.97, 0.95
"""Smallest retention of each task that counts, in the choice and in the judgement."""
CANDIDATES: dict[str, dict[str, int]] = {
    "index 4, keys 2, values 2": {"bits_index": 4, "bits_k": 2, "bits_v": 2},
    "index 5, keys 2, values 2": {"bits_index": 5, "bits_k": 2, "bits_v": 2},
    "index 4, keys 2, values 3": {"bits_index": 4, "bits_k": 2, "bits_v": 3},
    "3bit": {"bits_index": 5, "bits_k": 2, "bits_v": 3},
    "index 5, keys 3, values 3": {"bits_index": 5, "bits_k": 3, "bits_v": 3},
    "4bit": {"index": 0, "bits_k": 4, "bits_v": 4},
    "6bit": {"index": 0, "bits_k": 6, "bits_v": 6},
    "8bit": {"index": 0, "bits_k": 8, "bits_v": 8},
}
"""Bits of the plans that are tried, in order of bytes."""
FIRST = [*CANDIDATES].index("3bit")
SPEED_TOKENS = 32
"""Tokens generated to measure speed."""


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    """Options of `compress`.

    Attributes:
      max_loss: Largest relative increase of perplexity, such as 0.01 for 1 %.
      context: Context length to calibrate, choose and judge at, in tokens.
      minutes: Time after which no further plan is tried. The judgement follows in any case.
      tokens: Tokens of text to calibrate on.
      documents: Most documents with task questions, and most text windows, in the choice and in the
        judgement.
      seed: Seed that chooses text and facts.
    """

    max_loss: float = 0.01
    context: int = 8192
    minutes: float = 5.0
    tokens: int = 32_768
    documents: int = 24
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.max_loss < 1:
            raise EvaluationError(f"max_loss={self.max_loss} must lie between 0 and 1, such as 0.01 for 1 %")
        if self.minutes < 0:
            raise EvaluationError(f"minutes={self.minutes} must not be negative")
        for name, least in (("context", 256), ("documents", 1), ("tokens", 1)):
            if (value := getattr(self, name)) < least:
                raise EvaluationError(f"{name}={value} must be at least {least}")


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


@dataclass(frozen=True)
class Outcome:
    """Result of `compress`.

    Attributes:
      plan: the judged plan, stored in the folder.
      rows: the unmodified model and the plan.
      within: whether the plan holds the limits on the text of the judgement.
    """

    plan: CompressionPlan
    rows: tuple[Row, Row]
    within: bool


class _State:
    """Measurements of a run so far, in a file of the output."""

    def __init__(self, path: Path, run: dict[str, Any]):
        self.path, self.run, self.reports, self.is_done = path, run, dict[str, Any](), False

    @classmethod
    def open(cls, output: Path, run: dict[str, Any], *, overwrite: bool) -> "_State":
        """Continue an interrupted run of the same options, or begin a new one.

        Raises:
          CheckpointError: the output exists, and is not from an interrupted run of these options.
        """
        state = cls(output / STATE_FILE, run)
        if overwrite or not output.exists():
            return state
        stored = load_json(state.path) if state.path.exists() else None
        if not isinstance(stored, dict) or stored.get("run") != run or stored.get("done"):
            raise CheckpointError(
                f"{output} exists, and no interrupted run with the same options made it; "
                "pass --overwrite to replace it, or choose another folder"
            )
        state.reports = stored["reports"]
        return state

    def save(self) -> None:
        """Write the state atomically."""
        value = {"run": self.run, "done": self.is_done, "reports": self.reports}
        with whole_file(self.path) as file:
            file.write_text(json.dumps(value, indent=1) + "\n")


def compress(
    source: str | Path,
    output: str | Path,
    texts: Sequence[str | Path] = (),
    options: CompressOptions | None = None,
    *,
    overwrite: bool = False,
    watch: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Convert a checkpoint, calibrate it, choose and judge a plan, and store all in one folder.

    An interrupted run continues where it stopped if it is called again with the same options.

    Args:
      source: Hugging Face folder or GGUF file.
      output: folder to write.
      texts: files or folders of text. Default: the documentation that Python ships.
      options: default `CompressOptions()`.
      overwrite: replace an existing output.
      watch: receives a line of text at each stage.

    Returns:
      The stored plan and what was measured. If no plan holds the limits, it is that of 8 bits.

    Raises:
      CheckpointError: the output exists, or the disk is full.
      ConversionError, CalibrationError, TextError, EvaluationError: as in `convert`, `calibrate` and
        `evaluate`.
    """
    options, output = options or CompressOptions(), Path(output)
    run = {"source": str(Path(source).resolve()), "texts": [*map(str, texts)], **asdict(options)}
    state = _State.open(output, run, overwrite=overwrite)
    with TemporaryDirectory() as scratch:
        paths = [*texts] or [write_default_text(Path(scratch) / "python-documentation")]
        documents = list(read_documents(paths))  # Bad paths fail before any work.
        if overwrite or not output.exists():
            watch(f"converting {source}")
            convert(source, output, overwrite=overwrite)
            state.save()
        checkpoint = Checkpoint.open(output)
        if not (checkpoint.calibration_path / "basis").exists():
            watch(f"calibrating on {options.tokens:,} tokens")
            text = _write_unjudged(Path(scratch) / "calibration", documents)
            dtype = _calibration_dtype(checkpoint)
            calibrate(output, [text], _calibration_options(options, checkpoint), dtype=dtype)
    return _choose_and_judge(checkpoint, documents, options, state, watch)


def _write_unjudged(folder: Path, documents: Iterable[Document]) -> Path:
    """Write the text that the judgement does not read into a folder, one folder for each topic."""
    documents = list(documents)
    for split in (split for split in SPLITS if split != "report"):
        for index, document in enumerate(documents_of(split, documents)):
            topic = folder / (document.topic or "text")
            topic.mkdir(parents=True, exist_ok=True)
            (topic / f"{split}-{index:06}.txt").write_text(document.text)
    return folder


def _calibration_options(options: CompressOptions, checkpoint: Checkpoint) -> CalibrationOptions:
    context = min(options.context, checkpoint.config.max_positions)
    return CalibrationOptions(
        qk="balanced", vo="balanced", tokens=options.tokens, context=context, profile=False
    )


def _calibration_dtype(checkpoint: Checkpoint) -> str | None:
    """Return float32 if the model fits the free memory twice; None is the dtype of the weights.

    The mean of keys can be so large that 16 bits round away what is left of them.
    """
    free, itemsize = free_bytes(), jnp.dtype(checkpoint.config.dtype).itemsize
    stored = sum(path.stat().st_size for path in checkpoint.path.rglob("*") if path.is_file())
    return "float32" if free is not None and 2 * stored * 4 // itemsize < free else None


def _choose_and_judge(
    checkpoint: Checkpoint,
    documents: list[Document],
    options: CompressOptions,
    state: _State,
    watch: Callable[[str], None],
) -> Outcome:
    trials = _Trials(checkpoint, documents, options, state, watch)
    ends, names = time.monotonic() + 60 * options.minutes, [*CANDIDATES]
    index = FIRST
    if trials.holds("search", names[index]):
        while index > 0 and time.monotonic() < ends and trials.holds("search", names[index - 1]):
            index -= 1
    else:
        index += 1
        while index < len(names) - 1 and time.monotonic() < ends and not trials.holds("search", names[index]):
            index += 1
    while not (within := trials.holds("report", names[index])) and index < len(names) - 1:
        index += 1
    plan = trials.plan(names[index])
    plan.save(checkpoint.path / PLAN_FILE)
    rows = trials.dense_row(), trials.row(names[index])
    state.is_done = True
    state.save()
    return Outcome(plan, rows, within)


class _Trials:
    """Measurements of candidates, each made once and kept in the state."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        documents: list[Document],
        options: CompressOptions,
        state: _State,
        watch: Callable[[str], None],
    ):
        self.checkpoint, self.options, self.state, self.watch = checkpoint, options, state, watch
        self.documents, self.context = documents, min(options.context, checkpoint.config.max_positions)
        self.basis = stored_basis(checkpoint)
        self.dense = load(checkpoint.path)
        self.evaluations: dict[Split, Evaluation] = {}

    def plan(self, name: str) -> CompressionPlan:
        """Return a candidate's plan."""
        settings = {"index": index_size(self.checkpoint.config.head_dim)} | CANDIDATES[name]
        return coded_plan(self.checkpoint, self.basis, settings)

    def holds(self, split: Split, name: str) -> bool:
        """Return whether a candidate holds the limits on a split of the text."""
        report = self.report(split, name)
        least = SEARCH_RETENTION if split == "search" else JUDGED_RETENTION
        worst = _find_worst(report)
        return report["perplexity"]["increase"] <= self.options.max_loss and (worst is None or worst >= least)

    def report(self, split: Split, name: str) -> Any:
        """Return a candidate's report, measured if it is not in the state yet."""
        key = f"{split}: {name}"
        if key not in self.state.reports:
            self.watch(f"{'trying' if split == 'search' else 'judging'} {name}")
            network = _network_of(load(self.checkpoint.path, self.plan(name)))
            report: ContextReport = self._evaluation(split).evaluate(network)
            self.state.reports[key] = report.to_json()
            self.state.save()
        return self.state.reports[key]

    def _evaluation(self, split: Split) -> Evaluation:
        if split not in self.evaluations:
            config, tokenizer = self.checkpoint.config, self.checkpoint.tokenizer()
            (material,) = prepare(
                config,
                tokenizer,
                CompressionPlan.full(config),
                self.documents,
                tasks=TASKS,
                contexts=(self.context,),
                split=split,
                max_documents=self.options.documents,
                seed=self.options.seed,
            )
            dense = _network_of(self.dense)
            self.evaluations[split] = Evaluation(dense, material, protocol="cached", batch=1)
        return self.evaluations[split]

    def dense_row(self) -> Row:
        """Return the table's line for the unmodified model."""
        full = CompressionPlan.full(self.checkpoint.config)
        return Row("16 bits", 1.0, self._count_fitting(full), 0.0, None, None, self._time(self.dense))

    def row(self, name: str) -> Row:
        """Return the table's line for a judged candidate."""
        plan, report = self.plan(name), self.report("report", name)
        full = CompressionPlan.full(self.checkpoint.config)
        return Row(
            name,
            plan.bytes(self.context) / full.bytes(self.context),
            self._count_fitting(plan),
            report["perplexity"]["increase"],
            report["perplexity"]["kl"],
            _find_worst(report),
            self._time(load(self.checkpoint.path, plan)),
        )

    def _count_fitting(self, plan: CompressionPlan) -> int | None:
        free = free_bytes()
        return None if free is None else int(free // plan.bytes(self.context) * self.context)

    def _time(self, model: LanguageModel) -> float:
        """Return the decoded tokens per second of one sequence; the first run compiles."""
        new = min(SPEED_TOKENS, self.context // 4)
        prompt = [next(iter(model.config.eos_ids), 0)] * (self.context - new)
        result = [generate(model, [prompt], new, stop_tokens=()) for _ in range(2)][-1]
        return (len(result.completions[0].tokens) - 1) / max(result.timings.decode, 1e-9)


def _network_of(model: LanguageModel) -> Transformer:
    assert isinstance(model.network, Transformer)  # It was not loaded onto a mesh.
    return model.network


def _find_worst(report: dict[str, Any]) -> float | None:
    """Return the smallest retention of the tasks that count, or None."""
    counted: Iterable[float] = (task["retention"] for task in report["tasks"].values() if task["counts"])
    return min(counted, default=None)
