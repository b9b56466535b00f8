"""What does a float8 payload of the exchange cost in perplexity? Float8 beside native, same plan, paired.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m benchmarks.bench_payload \\
        --model HF_FOLDER --corpus CORPUS --name payload-NAME

Prompts are divided over `degree` devices along `sequence`; those of a CPU are virtual, which changes times
and no numbers. `whole`: held-out windows in one prefill. `continuation`: their last `STEPS` tokens, decoded
one by one on the cache of those before them, whose first coordinates are rounded. Of the full plan also with
other scales: what is not clipped 16 times as large or small, and one scale for all coordinates of a head.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks import bench_quality
from benchmarks.bench_quality import CONTEXT, SINKS, Bench
from benchmarks.common import write_result
from benchmarks.studies import degradation, percent, uniform_plan
from zdc_jax.axes import Array
from zdc_jax.basis import Basis
from zdc_jax.cache import KVCache
from zdc_jax.evaluate import window_nll
from zdc_jax.loading import cast, prepared_layers
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Embeddings
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.payload import Payload
from zdc_jax.parallel.traffic import prefill_bytes
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.plan import CompressionPlan

STEPS = 128
WINDOW = 512


@dataclass(frozen=True)
class Options(bench_quality.Options):
    """`degree`: devices along `sequence`."""

    degree: int = 2


@dataclass(frozen=True)
class Case:
    """A plan, and the bases that give its scales, by label."""

    label: str
    plan: CompressionPlan
    scales: dict[str, Basis]


def cases(bench: Bench, basis: Basis) -> Iterator[Case]:
    """A quarter of Q/K and half of V beyond a window, as the traffic goal has it; and all coordinates."""
    calibrated = {"calibrated": basis}
    near = {"window": WINDOW, "sinks": SINKS}
    yield Case("window 512, far (1/4, 1/2)", uniform_plan(bench.config, 1, 2, **near), calibrated)
    others = {
        "16 times larger": rescaled(basis, lambda rms: 16 * rms),
        "16 times smaller": rescaled(basis, lambda rms: rms / 16),
        "one a head": rescaled(basis, lambda rms: np.broadcast_to(rms.max(-1, keepdims=True), rms.shape)),
    }
    yield Case("full", CompressionPlan.full(bench.config), calibrated | others)


def rescaled(basis: Basis, change: Callable[[np.ndarray], np.ndarray]) -> Basis:
    """The basis with other root mean squares [L, K, H], from which scales are made."""
    names = ("q_rms", "k_rms", "v_rms")
    return replace(basis, **{name: change(getattr(basis, name)) for name in names})


def on_mesh(bench: Bench, plan: CompressionPlan, basis: Basis, degree: int, payload: Payload) -> Any:
    """The model with a plan, divided over devices."""
    dtype = bench.dense.network.dtype
    layers = prepared_layers(iter(bench.layers), bench.config, plan, basis, dtype, payload)
    embeddings = Embeddings(cast(bench.checkpoint.embeddings(), dtype), bench.config)
    blocks = (Block(layer, bench.config) for layer in layers)
    return ShardedTransformer(bench.config, plan, embeddings, blocks, MeshConfig(sequence=degree).create())


def continuation_nll(network: ShardedTransformer, windows: np.ndarray, batch: int) -> np.ndarray:
    """Nats a token of the last `STEPS` tokens of each window, decoded after a prompt of the others, [W]."""
    T, means = windows.shape[1], []
    for start in range(0, len(windows), batch):
        tokens = jnp.asarray(windows[start : start + batch])
        end, nll = jnp.full(len(tokens), T - STEPS, jnp.int32), jnp.zeros(len(tokens))
        _, cache = network.prefill(tokens[:, : T - STEPS], end, capacity=T)
        for position in range(T - STEPS, T - 1):
            cache, nll = _step(network, cache, tokens[:, position : position + 2], nll)
        means.append(np.asarray(nll, np.float64) / (STEPS - 1))
    return np.concatenate(means)


@partial(jax.jit, donate_argnums=1)
def _step(network: ShardedTransformer, cache: KVCache, pair: Array, nll: Array) -> tuple[KVCache, Array]:
    """Takes the first of a pair of tokens and adds what the second one costs."""
    hidden, cache = network.extend(cache, pair[:, :1], cache.lengths + 1)
    logits = network.embeddings.unembed(hidden[:, 0])
    return cache, nll - jax.nn.log_softmax(logits)[jnp.arange(len(pair)), pair[:, 1]]


def measured(bench: Bench, case: Case, options: Options) -> dict[str, Any]:
    """One plan: its increase over the unmodified model, and that of float8 over native."""
    sizes = {"length": CONTEXT, "degree": options.degree}
    row: dict[str, Any] = {"label": case.label, "ranks": asdict(case.plan.layers[0]), "float8": {}}
    for payload in ("native", "float8"):
        row[f"{payload}_bytes"] = prefill_bytes(bench.config, case.plan, payload=payload, **sizes)
    basis = case.scales["calibrated"]
    native = on_mesh(bench, case.plan, basis, options.degree, "native")
    nll = window_nll(native, bench.heldout, batch=options.batch)
    row["native"] = degradation(nll, bench.dense_nll)
    later = continuation_nll(native, bench.heldout, options.batch)
    print(f"{case.label}: native {percent(row['native'])}", flush=True)
    for label, source in case.scales.items():
        float8 = on_mesh(bench, case.plan, source, options.degree, "float8")
        found = {"whole": degradation(window_nll(float8, bench.heldout, batch=options.batch), nll)}
        if source is basis:
            decoded = continuation_nll(float8, bench.heldout, options.batch)
            found["continuation"] = degradation(decoded, later)
        row["float8"][label] = found
        print(f"    float8, {label}:", *(f"{k} {percent(v)}" for k, v in found.items()), flush=True)
    return row


def main(options: Options) -> None:
    """Measures the plans and writes one JSON; float32 means exact float32 products."""
    if options.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        basis = bench.make_basis(bench.moments, qk="balanced", vo="balanced")
        rows = [measured(bench, case, options) for case in cases(bench, basis)]
        settings = {k: str(v) for k, v in asdict(options).items() if k != "results"} | {
            "model": options.model.name,
            "corpus": options.corpus.name,
            "heldout_topics": bench.topics,
            "calibration_tokens": int(bench.train.size),
            "dtype": str(bench.dense.network.dtype),
            "dense_perplexity": float(np.exp(bench.dense_nll.mean())),
            "virtual_devices": jax.devices()[0].platform == "cpu",
            "continuation_tokens": STEPS - 1,
            "seconds": time.perf_counter() - began,
        }
        print(write_result(options.name, settings, rows, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options))
