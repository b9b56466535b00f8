"""Profile of an engine step: the time of its kernels by operation.

    python -m benchmarks.serving.bench_step --shape Llama-2-13B --layers 8 --rows 20 --held 12000

A cache stores `--rows` sequences of `--held` tokens of zeros. Four kinds of steps are timed: decoding a token
of each sequence, reading a prompt chunk after as many tokens, both in one program, and chunks of three
prompts in one program. `ms` is a step by the host's clock. Then the steps run under JAX's profiler: `busy_ms`
is the time of their kernels, and `parts` the time by operation, longest first. A CPU has no parts.
"""

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, write_result
from benchmarks.serving.models import ServedFlags
from benchmarks.traces import trace_kernels
from zdc_jax.engine.checks import check_servable
from zdc_jax.engine.inputs import ChunkInputs
from zdc_jax.engine.layout import Layout
from zdc_jax.engine.runner import MAX_CHUNKS, Runner
from zdc_jax.generation.packed_parameters import pack_parameters
from zdc_jax.generation.sampling import Sampling
from zdc_jax.generation.steps import Flat

PAGE = 128
MOST_PARTS = 40
SCOPE = re.compile(r"^jit\(run\)/|while/body/|closed_call/|eval_jaxpr/|jit\(extend_\)/")


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      rows: sequences that decode.
      held: tokens of each sequence.
      chunk: tokens of a prefill chunk.
      steps: steps that are averaged.
    """

    served: ServedFlags
    rows: int = 20
    held: int = 12_000
    chunk: int = 1024
    steps: int = 5
    name: str = "engine-step"
    results: Path = RESULTS


class Filled:
    """A runner whose sequences, except for the last three, store `held` tokens."""

    def __init__(self, options: Options):
        model = options.served.load()
        network, rows = check_servable(model.network), options.rows + MAX_CHUNKS
        each = -(-(options.held + 2 * options.chunk) // PAGE)
        layout = Layout.of(
            network.device_caches,
            rows=rows,
            longest=each * PAGE,
            page=PAGE,
            cache_tokens=rows * each * PAGE,
            reuse=False,
        )
        self.options, self.runner = options, Runner(network, layout, chunk=options.chunk)
        pages = np.random.default_rng(0).permutation(rows * each).reshape(rows, each)
        for row, own in enumerate(pages):
            self.runner.set_pages(row, own.tolist())
        self.decoding = self.runner.new_decode_inputs()
        limits = options.held + 1, 2 * options.chunk
        self.numbers = pack_parameters(*limits, (), Sampling(), np.zeros(2, np.uint32))
        for row in range(options.rows):
            self.decoding.add(row, self.numbers, "greedy")
        state = self.runner._state
        lengths = jnp.where(jnp.asarray(self.decoding.active), options.held, 0).astype(jnp.int32)
        cache = Flat.of(replace(state.cache.whole, lengths=lengths))
        self.runner._state = state._replace(cache=cache, done=jnp.zeros(rows, bool))

    def decode(self) -> Any:
        """Decode a token of all sequences."""
        return self.runner.decode(self.decoding, 1)

    def chunks(self, count: int) -> list[ChunkInputs]:
        """Return chunks of the last sequences, together `chunk` tokens, that end where the others end."""
        tokens = self.options.chunk // count
        start = self.options.held - tokens
        return [
            ChunkInputs(self.options.rows + i, [5] * tokens, start, False, self.numbers, "greedy")
            for i in range(count)
        ]

    def read(self) -> Any:
        """Read one prefill chunk."""
        return self.runner.prefill(self.chunks(1), self.runner.new_decode_inputs())

    def both(self) -> Any:
        """Read the same chunk and decode a token of all other sequences, in one program."""
        return self.together(1)

    def several(self) -> Any:
        """Read chunks of several sequences and decode a token of the others."""
        return self.together(self.runner.grouping.several)

    def together(self, count: int) -> Any:
        """Read `count` chunks and decode a token of the others."""
        *chosen, frontier = self.runner.prefill(self.chunks(count), self.decoding)
        assert frontier is not None
        return chosen, self.runner.choose_next(frontier, self.decoding)


def profiled(step: Callable[[], Any], count: int) -> dict[str, Any]:
    """Return milliseconds of one of `count` steps, and of its parts."""
    jax.block_until_ready(step())
    began = time.perf_counter()
    jax.block_until_ready([step() for _ in range(count)])
    seconds = time.perf_counter() - began
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for kernel in trace_kernels(lambda: [step() for _ in range(count)]):
        part = f"{SCOPE.sub('', kernel.operation)} {kernel.name}".strip()
        times[part] += kernel.duration
        counts[part] += 1
    longest = [
        {"part": name, "ms": 1e-6 * spent / count, "kernels": counts[name] / count}
        for name, spent in times.most_common(MOST_PARTS)
    ]
    busy = {"busy_ms": 1e-6 * times.total() / count, "kernels": counts.total() / count}
    return {"ms": 1e3 * seconds / count, **busy, "parts": longest}


def main(options: Options) -> None:
    """Write one JSON file.

    Raises:
      SystemExit: a mesh, on which kernels of all devices would be added up.
    """
    if options.served.mesh is not None:
        raise SystemExit(f"mesh={options.served.mesh}: kernels are timed on one device; leave --mesh out")
    filled = Filled(options)
    results = [
        {
            "served": options.served.name,
            "step": name,
            **profiled(getattr(filled, name), options.steps),
            "commit": commit(),
        }
        for name in ("decode", "read", "both", "several")
    ]
    for result in results:
        print(result["step"], *(f"{result[name]:.2f}" for name in ("ms", "busy_ms", "kernels")))
        for part in result["parts"]:
            print(f"  {part['ms']:8.3f} {part['kernels']:7.1f}  {part['part']}")
    settings = {name: getattr(options, name) for name in ("rows", "held", "chunk", "steps")}
    settings |= {"layers": options.served.layers}
    print(write_result(options.name, settings, results, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options))
