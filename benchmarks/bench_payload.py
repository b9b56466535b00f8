"""What does a float8 payload of the exchange cost in perplexity? Float8 beside native, same plan, paired.

    NPROC=8 JAX_CPU_ENABLE_ASYNC_DISPATCH=false XLA_FLAGS=--xla_force_host_platform_device_count=2 \\
        python -m benchmarks.bench_payload --model HF_FOLDER --corpus CORPUS --name payload-NAME

Prompts are divided over `degree` devices along `sequence`; those of a CPU are virtual (and wait for one
another on the threads of one pool, hence NPROC), which changes times and no numbers. `whole`: held-out
windows in one prefill. `continuation`: their last `STEPS` tokens, decoded one by one on the cache of those
before them, whose first coordinates are rounded. `divergence`: mean Kullback-Leibler divergence of the next
token's distribution, native to float8, in nats, on the first batch of windows; it is what rounding costs on
text that the model itself would write, with far less noise.
"""

import tempfile
import time
from dataclasses import asdict, dataclass
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
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.config import ModelConfig
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.fold import cast, prepared_layers
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Embeddings
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.payload import PAYLOADS, Payload
from zdc_jax.parallel.traffic import prefill_bytes
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.plan import CompressionPlan

STEPS = 128
WINDOW = 512
BLOCK = 512
"""Tokens whose logits are in memory at once; divides a window."""


@dataclass(frozen=True)
class Options(bench_quality.Options):
    """`degree`: devices along `sequence`."""

    degree: int = 2


def plans(config: ModelConfig) -> dict[str, CompressionPlan]:
    """A quarter of Q/K and half of V beyond a window, as the goal for traffic has it; and all coordinates."""
    near = {"window": WINDOW, "sinks": SINKS}
    return {
        f"window {WINDOW}, far (1/4, 1/2)": uniform_plan(config, 1, 2, **near),
        "full": CompressionPlan.full(config),
    }


def on_mesh(bench: Bench, plan: CompressionPlan, degree: int, payload: Payload) -> ShardedTransformer:
    """The model with a plan, divided over devices."""
    dtype = bench.dense.network.dtype
    layers = prepared_layers(iter(bench.layers), bench.config, plan, bench.bases["balanced"], dtype, payload)
    embeddings = Embeddings(cast(bench.checkpoint.embeddings(), dtype), bench.config)
    specs = bench.config.layers
    blocks = (Block(layer, bench.config, spec) for layer, spec in zip(layers, specs, strict=True))
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
            jax.block_until_ready(nll)  # Virtual devices with many steps ahead block one another.
        means.append(np.asarray(nll, np.float64) / (STEPS - 1))
    return np.concatenate(means)


@partial(jax.jit, donate_argnums=1)
def _step(network: ShardedTransformer, cache: KVCache, pair: Array, nll: Array) -> tuple[KVCache, Array]:
    """Takes the first of a pair of tokens and adds what the second one costs."""
    hidden, cache = network.extend(cache, pair[:, :1], cache.lengths + 1)
    logits = network.embeddings.unembed(hidden[:, 0])
    return cache, nll - jax.nn.log_softmax(logits)[jnp.arange(len(pair)), pair[:, 1]]


def divergence(native: ShardedTransformer, float8: ShardedTransformer, windows: np.ndarray) -> float:
    """Mean over tokens of the divergence of float8's distributions from native's."""
    tokens = jnp.asarray(windows)
    pair = (network.hidden(tokens)[:, : tokens.shape[1]] for network in (native, float8))
    blocks = (x.reshape(-1, BLOCK, x.shape[-1]) for x in pair)
    return float(np.mean([_divergences(native, *each) for each in zip(*blocks, strict=True)]))


@jax.jit
def _divergences(network: ShardedTransformer, native: Array, float8: Array) -> Array:
    p, q = (jax.nn.log_softmax(network.embeddings.unembed(x)) for x in (native, float8))
    return (jnp.exp(p) * (p - q)).sum(-1)


def measured(bench: Bench, label: str, plan: CompressionPlan, options: Options) -> dict[str, Any]:
    """One plan: its increase over the unmodified model, and that of float8 over native."""
    row: dict[str, Any] = {"label": label, "ranks": asdict(plan.layers[0])}
    for payload in PAYLOADS:
        row[f"{payload}_bytes"] = prefill_bytes(
            bench.config, plan, payload=payload, length=CONTEXT, degree=options.degree
        )
    native, float8 = (on_mesh(bench, plan, options.degree, payload) for payload in PAYLOADS)
    nll = window_nll(native, bench.heldout, batch=options.batch)
    row["native"] = degradation(nll, bench.dense_nll)
    row["whole"] = degradation(window_nll(float8, bench.heldout, batch=options.batch), nll)
    later, later8 = (continuation_nll(x, bench.heldout, options.batch) for x in (native, float8))
    row["continuation"] = degradation(later8, later)
    row["divergence"] = divergence(native, float8, bench.heldout[: options.batch])
    print(
        label, *(f"{name} {percent(row[name])}" for name in ("native", "whole", "continuation")), flush=True
    )
    print(f"    divergence {row['divergence']:.5f} nats", flush=True)
    return row


def main(options: Options) -> None:
    """Measures the plans and writes one JSON; float32 means exact float32 products."""
    if options.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        bench.bases["balanced"] = bench.make_basis(bench.moments, qk="balanced", vo="balanced")
        rows = [measured(bench, label, plan, options) for label, plan in plans(bench.config).items()]
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
