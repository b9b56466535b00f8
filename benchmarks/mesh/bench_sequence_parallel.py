"""Benchmark of sequence parallelism: whole models and parts of one layer, by method.

    export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true
    python -m benchmarks.mesh.bench_sequence_parallel --mesh sequence=4

A row is one method on one plan, KV-Runahead, or one device (`benchmarks.mesh.rows.ROWS`). `dense` runs on
cuDNN, other rows on our kernels. `plan` keeps a window and sinks at full rank and `far` coordinates of older
tokens. Weights are random bf16. Times are wall clock from the call to the logits of the first token, layer by
layer as in `generate`, after a run of one layer that compiles. Parts of one layer's attention are means over
calls dispatched without waiting. Ulysses builds the cache, as `generate` does; KV-Runahead does so in one
process. Other methods and one device build none.

`bytes` that leave a device come from a formula and from the compiled program of one layer. `cache` counts
what Ulysses sends once for the cache. KV-Runahead in one process has the formula only, for the device that
sends most. In several processes its chunks are padded; `padding` is the number of padded rows on each device.

`check` runs two layers on a short prompt. `error` (the row) and `own_error` (one device with the same plan)
are relative to the largest logit in float32. `numerics` compares one layer's attention at the timed length
with float64 (`AttentionParts.numerics`); KV-Runahead uses even chunks there.

Rows are merged by name into the JSON file, which is written again after each figure. A figure that fails is
replaced by its error. `commits` are those of the figures of a row.

One process a GPU, over sockets as between hosts:

    export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0 NCCL_IB_DISABLE=1 NCCL_NET=Socket
    export NCCL_SOCKET_IFNAME=lo NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4
    for id in 0 1 2 3; do
        CUDA_VISIBLE_DEVICES=$id python -m benchmarks.mesh.bench_sequence_parallel --label sockets
            --tasks dense plan late --coordinator 127.0.0.1:5555 --num-processes 4 --process-id $id &
    done; wait

`link_rate` is the bandwidth of such a link: bytes a second that leave a device in a bare all-to-all.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import NamedSharding

from benchmarks.common import RESULTS, commit, earlier, write_result
from benchmarks.mesh.attention_parts import AttentionParts, link_rate, searched_partition
from benchmarks.mesh.models import Model
from benchmarks.mesh.rivals.exchanges import ZigzagTransformer
from benchmarks.mesh.rivals.methods import ZIGZAG, attention_of, handed_bytes, method_bytes, padded
from benchmarks.mesh.rivals.partition import Partition, in_eights, interpolated
from benchmarks.mesh.rivals.runahead import RunaheadTransformer
from benchmarks.mesh.rivals.runahead_mesh import MeshRunahead, chunk_layer
from benchmarks.mesh.rows import ROWS, TASKS, Row, Task, compare
from benchmarks.mesh.traffic import cache_bytes, hlo_bytes
from benchmarks.model.models import SHAPES, ShapeName, seconds
from zdc_jax.axes import Array
from zdc_jax.errors import MeshError
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.layers import last_token, prompt_layer
from zdc_jax.parallel.mesh import MeshConfig, layout
from zdc_jax.parallel.processes import initialize
from zdc_jax.parallel.weights import gathered_bytes
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      lengths: prompt lengths in tokens.
      far: ranks R and Z of older tokens.
      layers: layers of the model; fewer for a trial.
      check: tokens of the numerics check.
      link_bytes: bytes on each device for the link's rate.
      label: end of the name of the JSON file.
      traces: folder for a profile of each row's first token.
      coordinator: address of the first process, as in `zdc_jax.initialize`.
      num_processes: number of processes, as in `zdc_jax.initialize`.
      process_id: number of this process, as in `zdc_jax.initialize`.
    """

    mesh: str = "sequence=4"
    shape: ShapeName = "llama-2-7b"
    tasks: tuple[Task, ...] = TASKS
    lengths: tuple[int, ...] = (131072,)
    window: int = 512
    sinks: int = 4
    far: tuple[int, int] = (32, 64)
    layers: int | None = None
    repeats: int = 3
    check: int = 2048
    link_bytes: int = 2**28
    label: str = ""
    results: Path = RESULTS
    traces: Path | None = None
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


class Bench:
    """One model on one mesh, and the tasks to run on it."""

    def __init__(self, options: Options):
        self.options = options
        sizes = MeshConfig.parse(options.mesh)
        if sizes.size != sizes.sequence:
            raise MeshError(f"mesh={options.mesh!r} must have one device along data and model")
        config = SHAPES[options.shape]
        self.config = replace(config, layers=config.layers[: options.layers or None])
        self.mesh, self.degree = sizes.create(), sizes.sequence
        processes = f"{jax.process_count()}-processes" if jax.process_count() > 1 else ""
        parts = ("sequence-parallel", options.shape, str(self.degree), processes, options.label)
        self.name = "-".join(part for part in parts if part)
        self.results: dict[str, Any] = earlier(options.results / f"{self.name}.json", self.settings()) or {}
        self.failed = False
        self.record(self.results, "link_rate", lambda: link_rate(self.mesh, options.link_bytes))
        self.model = Model(self.config, self.mesh)

    def record(self, into: dict[str, Any], key: str, figure: Callable[[], Any]) -> None:
        """Record a figure or its error, print it with its seconds, and write the file again."""
        began = time.perf_counter()
        try:
            into[key] = figure()
        except Exception as error:  # Other figures may still succeed.
            into[key], self.failed = {"error": f"{type(error).__name__}: {error}"[:500]}, True
        if "row" in into:
            into.setdefault("commits", {})[key] = commit()
        if jax.process_index():
            return
        took, shown = time.perf_counter() - began, into[key]
        if isinstance(shown, list):
            shown = f"{1e3 * float(np.median(shown)):.3f} ms"
        row = f"{into.get('row', ''):18} {into.get('length', ''):>7}"
        print(f"{row} {key:18} {shown} ({took:.1f} s)", flush=True)
        compare(self.results, self.config.num_layers)
        write_result(self.name, self.settings(), self.results, self.options.results)

    def settings(self) -> dict[str, Any]:
        """Return the settings that the results depend on."""
        apart = (
            "results",
            "tasks",
            "lengths",
            "traces",
            "label",
            "coordinator",
            "num_processes",
            "process_id",
        )
        settings = {key: value for key, value in asdict(self.options).items() if key not in apart}
        variables = {key: value for key, value in os.environ.items() if key.startswith(("XLA_", "NCCL_"))}
        variables.pop("NCCL_VERSION", None)  # Some containers set this version.
        return {**settings, "processes": jax.process_count(), "environment": variables}

    def run(self, task: Task, length: int) -> None:
        """Run one task at one length."""
        name, _, figures = task.partition(":")
        row, key = ROWS[name], f"{name} {length}"
        out = self.results.setdefault(key, {})
        build = {**asdict(row), "implementation": self.implementation(row)}
        out |= {"row": name, "length": length, "build": build}
        match figures:
            case "parts":
                parts = self.parts(row, length)
                for part in parts.names():
                    self.record(out, part, partial(parts.seconds, part))
            case "numerics":
                self.record(out, "numerics", lambda: self.parts(row, length).numerics())
            case "check":
                self.record(out, "check", lambda: self.check(row))
            case _:
                self.record(out, "first_token", lambda: self.first_token(name, length))
                if row.method is not None:
                    self.record(out, "bytes", lambda: self.sent(row, length))

    def plan(self, row: Row, layers: int | None = None) -> CompressionPlan:
        """Return the row's plan for the first layers."""
        options, config = self.options, replace(self.config, layers=self.config.layers[: layers or None])
        if row.near is None:
            return CompressionPlan.full(config)
        qk, v = options.far
        sinks = options.sinks if row.near == "window and sinks" else 0
        return CompressionPlan.uniform(config, qk=qk, v=v, window=options.window, sinks=sinks)

    def implementation(self, row: Row) -> Implementation:
        """Return the row's implementation on GPUs, and XLA elsewhere."""
        return row.implementation if jax.default_backend() == "gpu" else "xla"

    def first_token(self, name: str, length: int) -> list[float]:
        """Return seconds from a prompt to the logits of its last token."""
        row, tokens = ROWS[name], self.tokens(length)
        # Equal layers share one program, which is compiled here with all others.
        jax.block_until_ready(self.logits(row, tokens, layers=1)())
        whole = self.logits(row, tokens)
        times = [seconds(whole) for _ in range(self.options.repeats)]
        if self.options.traces is not None:
            with jax.profiler.trace(self.options.traces / f"{name}-{length}"):
                jax.block_until_ready(whole())
        return times

    def logits(self, row: Row, tokens: Array, layers: int | None = None) -> Callable[[], Array]:
        """Return a call of the row's model for float32 logits of the last token, [1, V]."""
        plan, implementation = self.plan(row, layers), self.implementation(row)
        if row.method is None:
            return self.on_one_device(plan, tokens, self.config.dtype, implementation)
        end, length = jnp.full(1, tokens.shape[1], jnp.int32), tokens.shape[1]
        if row.method == "runahead":
            partition = self.partition(row, length)
            if jax.process_count() > 1:
                runahead = MeshRunahead(self.model.on_mesh(plan))
                last = partial(runahead.last_hidden, partition=partition, implementation=implementation)
                return lambda: _unembed(runahead.network.embeddings, last(tokens, end))
            runahead = self.runahead(plan)
            prefill = partial(runahead.prefill, partition=partition, capacity=in_eights(length))
            ends = runahead.networks[-1].embeddings
            return lambda: _unembed(ends, prefill(tokens, end, implementation=implementation)[0])
        network = self.model.on_mesh(plan, row.weights, row.payload)
        if row.method == "ulysses":
            fill = partial(network.prefill, tokens, end, capacity=in_eights(length))
            return lambda: _unembed(network.embeddings, fill(implementation=implementation)[0])
        attention = attention_of(row.method)
        if row.method in ZIGZAG:
            zigzag = ZigzagTransformer(network, attention)
            return lambda: _unembed(network.embeddings, zigzag.last_hidden(tokens, end, implementation))
        hidden = partial(network.hidden, tokens, attention=attention, implementation=implementation)
        return lambda: _unembed(network.embeddings, last_token(hidden(), end, self.mesh))

    def on_one_device(
        self, plan: CompressionPlan, tokens: Array, dtype: str, implementation: Implementation
    ) -> Callable[[], Array]:
        """Return such a call for one device, in any dtype."""
        network = self.model.on_first(plan, dtype)
        return lambda: _unembed(network.embeddings, network.hidden(tokens, implementation)[:, -1])

    def runahead(self, plan: CompressionPlan) -> RunaheadTransformer:
        """Return KV-Runahead on the devices of the mesh, which belong to this process."""
        return RunaheadTransformer(self.model.on_each(plan), list(self.mesh.devices.flat))

    def partition(self, row: Row, length: int) -> Partition:
        """Return the partition of a prompt: even, or as searched for the longest of `lengths`."""
        if row.partition == "even":
            return Partition.even(length, self.degree)
        return interpolated([self.searched], length)

    @cached_property
    def searched(self) -> Partition:
        """Partition that the search proposes from the first layers, as all layers cost the same.

        Raises:
          MeshError: in several processes, where no device can be timed alone.
        """
        if jax.process_count() > 1:
            raise MeshError(f"partitions are searched in one process, not in {jax.process_count()}")
        row = ROWS["runahead_searched"]
        runahead = self.runahead(self.plan(row, 2))
        tokens = self.tokens(max(self.options.lengths))
        return searched_partition(runahead, tokens, self.config.num_layers, self.implementation(row))

    def parts(self, row: Row, length: int) -> AttentionParts:
        """Return one layer's attention in parts."""
        assert row.method is not None
        return AttentionParts(
            self.config,
            self.plan(row),
            self.mesh,
            length=padded(row.method, length, self.degree),
            method=row.method,
            implementation=self.implementation(row),
            payload=row.payload,
        )

    def sent(self, row: Row, length: int) -> dict[str, Any]:
        """Return bytes that leave a device in all layers, by formula and by one layer's compiled program."""
        plan, layers = self.plan(row), self.config.num_layers
        if row.method == "runahead":
            partition = self.partition(row, length)
            handed = handed_bytes(plan, partition, capacity=in_eights(length))
            out = {"formula": max(handed), "by_device": handed, "partition": partition.tokens}
            return out if jax.process_count() == 1 else out | self.sent_in_chunks(row, partition)
        assert row.method is not None
        how = {"length": length, "degree": self.degree, "method": row.method, "payload": row.payload}
        formula = method_bytes(self.config, plan, **how)
        network = self.model.on_mesh(self.plan(row, 1), row.weights, row.payload)
        x = self.by_token(padded(row.method, length, self.degree), network.dtype)
        block, spec = network.prompt_layers[0], network.layer_caches[0]
        attention, implementation = attention_of(row.method), self.implementation(row)
        end, options = jnp.full(1, x.shape[1]), (implementation, row.weights, row.payload, attention)
        lowered = prompt_layer.lower(block, x, end, None, spec, None, self.mesh, *options)
        out = {"formula": formula, "compiled": layers * hlo_bytes(lowered.compile().as_text())}
        if row.weights == "gathered":
            out["formula"] += layers * gathered_bytes(block, self.mesh)
        if row.method == "ulysses":
            sizes = {"capacity": in_eights(length), "degree": self.degree, "payload": row.payload}
            out["cache"] = cache_bytes(self.config, plan, **sizes)
        return out

    def sent_in_chunks(self, row: Row, partition: Partition) -> dict[str, Any]:
        """Return compiled bytes of all layers and padded rows of KV-Runahead in several processes."""
        network = self.model.on_mesh(self.plan(row, 1))
        x, end = self.by_token(self.degree * partition.longest, network.dtype), jnp.full(1, partition.length)
        options = (partition, in_eights(partition.length), self.mesh, self.implementation(row))
        program = chunk_layer.lower(network.prompt_layers[0], x, end, network.layer_caches[0], *options)
        compiled = self.config.num_layers * hlo_bytes(program.compile().as_text())
        return {"compiled": compiled, "padding": partition.padding}

    def by_token(self, length: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """Return the shape of hidden states of a prompt in their layout on the mesh."""
        sharding = NamedSharding(self.mesh, layout("B T D"))
        return jax.ShapeDtypeStruct((1, length, self.config.embed_dim), dtype, sharding=sharding)

    def check(self, row: Row) -> dict[str, float]:
        """Return errors of the logits of two layers, of the row and of one device, against float32."""
        layers = min(2, self.config.num_layers)
        plan, tokens = self.plan(row, layers), self.tokens(self.options.check)
        with jax.default_matmul_precision("highest"):
            exact = np.asarray(self.on_one_device(plan, tokens, "float32", "xla")())
        alone = self.on_one_device(plan, tokens, self.config.dtype, self.implementation(row))()

        def error(x):
            return float(np.abs(np.asarray(x) - exact).max() / np.abs(exact).max())

        return {"error": error(self.logits(row, tokens, layers)()), "own_error": error(alone)}

    def tokens(self, length: int) -> Array:
        """Return one random prompt."""
        rng = np.random.default_rng(0)
        return jnp.asarray(rng.integers(self.config.vocab_size, size=(1, length)), jnp.int32)


@jax.jit
def _unembed(embeddings: Embeddings, hidden: Array) -> Array:
    return embeddings.unembed(hidden)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tasks; return 1 if a figure failed."""
    options = tyro.cli(Options, args=arguments, description=__doc__)
    processes = (options.coordinator, options.num_processes, options.process_id)
    if processes != (None, None, None):
        initialize(*processes)
    bench = Bench(options)
    for length in options.lengths:
        for task in options.tasks:
            bench.run(task, length)
    print(options.results / f"{bench.name}.json")
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
