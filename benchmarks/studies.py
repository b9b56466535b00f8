"""What `bench_ablation` and `bench_sensitivity` share: plans, paired differences, a run of parts."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import bench_quality
from benchmarks.bench_quality import Bench
from benchmarks.common import commit, earlier, write_result
from zdc_jax.config import ModelConfig
from zdc_jax.evaluation.perplexity import bootstrap_interval
from zdc_jax.plan import CompressionPlan, LayerRanks, TokenClasses

GROUPS = 3
"""Groups of consecutive layers in class plans. The paper's threshold leaves none in the reference models."""


@dataclass(frozen=True)
class Options(bench_quality.Options):
    """`parts`: those to measure (default all); the others stay as they are in the JSON."""

    parts: tuple[str, ...] = ()


Part = Callable[[Bench], dict[str, Any]]
"""What is found, with the plans measured as `rows`."""


def run_parts(options: Options, parts: dict[str, Part], figure: Callable[[Any, Path], None] | None) -> None:
    """Measures part by part, and writes the JSON anew after each; then draws a PNG of the same name.

    Raises:
      SystemExit: before any work: there is no such part, or the JSON is of other settings, as are those
        written before 8cc3ebe; another `--name` leaves them alone.
    """
    unknown = set(options.parts) - parts.keys()
    if unknown:
        raise SystemExit(f"parts={sorted(unknown)} must be of {sorted(parts)}")
    if options.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    path = options.results / f"{options.name}.json"
    settings = {k: str(v) for k, v in asdict(options).items() if k not in ("results", "parts")}
    settings |= {"model": options.model.name, "corpus": options.corpus.name}
    results: dict[str, Any] = earlier(path, settings) or {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        kinds = ("balanced", "stacked")
        bench.bases = {kind: bench.make_basis(bench.moments, qk=kind, vo=kind) for kind in kinds}
        seen = {
            "commit": commit(),
            "heldout_topics": bench.topics,
            "calibration_tokens": int(bench.train.size),
            "dtype": str(bench.dense.network.dtype),
            "dense_perplexity": float(np.exp(bench.dense_nll.mean())),
        }
        for name in options.parts or parts:
            began = time.perf_counter()
            results[name] = {**parts[name](bench), **seen, "seconds": time.perf_counter() - began}
            print(f"{name}: {results[name]['seconds']:.0f} s", flush=True)
            write_result(options.name, settings, results, options.results)
    if figure is not None:
        figure(results, path.with_suffix(".png"))
    print(path)


def quarters(config: ModelConfig, qk: int, v: int) -> LayerRanks:
    """So many quarters of the head dim, which is a multiple of 64."""
    return LayerRanks(config.head_dim * qk // 4, config.head_dim * v // 4)


def uniform_plan(config: ModelConfig, qk: int, v: int, **near: int) -> CompressionPlan:
    """So many quarters of the head dim in every layer."""
    ranks = quarters(config, qk, v)
    return CompressionPlan.uniform(config, qk=ranks.qk, v=ranks.v, **near)


def class_plan(config: ModelConfig, fraction: Sequence[float], **near: int) -> CompressionPlan:
    """Token classes, `fraction` important of each of the `GROUPS` groups.

    Important tokens keep (3/4, 1) of (Q/K, V), the rest (1/4, 1/2) and leaders (1/2, 3/4): half of them
    important takes the bytes of (1/2, 3/4) for all tokens, but for the positions of the slots.
    """
    L = config.num_layers
    leaders = tuple(L * group // GROUPS for group in range(GROUPS))
    classes = TokenClasses(leaders, tuple(fraction), (quarters(config, 3, 4),) * L)
    plan = uniform_plan(config, 1, 2, **near)
    ranks = [quarters(config, 2, 3) if i in leaders else ranks for i, ranks in enumerate(plan.layers)]
    return replace(plan, layers=tuple(ranks), classes=classes)


def degradation(nll: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """Increase of perplexity over `reference`, both nats a token by window [W], and its paired interval."""
    difference = nll - reference
    return {"increase": float(np.expm1(difference.mean())), "interval": bootstrap_interval(difference)}


def percent(found: dict[str, Any]) -> str:
    """What `degradation` gave, to be read."""
    low, high = (100 * bound for bound in found["interval"])
    return f"{100 * found['increase']:+.2f} % [{low:+.2f}, {high:+.2f}]"


def over(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """A row of `Bench.run` with what it costs more than another, window by window."""
    pair = (np.log1p(one["window_increases"]) for one in (row, base))
    found = degradation(*pair)
    print(f"    {row['label']} over {base['label']}: {percent(found)}", flush=True)
    return {**row, "over": {"base": base["label"], **found}}
