"""Which plans pay? Fronts of KV bytes and perplexity by kind of plan, on text that no search saw.

    python -m benchmarks.bench_plans --model HF_FOLDER --corpus CORPUS --name plans-NAME

Bases and searches read the corpus' `train` split (the searches other windows of it than the bases), every
figure is of `heldout`, and every plan is a model of physically smaller arrays. `oracle` is what the search
found at each limit; `classes` and `window+classes` what it found among the paper's token classes, within
Eq. 6. The JSON is written anew after every kind of plan; other kinds stay as they are in it.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from benchmarks import bench_quality
from benchmarks.common import RESULTS, commit, earlier, write_result
from convert.calibration.calibrate import measured_profile
from convert.search.search import Mode, Search, SearchOptions
from convert.search.trials import TrialBook, trial_json
from zdc_jax.basis import Basis
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, allowed_ranks
from zdc_jax.planning.certificate import certificate
from zdc_jax.planning.profile import SINKS
from zdc_jax.planning.spectrum import plan_from_spectrum

LIMITS = (0.01, 0.005, 0.02, 0.05, 0.1)
"""The first is searched from nothing, and timed; the others use what was measured for it."""
CLASS_LIMITS = (0.01, 0.02, 0.05)
CLASS_MODES: tuple[Mode, ...] = ("classes", "window+classes")
CLASS_TRIALS = 40
"""Most plans measured at each limit with token classes."""
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
WINDOWS = (128, 256, 512)


@dataclass(frozen=True)
class Options:
    """`search_windows` of training text for the search, `windows` of held-out text for what is reported.

    kinds: those to measure (default all).
    """

    model: Path
    corpus: Path
    name: str
    windows: int = 24
    search_windows: int = 12
    tokens: int = 1_000_000
    seed: int = 0
    batch: int = 4
    dtype: str | None = None
    results: Path = RESULTS
    kinds: tuple[str, ...] = ()


def plans(book: TrialBook) -> Iterator[tuple[str, CompressionPlan]]:
    """Plans that need no search, by kind."""
    config, basis = book.config, book.basis
    ranks = allowed_ranks(config.head_dim)[1:]
    for qk, v in itertools.product(ranks, repeat=2):
        if qk <= v:
            yield "uniform", CompressionPlan.uniform(config, qk=qk, v=v)
    for budget in BUDGETS:
        yield "per-layer", plan_from_spectrum(basis, budget=budget, qk_share=0.45)
    for window, (qk, v) in itertools.product(WINDOWS, [*itertools.pairwise(ranks), (16, 16)]):
        yield "window", CompressionPlan.uniform(config, qk=qk, v=v, window=window, sinks=SINKS)
    for window, budget in itertools.product(WINDOWS, BUDGETS[2:]):
        yield (
            "window+per-layer",
            plan_from_spectrum(basis, budget=budget, qk_share=0.45, window=window, sinks=SINKS),
        )


class Bench:
    """The model with its bases, text to search on, and text to report on."""

    def __init__(self, options: Options, folder: Path):
        quality = bench_quality.Options(
            options.model, options.corpus, options.name, options.windows, options.tokens,
            options.seed, options.batch, options.dtype,
        )  # fmt: skip
        self.options, self.quality = options, bench_quality.Bench(quality, folder)
        kinds = ("stacked", "balanced")
        self.bases = {kind: self.quality.make_basis(self.quality.moments, qk=kind, vo=kind) for kind in kinds}
        self.profile = measured_profile(
            self.quality.checkpoint, self.bases["balanced"], self.quality.train, dtype=options.dtype
        )
        self.heldout = {kind: self.book(basis, self.quality.heldout) for kind, basis in self.bases.items()}
        count = options.search_windows
        seen = bench_quality.Bench.windows(self.quality, "train", options.tokens // 4096 + count)[0]
        self.training = self.book(self.bases["balanced"], seen[-count:])

    def book(self, basis: Basis, windows: np.ndarray) -> TrialBook:
        path, options = self.quality.checkpoint.path, self.options
        return TrialBook(
            path, windows, basis=basis, profile=self.profile, dtype=options.dtype, batch=options.batch
        )

    def row(self, kind: str, plan: CompressionPlan, basis: str = "balanced", **extra: Any) -> dict[str, Any]:
        trial = self.heldout[basis].measure(plan)
        print(f"{kind:18} {trial.bytes_share:.3f} {100 * trial.increase:+7.2f} %", flush=True)
        errors: dict[str, float] = {}
        if plan.classes is None:  # The certificate knows one rank for all tokens of a layer.
            certified = certificate(plan, self.bases[basis])

            def rms(error):
                return float(np.sqrt(np.square(error).mean()))

            errors = {"score_error": rms(certified.score), "value_error": rms(certified.value)}
        return {"kind": kind, "basis": basis, **trial_json(trial), **errors, **extra, "commit": commit()}

    def kinds(self) -> dict[str, Callable[[], list[dict[str, Any]]]]:
        """What measures the rows of each kind of plan."""
        by_kind: dict[str, list[CompressionPlan]] = {}
        for kind, plan in plans(self.heldout["balanced"]):
            by_kind.setdefault(kind, []).append(plan)
        oracle = [SearchOptions(limit) for limit in LIMITS]
        found = {"oracle": lambda: list(self.searched("oracle", oracle))}
        for kind, chosen in by_kind.items():
            found[kind] = lambda kind=kind, chosen=chosen: [self.row(kind, plan) for plan in chosen]
        stacked = "uniform stacked"
        found[stacked] = lambda: [self.row(stacked, plan, "stacked") for plan in by_kind["uniform"]]
        for mode in CLASS_MODES:
            searches = [SearchOptions(limit, mode, CLASS_TRIALS) for limit in CLASS_LIMITS]
            found[mode] = lambda mode=mode, searches=searches: list(self.searched(mode, searches))
        return found

    def searched(self, kind: str, searches: list[SearchOptions]) -> Iterator[dict[str, Any]]:
        """What searches found, each with the memory of those before: what it cost there, and held out."""
        book = self.training
        for options in searches:
            began, before = time.perf_counter(), len(book.measurements)
            try:
                best = Search(book, options).run()
            except PlanError as nothing:
                print(f"{kind:18} {nothing}", flush=True)
                continue
            yield self.row(
                kind,
                best.plan,
                limit=options.max_degradation,
                searched_increase=best.increase,
                seconds=time.perf_counter() - began,
                plans_measured=len(book.measurements) - before,
            )


def main(options: Options) -> None:
    """Measures all plans and writes one JSON."""
    settings = {k: str(v) for k, v in asdict(options).items() if k not in ("results", "kinds")}
    settings |= {"model": options.model.name, "corpus": options.corpus.name}
    results: dict[str, Any] = earlier(options.results / f"{options.name}.json", settings) or {"rows": []}
    if options.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        dense = float(np.exp(bench.heldout["balanced"].dense_nll.mean()))
        print(f"dense perplexity {dense:.3f} on {jax.devices()[0].device_kind}")
        kinds = bench.kinds()
        if unknown := set(options.kinds) - kinds.keys():
            raise SystemExit(f"kinds={sorted(unknown)} must be of {sorted(kinds)}")
        for kind in options.kinds or kinds:
            others = [row for row in results["rows"] if row["kind"] != kind]
            results = {"dense_perplexity": dense, "rows": others + kinds[kind]()}
            print(write_result(options.name, settings, results, options.results), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
