"""What does truncation gain where a prompt is divided over devices? Whole models and one layer's parts.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python -m benchmarks.bench_sequence_parallel --mesh sequence=4

Each row is a method of sequence parallelism on a plan (`ROWS`), or one device: `dense` on cuDNN, else on our
kernels; `plan` keeps a window and sinks at full rank and `far` coordinates of the rest. Random bf16 weights,
which are on each device once, with a random basis after the rotary embedding where there is a plan; times do
not depend on the values. Wall clock: the time to the first token's logits from call to result, layer by
layer as `generate` does; parts of one layer's attention as means over calls dispatched without waiting.

Bytes that leave a device are counted in the compiled program of one layer, beside the formula. The numerics
check runs two layers on a short prompt in the same dtype and in float32: `error` of the row and `own_error`
of one device with the same plan are against float32, relative to the largest logit. Rows are merged by name
into the JSON file, which is written anew after each figure; a figure that fails becomes its error.

Over sockets, as between hosts, one process a GPU, each with its own CUDA_VISIBLE_DEVICES and `--process-id`:

    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 CUDA_VISIBLE_DEVICES=0 \\
        python -m benchmarks.bench_sequence_parallel \\
        --coordinator 127.0.0.1:5555 --num-processes 4 --process-id 0
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh

from benchmarks.bench_calibration import LLAMA_2_13B
from benchmarks.bench_generate import LLAMA_2_7B
from benchmarks.common import RESULTS, write_result
from benchmarks.sequence_parts import Parts, link_rate, seconds_each
from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig, RopeConfig
from zdc_jax.errors import MeshError
from zdc_jax.model.block import Block
from zdc_jax.model.params import embedding_shapes, layer_shapes, random_tree
from zdc_jax.model.transformer import Embeddings, Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.attention import Method
from zdc_jax.parallel.mesh import MeshConfig, whole_on
from zdc_jax.parallel.payload import Payload, scale_for
from zdc_jax.parallel.processes import initialize
from zdc_jax.parallel.traffic import hlo_bytes, prefill_bytes
from zdc_jax.parallel.transformer import ShardedTransformer, last_token
from zdc_jax.plan import CompressionPlan

SHAPES = {
    "llama-2-7b": LLAMA_2_7B,
    "llama-2-13b": replace(LLAMA_2_13B, max_positions=2**18),
    "llama-3-8b": replace(
        LLAMA_2_7B, ffn_dim=14336, num_kv_heads=8, vocab_size=128256, rope=RopeConfig(theta=500_000.0)
    ),
    "tiny": replace(
        LLAMA_2_7B,
        num_layers=2,
        embed_dim=64,
        ffn_dim=96,
        vocab_size=97,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
    ),
}
ShapeName = Literal[*SHAPES]


@dataclass(frozen=True)
class Row:
    """One build: `method` None is one device; `near` None is a full plan."""

    method: Method | None
    near: Literal["window", "window and sinks"] | None
    implementation: Implementation = "pallas"
    payload: Payload = "native"


ROWS = {
    "dense": Row("ulysses", None, "cudnn"),
    "plan": Row("ulysses", "window and sinks"),
    "plan_float8": Row("ulysses", "window and sinks", payload="float8"),
    "one_device": Row(None, "window and sinks"),
    "dense_pallas": Row("ulysses", None),
    "late": Row("late_ulysses", "window and sinks"),
    "all_gather": Row("all_gather", None),
    "ring": Row("ring", None),
    "all_gather_plan": Row("all_gather", "window and sinks"),
    "ring_plan": Row("ring", "window"),  # The kernels cannot skip sinks of keys that go round.
    "one_device_dense": Row(None, None, "cudnn"),
}
"""In order of business."""
RowName = Literal[*ROWS]


@dataclass(frozen=True)
class Options:
    """`lengths` T in tokens; `far` ranks R and Z; `layers` shortens the model for a trial; `check` tokens of
    the numerics check; `link_bytes` on each device for the link's rate; `traces` folder for a profile of each
    row's first token; the last three as `zdc_jax.initialize` takes them."""

    mesh: str = "sequence=4"
    shape: ShapeName = "llama-2-7b"
    rows: tuple[RowName, ...] = tuple(ROWS)
    lengths: tuple[int, ...] = (131072,)
    window: int = 512
    sinks: int = 4
    far: tuple[int, int] = (32, 64)
    layers: int | None = None
    repeats: int = 3
    check: int = 2048
    link_bytes: int = 2**28
    results: Path = RESULTS
    traces: Path | None = None
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


class Model:
    """Random weights, made where they lie: whole on every device of the mesh, and there once."""

    def __init__(self, config: ModelConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        everywhere = whole_on(mesh)
        layer = jax.jit(self._layer, out_shardings=everywhere)
        ends = jax.jit(
            lambda key: random_tree(embedding_shapes(config), config, key), out_shardings=everywhere
        )
        key = jax.random.key(0)
        self.embeddings = ends(key)
        self.layers = [layer(jax.random.fold_in(key, 1 + index)) for index in range(config.num_layers)]

    def _layer(self, key: Array) -> Any:
        config = self.config
        weights = random_tree(layer_shapes(config), config, key)
        shape = (config.num_kv_heads, config.head_dim, config.head_dim)
        basis = jnp.linalg.qr(jax.random.normal(key, shape))[0].astype(config.dtype)
        weights["attention"] |= {"q_rotation": basis, "k_rotation": basis}
        return weights

    def on_mesh(self, plan: CompressionPlan, payload: Payload) -> ShardedTransformer:
        """The first layers on the mesh, as many as the plan has; the basis only where there is a window."""
        config = replace(self.config, num_layers=len(plan.layers))
        scales = random_scales(config) if payload == "float8" else {}
        whole = ({**layer, "attention": layer["attention"] | scales} for layer in self._of(plan))
        layers = (Block(layer, config) for layer in whole)
        ends = Embeddings(self.embeddings, config)
        return ShardedTransformer(config, plan, ends, layers, self.mesh, decodes=False)

    def on_one(self, plan: CompressionPlan, dtype: str) -> Transformer:
        """The same on the first device; of the same arrays, where `dtype` is that of the weights."""
        local = lambda tree: jax.tree.map(lambda x: x.addressable_data(0).astype(dtype), tree)
        config = replace(self.config, num_layers=len(plan.layers), dtype=dtype)
        return Transformer(config, plan, local(self.embeddings), map(local, self._of(plan)))

    def _of(self, plan: CompressionPlan) -> Iterator[Any]:
        for layer, _ in zip(self.layers, plan.layers, strict=False):
            attention = layer["attention"]
            if not plan.keeps_full_width:
                attention = {name: x for name, x in attention.items() if "rotation" not in name}
            yield {**layer, "attention": attention}


def random_scales(config: ModelConfig) -> dict[str, Array]:
    """Scales of a float8 payload for random weights: normal matrices give every coordinate this mean square.

    Inputs are normalised to a mean square of 1, weights are N(0, 0.02²), and the basis is orthogonal.
    """
    rms = np.full((config.num_kv_heads, config.head_dim), 0.02 * config.embed_dim**0.5)
    scale = jnp.asarray(scale_for(rms), config.dtype)
    return {"q_scale": scale, "k_scale": scale, "v_scale": scale}


class Bench:
    """One model on one mesh, and the rows that are asked of it."""

    def __init__(self, options: Options):
        self.options = options
        sizes = MeshConfig.parse(options.mesh)
        if sizes.size != sizes.sequence:
            raise MeshError(f"mesh={options.mesh!r} must have one device along data and model")
        config = SHAPES[options.shape]
        self.config = replace(config, num_layers=options.layers or config.num_layers)
        self.mesh, self.degree = sizes.create(), sizes.sequence
        self.name = f"sequence-parallel-{options.shape}-{self.degree}"
        if jax.process_count() > 1:
            self.name += f"-{jax.process_count()}-processes"
        path = options.results / f"{self.name}.json"
        self.results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
        self.failed = False
        self.record(self.results, "link_rate", lambda: link_rate(self.mesh, options.link_bytes))
        self.model = Model(self.config, self.mesh)

    def record(self, into: dict[str, Any], key: str, figure: Callable[[], Any]) -> None:
        """Keeps a figure, or why there is none, prints it and writes the file anew."""
        try:
            into[key] = figure()
        except Exception as error:  # XLA's and the kernels' own types; other figures can still be had.
            into[key], self.failed = {"error": f"{type(error).__name__}: {error}"[:500]}, True
        if jax.process_index():
            return
        shown = into[key]
        if isinstance(shown, list):
            shown = f"{1e3 * float(np.median(shown)):.3f} ms"
        print(f"{into.get('row', ''):18} {into.get('length', ''):>7} {key:18} {shown}", flush=True)
        write_result(self.name, self.settings(), self.results, self.options.results)

    def settings(self) -> dict[str, Any]:
        """What the results depend on."""
        apart = ("results", "rows", "lengths", "traces", "coordinator", "num_processes", "process_id")
        settings = {key: value for key, value in asdict(self.options).items() if key not in apart}
        variables = {key: value for key, value in os.environ.items() if key.startswith(("XLA_", "NCCL_"))}
        return {**settings, "processes": jax.process_count(), "environment": variables}

    def plan(self, row: Row, layers: int | None = None) -> CompressionPlan:
        """The row's plan for the first layers."""
        options, config = self.options, replace(self.config, num_layers=layers or self.config.num_layers)
        if row.near is None:
            return CompressionPlan.full(config)
        qk, v = options.far
        sinks = options.sinks if row.near == "window and sinks" else 0
        return CompressionPlan.uniform(config, qk=qk, v=v, window=options.window, sinks=sinks)

    def implementation(self, row: Row) -> Implementation:
        """The row's own on GPUs; elsewhere there is only XLA."""
        return row.implementation if jax.default_backend() == "gpu" else "xla"

    def measure(self, name: RowName, length: int) -> None:
        """All figures of one row at one length."""
        row, implementation = ROWS[name], self.implementation(ROWS[name])
        out: dict[str, Any] = {"row": name, "length": length, **asdict(row), "implementation": implementation}
        self.results[f"{name} {length}"] = out
        self.record(out, "first_token", lambda: self.first_token(row, length))
        if row.method is not None:
            self.measure_parts(row.method, row, length, out)
            self.record(out, "bytes", lambda: self.sent(row.method, row, length))
        self.record(out, "check", lambda: self.check(row))

    def first_token(self, row: Row, length: int) -> list[float]:
        """Seconds from a prompt to the logits of its last token, without the call that compiles."""
        network = self.network(row, self.plan(row))
        tokens, implementation = self.tokens(length), self.implementation(row)
        run = lambda: logits(network, tokens, row.method, implementation)
        times = seconds_each(run, rounds=self.options.repeats, steps=1)
        if self.options.traces is not None:
            with jax.profiler.trace(self.options.traces / f"{row.method}-{row.near}-{length}"):
                jax.block_until_ready(run())
        return times

    def measure_parts(self, method: Method, row: Row, length: int, out: dict[str, Any]) -> None:
        """Seconds of each part of a layer's attention, and what they and the first token's time say."""
        length = -(-length // self.degree) * self.degree
        implementation = self.implementation(row)
        parts = Parts(
            self.config,
            self.plan(row),
            self.mesh,
            length=length,
            method=method,
            implementation=implementation,
            payload=row.payload,
        )
        for name in parts.names():
            self.record(out, name, partial(parts.seconds, name))
        median = {name: np.median(value) for name, value in out.items() if isinstance(value, list)}
        if {"first_token", "attention"} <= median.keys():
            rest = float(median["first_token"] / self.config.num_layers - median["attention"])
            self.record(out, "rest", lambda: [rest])
        if {"near", "exchange", "near_and_exchange"} <= median.keys():
            share = float(median["near_and_exchange"] / (median["near"] + median["exchange"]))
            self.record(out, "together_over_sum", lambda: share)

    def sent(self, method: Method, row: Row, length: int) -> dict[str, int]:
        """Bytes that leave a device in all layers: formula, and one layer's compiled program times layers."""
        network, implementation = self.model.on_mesh(self.plan(row, 1), row.payload), self.implementation(row)
        run = lambda network, tokens: network.hidden(tokens, method=method, implementation=implementation)
        program = jax.jit(run).lower(network, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()
        options = {"length": length, "degree": self.degree, "method": method, "payload": row.payload}
        formula = prefill_bytes(self.config, self.plan(row), **options)
        return {"formula": formula, "compiled": self.config.num_layers * hlo_bytes(program.as_text())}

    def check(self, row: Row) -> dict[str, float]:
        """Errors of two layers' logits, of the row and of one device, against float32 on one device."""
        plan = self.plan(row, min(2, self.config.num_layers))
        tokens, implementation = self.tokens(self.options.check), self.implementation(row)
        with jax.default_matmul_precision("highest"):
            exact = np.asarray(logits(self.model.on_one(plan, "float32"), tokens, None, "xla"))
        alone = logits(self.model.on_one(plan, self.config.dtype), tokens, None, implementation)
        got = logits(self.network(row, plan), tokens, row.method, implementation)
        error = lambda x: float(np.abs(np.asarray(x) - exact).max() / np.abs(exact).max())
        return {"error": error(got), "own_error": error(alone)}

    def network(self, row: Row, plan: CompressionPlan) -> Transformer | ShardedTransformer:
        """The model of a row with a plan of some layers."""
        if row.method is None:
            return self.model.on_one(plan, self.config.dtype)
        return self.model.on_mesh(plan, row.payload)

    def tokens(self, length: int) -> Array:
        """One prompt."""
        rng = np.random.default_rng(0)
        return jnp.asarray(rng.integers(self.config.vocab_size, size=(1, length)), jnp.int32)


def logits(
    network: Transformer | ShardedTransformer,
    tokens: Array,
    method: Method | None,
    implementation: Implementation,
) -> Array:
    """Float32 logits of the last token [1, V]."""
    if isinstance(network, Transformer):
        last = network.hidden(tokens, implementation)[:, -1]
    else:
        assert method is not None
        hidden = network.hidden(tokens, method=method, implementation=implementation)
        last = last_token(hidden, jnp.full(1, tokens.shape[1]), network.mesh)
    return _unembed(network.embeddings, last)


@jax.jit
def _unembed(embeddings: Embeddings, hidden: Array) -> Array:
    return embeddings.unembed(hidden)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the rows; 1 where a figure could not be had."""
    options = tyro.cli(Options, args=arguments, description=__doc__)
    processes = (options.coordinator, options.num_processes, options.process_id)
    if processes != (None, None, None):
        initialize(*processes)
    bench = Bench(options)
    for length in options.lengths:
        for name in options.rows:
            bench.measure(name, length)
    print(options.results / f"{bench.name}.json")
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
