"""Does the predictor know plans of models that it has not seen? Three commands, in this order:

    python -m benchmarks.bench_predictor observe  --model HF_FOLDER --corpus CORPUS --name NAME
    python -m benchmarks.bench_predictor fit
    python -m benchmarks.bench_predictor evaluate --model HF_FOLDER --corpus CORPUS --name NAME

`observe`, for every model, searches plans at several limits on training text and writes all that it measured,
with the model's features, to `results/observations/NAME.json`. `fit` learns from all of them and writes the
predictor that ships. `evaluate` leaves the model out, learns from the others, and measures on held-out text,
beside `oracle` (the search's best plan at the limit, by its text):

`predicted`  unchecked, with the predictor's margin;
`predicted, checked`  made sure on 16 training windows, and `as searched` on the twelve that the search had;
`constant`   the plan of the model nearest in depth, of its kind, at the middle limit, whatever is asked;
`look-up`    that model's plan at the limit asked. Both stretched by relative depth and share of the head dim.
"""

import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from benchmarks import bench_quality
from benchmarks.common import RESULTS, write_result
from convert.calibration.calibrate import measured_profile
from convert.search.fit_predictor import Observations, fit
from convert.search.search import Search, SearchOptions
from convert.search.trials import TrialBook, trial_json
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks, allowed_ranks
from zdc_jax.planning.checked import checked_plan
from zdc_jax.planning.predictor import Predictor
from zdc_jax.planning.profile import SINKS

OBSERVATIONS = RESULTS / "observations"
STORED = Path(__file__).parents[1] / "zdc_jax" / "planning" / "predictor.json"
SEARCHED = (0.01, 0.02, 0.05, 0.005, 0.1)
LIMITS = (0.01, 0.02, 0.05)
SEARCH_WINDOWS, CHECK_WINDOWS = 12, 16


@dataclass(frozen=True)
class Run:
    """One model; the corpus' `train` split is calibrated, searched and checked on, `heldout` reported."""

    model: Path
    corpus: Path
    name: str
    windows: int = 24
    tokens: int = 1_000_000
    seed: int = 0
    batch: int = 4
    dtype: str | None = None
    results: Path = RESULTS


class Bench:
    """The model with its basis and profile, and books of trials on text."""

    def __init__(self, run: Run, folder: Path):
        options = bench_quality.Options(
            run.model, run.corpus, run.name, run.windows, run.tokens, run.seed, run.batch, run.dtype
        )
        self.run, self.quality = run, bench_quality.Bench(options, folder)
        self.config = self.quality.config
        self.basis = self.quality.make_basis(self.quality.moments, qk="balanced", vo="balanced")
        self.profile = measured_profile(
            self.quality.checkpoint, self.basis, self.quality.train, dtype=run.dtype
        )
        count = run.tokens // bench_quality.CONTEXT + SEARCH_WINDOWS
        self.searched, _ = self.quality.windows("train", count)

    @cached_property
    def checks(self) -> dict[str, TrialBook]:
        """Text that plans are checked on: other than the search's, and the search's own."""
        other = self.searched[-SEARCH_WINDOWS - CHECK_WINDOWS : -SEARCH_WINDOWS]
        own = self.searched[-SEARCH_WINDOWS:]
        return {"predicted, checked": self.book(other), "predicted, checked as searched": self.book(own)}

    def book(self, windows: np.ndarray) -> TrialBook:
        path, run = self.quality.checkpoint.path, self.run
        return TrialBook(
            path, windows, basis=self.basis, profile=self.profile, dtype=run.dtype, batch=run.batch
        )


@dataclass(frozen=True)
class Observe(Run):
    """Search one model's plans and write what was measured."""

    def main(self) -> None:
        """Writes `observations/NAME.json`."""
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(self, Path(folder))
            book = bench.book(bench.searched[-SEARCH_WINDOWS:])
            for limit in SEARCHED:
                best = Search(book, SearchOptions(limit)).run()
                print(f"{self.name}: limit {limit} {best.bytes_share:.3f} {best.increase:+.4f}", flush=True)
            seen = Observations.from_trials(self.name, bench.config, bench.profile, book.trials)
        (self.results / OBSERVATIONS.name).mkdir(parents=True, exist_ok=True)
        seen.save(self.results / OBSERVATIONS.name / f"{self.name}.json")


@dataclass(frozen=True)
class Fit:
    """Learn from all observations and write the predictor that ships with the package."""

    def main(self) -> None:
        """Writes `zdc_jax/predictor.json`."""
        predictor = fit(all_observations())
        STORED.write_text(predictor.to_json())
        print(predictor.to_json())


@dataclass(frozen=True)
class Evaluate(Run):
    """Predict plans of a model left out of the fit and measure them on held-out text."""

    def main(self) -> None:
        """Writes `predicted-NAME.json`."""
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(self, Path(folder))
            heldout, rows = bench.book(bench.quality.heldout), []
            others = {each.name: each for each in all_observations()}
            own = others.pop(self.name)
            predictor = fit(list(others.values()))
            for limit in LIMITS:
                plans = {**predicted_plans(bench, predictor, limit), **known_plans(bench, own, others, limit)}
                for kind, plan in plans.items():
                    row = {"kind": kind, "limit": limit, **trial_json(heldout.measure(plan))}
                    shown = f"{row['bytes_share']:.3f} {100 * row['increase']:+7.2f} %"
                    print(f"{self.name} {limit} {kind:20} {shown}", flush=True)
                    rows.append(row)
        settings = {k: str(v) for k, v in asdict(self).items() if k != "results"}
        settings |= {"model": self.model.name, "corpus": self.corpus.name}
        print(write_result(f"predicted-{self.name}", settings, {"rows": rows}, self.results))


def all_observations() -> list[Observations]:
    """Of every model observed, by name."""
    return [Observations.load(path) for path in sorted(OBSERVATIONS.glob("*.json"))]


def predicted_plans(bench: Bench, predictor: Predictor, limit: float) -> dict[str, CompressionPlan]:
    """Unchecked, and checked on either text."""
    config, profile = bench.config, bench.profile
    at: Any = {"context": bench_quality.CONTEXT}
    plans = {"predicted": predictor.plan(config, profile, max_degradation=limit, **at)}
    for kind, book in bench.checks.items():
        began, known = time.perf_counter(), len(book.measurements)

        def measure(plan, book=book):
            return book.measure(plan).increase

        plan = checked_plan(predictor.forecast(config, profile), measure, max_degradation=limit, **at)
        plans[kind] = plan or CompressionPlan.full(config)
        took = time.perf_counter() - began
        print(f"{kind}: {len(book.measurements) - known} more plans in {took:.0f} s", flush=True)
    return plans


def known_plans(
    bench: Bench, own: Observations, others: dict[str, Observations], limit: float
) -> dict[str, CompressionPlan]:
    """What a search of this model found, and what the plans of others offer."""
    alike = [each for each in others.values() if each.rotary == own.rotary]
    nearest = min(alike, key=lambda each: abs(len(each.far_nats) - len(own.far_nats)))
    return {
        "oracle": best_plan(own, limit, bench.config),
        "look-up": best_plan(nearest, limit, bench.config),
        "constant": best_plan(nearest, sorted(SEARCHED)[len(SEARCHED) // 2], bench.config),
    }


def best_plan(observations: Observations, limit: float, config: ModelConfig) -> CompressionPlan:
    """The smallest plan observed within the limit, stretched to the shape of `config`."""
    plans = zip(observations.plans, observations.nats, strict=True)
    held = [stretched(*plan, observations.head_dim, config) for plan, nats in plans
            if nats <= np.log1p(limit)]  # fmt: skip
    if not held:
        raise PlanError(f"{observations.name} has no plan within {limit:.1%}")
    return min(held, key=lambda plan: plan.bytes(bench_quality.CONTEXT))


def stretched(
    window: int, ranks: tuple[tuple[int, int], ...], head_dim: int, config: ModelConfig
) -> CompressionPlan:
    """A plan of another shape: layers by relative depth, ranks by share of the head dim, rounded up."""
    L, allowed = config.num_layers, allowed_ranks(config.head_dim)

    def fit_rank(rank):
        return next(r for r in allowed if r >= rank * config.head_dim / head_dim)

    at = [round(i * (len(ranks) - 1) / max(L - 1, 1)) for i in range(L)]
    layers = tuple(LayerRanks(*map(fit_rank, ranks[i])) for i in at)
    return replace(CompressionPlan.full(config), layers=layers, window=window, sinks=SINKS)


Command = (
    Annotated[Observe, tyro.conf.subcommand("observe")]
    | Annotated[Fit, tyro.conf.subcommand("fit")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
)

if __name__ == "__main__":
    command: Any = tyro.cli(Command, description=__doc__)  # type: ignore[arg-type]
    command.main()
