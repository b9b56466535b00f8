"""Benchmark of calibration: moments, stored basis and profile of a model of Llama-2-13B's shape.

    python -m benchmarks.model.bench_calibration --tokens 1000000

Weights are random bf16. The forward pass alone is timed together with the moments. The paper's route (prune
half of the sequences, K-means, decomposition) runs on the same tokens.
"""

import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.common import RESULTS, write_result
from convert.calibration.calibrate import add_moments, collect_moments, zero_sums
from convert.calibration.collect_profile import collect_profile, whole_plan
from convert.calibration.estimate_shift import estimate_shift, list_mean_keys
from convert.calibration.kmeans import kmeans_moments
from convert.calibration.make_basis import make_basis
from convert.calibration.moments import Moments
from zdc_jax.model.params import num_params
from zdc_jax.model.transformer import Transformer


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      layers: layers of the model; fewer for a trial.
      kmeans: whether the paper's route runs too.
    """

    tokens: int = 1_000_000
    batch: int = 2
    clusters: int = 1024
    layers: int = 40
    kmeans: bool = True
    overhead_windows: int = 16
    name: str = "calibration-llama-2-13b-shape"
    results: Path = RESULTS


def seconds_per_window(network: Transformer, windows: np.ndarray, batch: int) -> dict[str, Any]:
    """Time the forward pass alone and with moments, alternating; return medians in seconds a window."""
    forward = jax.jit(lambda network, tokens: network.hidden(tokens).sum())
    sums, weight = zero_sums(network), jnp.ones(batch)
    shift = estimate_shift(network, windows[:1])
    keys = list_mean_keys(network.config, shift, windows.shape[1])
    raw: dict[str, list[float]] = {"forward": [], "with_moments": []}
    for start in range(0, len(windows), batch):
        tokens = jnp.asarray(windows[start : start + batch])
        began = time.perf_counter()
        jax.block_until_ready(forward(network, tokens))
        middle = time.perf_counter()
        sums = jax.block_until_ready(add_moments(network, sums, keys, tokens, weight))
        raw["forward"].append((middle - began) / batch)
        raw["with_moments"].append((time.perf_counter() - middle) / batch)
    medians = {name: float(np.median(times[1:])) for name, times in raw.items()}
    return {**medians, "overhead": medians["with_moments"] / medians["forward"] - 1, "raw": raw}


def main(options: Options) -> None:
    """Time each stage and write one JSON file."""
    config = replace(LLAMA_2_13B, layers=LLAMA_2_13B.layers[: options.layers])
    network = build(config)
    context = config.max_positions
    rng = np.random.default_rng(0)
    shape = (options.tokens // context // options.batch * options.batch, context)
    windows = rng.integers(config.vocab_size, size=shape, dtype=np.int32)
    flops = 2 * num_params(config) * windows.size
    print(f"{num_params(config):,} parameters, {windows.size:,} tokens, ceiling (matrix products at 714 "
          f"TFLOP/s): {flops / 714e12:.1f} s")  # fmt: skip
    results: dict[str, Any] = {
        "per_window": seconds_per_window(network, windows[: options.overhead_windows], options.batch)
    }
    print({k: v for k, v in results["per_window"].items() if k != "raw"}, flush=True)

    began = time.perf_counter()
    moments = collect_moments(network, windows, fingerprint="random", batch=options.batch)
    results["seconds_moments"] = time.perf_counter() - began
    print(f"moments {results['seconds_moments']:.1f} s", flush=True)
    output_weights = [np.asarray(layer.attention.o[...], np.float64) for layer in network.layers]
    results |= store_basis(moments, output_weights)
    print(f"basis {results['seconds_basis']:.1f} s", flush=True)
    results["seconds_profile"] = seconds_of_profile(network, windows)
    results["seconds_total"] = sum(results[f"seconds_{stage}"] for stage in ("moments", "basis", "profile"))
    print(f"profile {results['seconds_profile']:.1f} s, total {results['seconds_total']:.1f} s", flush=True)
    if options.kmeans:
        topics = [str(i % 16) for i in range(len(windows))]
        began = time.perf_counter()
        paper = kmeans_moments(
            network, windows, topics, prune=0.5, clusters=options.clusters, seed=0, fingerprint="random"
        )
        results["kmeans_seconds_moments"] = time.perf_counter() - began
        stored = store_basis(paper, output_weights, qk="stacked", vo="stacked")
        results["kmeans_seconds_total"] = results["kmeans_seconds_moments"] + stored["seconds_basis"]
        print(f"K-means route, total {results['kmeans_seconds_total']:.1f} s", flush=True)
    settings = {k: v for k, v in asdict(options).items() if k not in ("results", "name")}
    print(write_result(options.name, settings | {"model": config.to_json()}, results, options.results))


def seconds_of_profile(network: Transformer, windows: np.ndarray) -> float:
    """Return the seconds of `zdc calibrate`'s profile, without a basis, since only widths take time."""
    plan, network.plan = network.plan, whole_plan(network.config)
    began = time.perf_counter()
    collect_profile(network, windows, fingerprint="random", progress=True)
    network.plan = plan
    return time.perf_counter() - began


def store_basis(moments: Moments, output_weights: list[np.ndarray], **kinds: Any) -> dict[str, float]:
    """Return the seconds from moments to a stored basis."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        make_basis(moments, output_weights, **kinds).save(Path(folder) / "basis")
        return {"seconds_basis": time.perf_counter() - began}


if __name__ == "__main__":
    main(tyro.cli(Options))
