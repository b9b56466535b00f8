"""What do payloads of the exchange cost in perplexity? Each beside native, same plan, paired.

    NPROC=8 JAX_CPU_ENABLE_ASYNC_DISPATCH=false XLA_FLAGS=--xla_force_host_platform_device_count=2 \\
        python -m benchmarks.bench_payload --model HF_FOLDER --corpus CORPUS --name payload-NAME

On SmolLM2, whose nine heads three devices divide, and by whole windows of all coordinates alone:

    … --degree 3 --context 8192 --windows 4 --tokens 16384 --batch 1 --dtype float32 --plan full --whole-only

Prompts are divided over `degree` devices along `sequence`; those of a CPU are virtual (and wait for one
another on the threads of one pool, hence NPROC), which changes times and no numbers. `whole`: held-out
windows in one prefill. `continuation`: their last `STEPS` tokens, decoded one by one on the cache of those
before them, whose first coordinates are rounded. `divergence`: mean Kullback-Leibler divergence of the next
token's distribution, native to the payload's, in nats, on the first batch of windows; it is what rounding
costs on text that the model itself would write, with far less noise. Bytes are those of 16 bits, by formula
and in compiled programs of one layer times layers, and as shares of dense Ulysses'.
"""

import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks import bench_quality
from benchmarks.bench_generate import LLAMA_2_7B
from benchmarks.bench_host_memory import LLAMA_3_8B
from benchmarks.bench_quality import SINKS, Bench
from benchmarks.common import write_result
from benchmarks.studies import degradation, percent, uniform_plan
from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.config import ModelConfig
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.fold import cast, prepared_layers
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Embeddings
from zdc_jax.parallel.attention import sharded_attention
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.payload import PAYLOADS, Payload
from zdc_jax.parallel.traffic import hlo_bytes, prefill_bytes
from zdc_jax.parallel.transformer import ShardedTransformer, whole_layer
from zdc_jax.plan import CompressionPlan

LLAMAS = {"llama_2_7b": LLAMA_2_7B, "llama_3_8b": LLAMA_3_8B}
STEPS = 128
WINDOW = 512
BLOCK = 512
"""Tokens whose logits are in memory at once; divides a window."""


@dataclass(frozen=True)
class Options(bench_quality.Options):
    """degree: devices along `sequence`. payloads: beside native. plan: of the rows, all where it is None.

    whole_only: no continuation and no divergence, and `native` is not compared with the unmodified model.
    """

    degree: int = 2
    payloads: tuple[Payload, ...] = PAYLOADS[1:]
    plan: Literal["window", "full"] | None = None
    whole_only: bool = False


def plans(config: ModelConfig) -> dict[str, CompressionPlan]:
    """A quarter of Q/K and half of V beyond a window, as the goal for traffic has it; and all coordinates."""
    near = {"window": WINDOW, "sinks": SINKS}
    return {
        "window": uniform_plan(config, 1, 2, **near),
        "full": CompressionPlan.full(config),
    }


def on_mesh(
    bench: Bench, plan: CompressionPlan, degree: int, payload: Payload, dtype: jnp.dtype
) -> ShardedTransformer:
    """The model with a plan, divided over devices."""
    layers = prepared_layers(iter(bench.layers), bench.config, plan, bench.bases["balanced"], dtype, payload)
    embeddings = Embeddings(cast(bench.checkpoint.embeddings(), dtype), bench.config)
    specs = bench.config.layers
    blocks = (Block(layer, bench.config, spec) for layer, spec in zip(layers, specs, strict=True))
    mesh = MeshConfig(sequence=degree).create()
    return ShardedTransformer(bench.config, plan, embeddings, blocks, mesh, payload=payload)


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


def divergence(native: ShardedTransformer, other: ShardedTransformer, windows: np.ndarray) -> float:
    """Mean over tokens of the divergence of another payload's distributions from native's."""
    tokens = jnp.asarray(windows)
    pair = (network.hidden(tokens)[:, : tokens.shape[1]] for network in (native, other))
    blocks = (x.reshape(-1, BLOCK, x.shape[-1]) for x in pair)
    return float(np.mean([_divergences(native, *each) for each in zip(*blocks, strict=True)]))


@jax.jit
def _divergences(network: ShardedTransformer, native: Array, other: Array) -> Array:
    p, q = (jax.nn.log_softmax(network.embeddings.unembed(x)) for x in (native, other))
    return (jnp.exp(p) * (p - q)).sum(-1)


def sent(bench: Bench, plan: CompressionPlan, options: Options, payload: Payload) -> dict[str, Any]:
    """Bytes of a prompt of 16 bits that leave a device, in all layers, which are alike.

    `compiled`: XLA for CPUs sends the sum of the sinks in float32. `llama_2_7b`, `llama_3_8b`: shares by
    formula at 131072 tokens on four devices.
    """
    config, at = bench.config, {"length": options.context, "degree": options.degree}
    network = on_mesh(bench, plan, options.degree, payload, jnp.dtype("bfloat16"))
    padded = -(-options.context // options.degree) * options.degree
    x = jax.ShapeDtypeStruct((1, padded, config.embed_dim), network.dtype)
    given = network.layer_caches[0], network.mesh, sharded_attention, None, "replicated", payload
    program = whole_layer.lower(network.prompt_layers[0], x, *given).compile()
    compiled = config.num_layers * hlo_bytes(program.as_text())
    found = {
        "formula": prefill_bytes(config, plan, payload=payload, **at),
        "compiled": compiled,
        "share": compiled / prefill_bytes(config, CompressionPlan.full(config), **at),
    }
    return found | {name: share(larger, plan, payload) for name, larger in LLAMAS.items()}


def share(config: ModelConfig, plan: CompressionPlan, payload: Payload) -> float:
    """Of dense Ulysses' bytes, by formula, with as large a part of the coordinates as `plan` keeps."""
    ranks, at = plan.layers[0], {"length": 131072, "degree": 4}
    qk, v = (rank * config.head_dim // plan.head_dim for rank in (ranks.qk, ranks.v))
    larger = CompressionPlan.uniform(config, qk=qk, v=v, window=plan.window, sinks=plan.sinks)
    dense = prefill_bytes(config, CompressionPlan.full(config), **at)
    return prefill_bytes(config, larger, payload=payload, **at) / dense


def measured(bench: Bench, label: str, plan: CompressionPlan, options: Options) -> dict[str, Any]:
    """One plan: its increase over the unmodified model, and that of each payload over native."""
    row: dict[str, Any] = {"label": label, "ranks": asdict(plan.layers[0])}
    dtype, batch = bench.dense.network.dtype, options.batch
    row["bytes"] = {x: sent(bench, plan, options, x) for x in ("native", *options.payloads)}
    print(label, {payload: f"{found['share']:.4f}" for payload, found in row["bytes"].items()}, flush=True)
    native = on_mesh(bench, plan, options.degree, "native", dtype)
    nll = window_nll(native, bench.heldout, batch=batch)
    row["native"] = {"nll": nll.tolist()}
    if not options.whole_only:
        row["native"] |= degradation(nll, bench.dense_nll)
        later = continuation_nll(native, bench.heldout, batch)
    for payload in options.payloads:
        other = on_mesh(bench, plan, options.degree, payload, dtype)
        own = window_nll(other, bench.heldout, batch=batch)
        found = {"nll": own.tolist(), "whole": degradation(own, nll)}
        if not options.whole_only:
            found["continuation"] = degradation(continuation_nll(other, bench.heldout, batch), later)
            found["divergence"] = divergence(native, other, bench.heldout[:batch])
        row[payload] = found
        told = [f"{name} {percent(found[name])}" for name in ("whole", "continuation") if name in found]
        print(label, payload, *told, flush=True)
    return row


def main(options: Options) -> None:
    """Measures the plans and writes one JSON; float32 means exact float32 products."""
    if options.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        bench.bases["balanced"] = bench.make_basis(bench.moments, qk="balanced", vo="balanced")
        chosen = {label: x for label, x in plans(bench.config).items() if options.plan in (None, label)}
        rows = [measured(bench, label, plan, options) for label, plan in chosen.items()]
        settings = {k: str(v) for k, v in asdict(options).items() if k != "results"} | {
            "model": options.model.name,
            "corpus": options.corpus.name,
            "heldout_topics": bench.topics,
            "calibration_tokens": int(bench.train.size),
            "dtype": str(bench.dense.network.dtype),
            "native_perplexity": [float(np.exp(np.mean(row["native"]["nll"]))) for row in rows],
            "virtual_devices": jax.devices()[0].platform == "cpu",
            "continuation_tokens": STEPS - 1,
            "seconds": time.perf_counter() - began,
        }
        print(write_result(options.name, settings, rows, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options))
