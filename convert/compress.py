"""One command from a checkpoint to a judged plan: conversion, calibration, choice and judgement (ours).

A search finds the smallest plan within the limits (`convert.search.coded_search`). It is then judged
(`convert.judging`). If it fails there, larger plans of the search and the presets of `FALLBACKS` are judged.
If it holds the limits, the search goes on from it in the time that is left.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax.numpy as jnp
from tokenizers import Tokenizer

from convert.calibration.calibrate import CalibrationOptions, calibrate
from convert.conversion import convert, read_source
from convert.default_text import write_default_text, write_library
from convert.judging import Judge, Row
from convert.run_state import Candidate, CompressOptions, RunState
from convert.search.coded_search import CodedBooks, CodedSearch
from convert.search.search import SearchOptions, describe_bytes
from convert.search.trials import Trial
from zdc_jax.cache.kv_cache import free_bytes
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError, TextError
from zdc_jax.evaluation.evaluate import Material, prepare
from zdc_jax.evaluation.splits import SPLITS, Split, documents_of
from zdc_jax.evaluation.text import Document, read_documents
from zdc_jax.loading import stored_basis
from zdc_jax.plan import CompressionPlan
from zdc_jax.presets import PLAN_FILE, coded_plan, preset_settings

JOURNAL_FILE = "compress.journal.jsonl"
"""File in the output that keeps what the search measured."""
TASKS = ("perplexity", "copy", "induction", "lookup", "passkey")
SEARCH_SHARE = 0.6
"""Loss that the search allows in each task that counts, relative to that of the judgement."""
SEARCH_DOCUMENTS = 12
"""Most documents of the search, which measures many plans."""
MOST_LARGER = 1.5
"""Bytes of the largest plan of the search that may be judged, relative to the best one."""
FALLBACKS = ("3bit", "4bit", "8bit")
"""Presets that are judged if smaller plans of the search fail."""
DEFAULT_TEXT = "language reference, docstrings and code of Python's library"
"""Name of the default text in the file of a run, which continues only with the same text."""


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


def compress(
    source: str | Path,
    output: str | Path,
    texts: Sequence[str | Path] = (),
    options: CompressOptions | None = None,
    *,
    overwrite: bool = False,
    watch: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Convert a checkpoint, calibrate it, search and judge a plan, and store all in one folder.

    An interrupted run continues where it stopped if it is called again with the same options.

    Args:
      source: Hugging Face folder or GGUF file.
      output: folder to write.
      texts: files or folders of text. Default: the language reference that Python ships, and the docstrings
        and the code of its library. They fill 56 documents of 8,192 tokens.
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
    named = [*map(str, texts)] or [DEFAULT_TEXT]
    state = RunState.open(output, options, Path(source), named, overwrite=overwrite)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        paths = texts or [write_default_text(folder / "reference"), *write_library(folder)]
        documents = list(read_documents(paths))
        # Text that is too short fails before any work. A run that continues needs no source.
        is_new = overwrite or not output.exists()
        config, tokenizer = read_source(source) if is_new else _read_converted(output)
        if (positions := config.max_positions) < options.context:
            watch(f"context of {positions:,} tokens, the model's positions, instead of {options.context:,}")
        try:
            materials = _prepare(config, tokenizer, documents, options)
        except TextError as error:
            if texts:
                raise
            raise TextError(f"{error}; for text of your own use texts=") from error
        counts = {split: len(material.task_documents) for split, material in materials.items()}
        watch(f"text for {counts['search']} documents to search on and {counts['report']} to judge on")
        if is_new:
            watch(f"converting {source}")
            convert(source, output, overwrite=overwrite)
        checkpoint = Checkpoint.open(output)
        state.save()
        if not (checkpoint.calibration_path / "basis").exists():
            calibration = _calibration_options(options, checkpoint)
            watch(f"calibrating on {calibration.tokens:,} tokens")
            text = _write_unjudged(folder / "calibration", documents)
            calibrate(output, [text], calibration, dtype=_calibration_dtype(checkpoint))
    return _Choice(checkpoint, materials, documents, state, watch).run()


def _read_converted(output: Path) -> tuple[ModelConfig, Tokenizer | None]:
    checkpoint = Checkpoint.open(output)
    return checkpoint.config, checkpoint.tokenizer()


def _write_unjudged(folder: Path, documents: Sequence[Document]) -> Path:
    """Write the text that the judgement does not read into a folder, one folder for each topic."""
    for split in (split for split in SPLITS if split != "report"):
        for index, document in enumerate(documents_of(split, documents)):
            topic = folder / (document.topic or "text")
            topic.mkdir(parents=True, exist_ok=True)
            (topic / f"{split}-{index:06}.txt").write_text(document.text)
    return folder


def _calibration_options(options: CompressOptions, checkpoint: Checkpoint) -> CalibrationOptions:
    context = min(options.context, checkpoint.config.max_positions)
    tokens = max(options.tokens, context)
    return CalibrationOptions(tokens=tokens, context=context, profile=False, center=True)


def _calibration_dtype(checkpoint: Checkpoint) -> str | None:
    """Return float32 if the model fits the free memory twice; None is the dtype of the weights.

    The mean of keys can be so large that 16 bits round away what is left of them.
    """
    free, itemsize = free_bytes(), jnp.dtype(checkpoint.config.dtype).itemsize
    stored = sum(path.stat().st_size for path in checkpoint.path.rglob("*") if path.is_file())
    return "float32" if free is not None and 2 * stored * 4 // itemsize < free else None


def _prepare(
    config: ModelConfig, tokenizer: Tokenizer | None, documents: list[Document], options: CompressOptions
) -> dict[Split, Material]:
    """Return text windows and task documents of the splits of the text on which plans are measured."""
    counts: dict[Split, int] = {
        "search": min(-(-options.documents // 2), SEARCH_DOCUMENTS),
        "report": options.documents,
    }
    materials = dict[Split, Material]()
    for split, count in counts.items():
        (materials[split],) = prepare(
            config,
            tokenizer,
            CompressionPlan.full(config),
            documents,
            tasks=TASKS,
            contexts=(min(options.context, config.max_positions),),
            split=split,
            max_documents=count,
            seed=options.seed,
        )
    return materials


@dataclass(frozen=True)
class _Choice:
    """Search for the plan of a calibrated folder, and its judgement.

    Attributes:
      checkpoint: the folder.
      materials: text to search and to judge on.
      documents: all text.
      state: options of the run, and what was measured so far.
      watch: receives a line of text at each stage.
    """

    checkpoint: Checkpoint
    materials: Mapping[Split, Material]
    documents: Sequence[Document]
    state: RunState
    watch: Callable[[str], None]

    def run(self) -> Outcome:
        """Search, judge, and store the plan."""
        state, options = self.state, self.state.options
        if not state.candidates:
            self.watch(f"searching for at most {options.minutes:g} minutes")
            began = time.monotonic()
            state.candidates = self._list_candidates()
            state.seconds = time.monotonic() - began
            state.save()
        judge = Judge(self.checkpoint, self.materials["report"], self.documents, state, self.watch)
        name = judge.choose()
        smallest, candidate = next(iter(state.candidates.items()))
        # The search goes on from its smallest plan if it knows losses of layers, and has time left.
        if name == smallest and candidate.loss is not None and state.seconds < 60 * options.minutes:
            judge.model = None  # The search needs the memory.
            refined = self._refine(candidate.plan)
            if refined is not None and judge.judge(refined) is None:
                name = refined
        within, name = name is not None, name or [*state.candidates][-1]
        plan = state.candidates[name].plan
        plan.save(self.checkpoint.path / PLAN_FILE)
        rows = judge.make_dense_row(), judge.make_row(name)
        state.is_done = True
        state.save()
        return Outcome(plan, rows, within)

    def _list_candidates(self) -> dict[str, Candidate]:
        """Search, and return the plans to judge, the smallest first."""
        basis, context = stored_basis(self.checkpoint), self.materials["search"].context
        candidates = dict[str, Candidate]()
        search = self._open_search()
        with contextlib.suppress(PlanError):  # No plan of the search holds the limits.
            for plan in (search.book.bind(search.run().plan), *search.list_larger(MOST_LARGER)):
                candidates[f"searched, {search.book.share(plan):.1%}"] = Candidate(
                    plan, search.predict_loss(plan)
                )
        for name in FALLBACKS:
            settings = preset_settings(name, self.checkpoint.config.head_dim)
            candidates[name] = Candidate(coded_plan(self.checkpoint, basis, settings))
        return dict(sorted(candidates.items(), key=lambda item: item[1].plan.bytes(context)))

    def _refine(self, plan: CompressionPlan) -> str | None:
        """Search on from a plan in the time that is left, and return the name of a smaller one.

        It becomes the first candidate. The journal has all that was measured before.
        """
        state, context = self.state, self.materials["search"].context
        self.watch(f"searching for at most {state.options.minutes - state.seconds / 60:.1f} more minutes")
        smallest = plan.bytes(context)
        search = self._open_search(refines=True, used=state.seconds, smallest=smallest)
        try:
            refined = search.book.bind(search.run().plan)
        except PlanError:  # The time ended before the search had read its journal.
            return None
        if refined.bytes(context) >= smallest:
            return None
        name = f"refined, {search.book.share(refined):.1%}"
        state.candidates = {name: Candidate(refined), **state.candidates}
        state.save()
        return name

    def _open_search(
        self, *, refines: bool = False, used: float = 0.0, smallest: float = math.inf
    ) -> CodedSearch:
        """Measure the unmodified model, and return a search that has used some seconds.

        Plans are reported if they have fewer bytes than `smallest`.
        """
        material, options = self.materials["search"], self.state.options
        assert material.windows is not None  # Perplexity is one of the tasks.
        began = time.monotonic() - used
        books = CodedBooks.open(
            self.checkpoint.path,
            material.windows,
            material.task_documents,
            dtype=None,
            batch=1,
            journal=self.checkpoint.path / JOURNAL_FILE,
        )
        limits = SearchOptions(
            options.max_loss,
            min_retention=1 - SEARCH_SHARE * (1 - options.min_retention),
            minutes=options.minutes,
            verifies=False,  # The judgement does that, on more text.
            refines=refines,
        )

        def tell(trial: Trial, best: Trial | None) -> None:
            if trial is best and best.plan.bytes(material.context) < smallest:
                self.watch(f"best so far: {describe_bytes(best)} at {best.increase:+.2%}")

        return CodedSearch(books, limits, tell, began)
