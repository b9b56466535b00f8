"""Benchmark of one searched plan in large shapes: time to first token, time per output token, most sequences.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m benchmarks.model.bench_one_plan --plan plan.json

The plan was found for a small model. In a larger shape it keeps the same shares of layers and of the head
dimension (`benchmarks.model.transferred_plans`); `quality` is what it costs on the small model. Weights and
quantized values are random. Times are wall clock:

- `first_token`: seconds from a prompt of one sequence to its first token. We read chunks of `chunk` tokens,
  more than the 2,048 of `generate`. The cuDNN peer reads the prompt at once.
- `token`: seconds per output token of one sequence, of `BATCH`, and of the largest batch.
- `largest`: the number of sequences that decoded in memory. It is 0 if not even one fits by its bytes into
  the memory that JAX has, less `KEPT`; then nothing is timed.

We decode in `generate`'s loop, without the constant cost of a call (`decode_times`). The peer decodes by one
call per token, dispatched ahead, which is faster for it. `dense` is full rank on our own kernels.

With `--mesh sequence=2` prompts are divided by token and read at once, and tokens are decoded with the heads
divided. `cudnn` is then dense Ulysses, which reads prompts only. Memory is that of each device.

Rows are merged by shape, kind and length into the JSON file, which is written again after each figure.
`commits` are those of the figures of a row, of `token` by batch.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, earlier, write_result
from benchmarks.mesh.models import Model, OnMesh
from benchmarks.model.models import (
    BEGUN,
    LLAMA_2_7B,
    LLAMA_3_8B,
    OnCudnn,
    OnKernels,
    build,
    capacity_for,
    decode_times,
    prefill_times,
)
from benchmarks.model.transferred_plans import check_on_kernels, is_judged, judged_quality, transferred
from zdc_jax.cache.kv_cache import cache_bytes
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.config import ModelConfig
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan

SHAPES = {"Llama-2-7B": LLAMA_2_7B, "Llama-3-8B": LLAMA_3_8B}
BATCH = 8
KEPT = 0.03
"""Share of the free memory that the largest batch leaves for the other needs of a step."""
Kind = Literal["cudnn", "dense", "searched"]
Figure = Literal["token", "first_token", "largest"]
FIGURES: tuple[Figure, ...] = get_args(Figure)


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      plan: a searched plan.
      judged: JSON of judged plans, which has this plan at `judged_context` tokens.
      lengths: tokens of prompts and of sequences that decode.
      figures: figures to time; other figures stay in the file.
      layers: layers of the models; fewer for a trial.
      mesh: mesh in the syntax of `MeshConfig.parse`; one device by default.
    """

    plan: Path
    judged: Path = RESULTS / "coded-smollm2-135m.json"
    judged_context: int = 8192
    shapes: tuple[str, ...] = tuple(SHAPES)
    kinds: tuple[Kind, ...] = get_args(Kind)
    lengths: tuple[int, ...] = (32768, 131072, 8192)
    figures: tuple[Figure, ...] = FIGURES
    chunk: int = 16384
    steps: int = 12
    repeats: int = 5
    layers: int = 32
    mesh: str | None = None
    name: str = "one-plan-h100"
    results: Path = RESULTS


class Sides(NamedTuple):
    """Sides of one kind.

    Attributes:
      reads: the side that reads prompts.
      decodes: the side that decodes tokens; None if nothing is decoded.
      caches: cache specs of one device.
    """

    reads: Any
    decodes: Any
    caches: tuple[LayerCacheSpec, ...]


def sides(kind: Kind, config: ModelConfig, options: Options) -> Sides:
    """Return the sides of one kind, with random weights, on one device or on the mesh."""
    plan = CompressionPlan.full(config)
    if kind == "searched":
        plan = transferred(CompressionPlan.load(options.plan), config, growth=1)
    if options.mesh is not None:
        decodes = kind != "cudnn"  # cuDNN does not read the cache of the prompts.
        mesh = MeshConfig.parse(options.mesh).create()
        network = Model(config, mesh).on_mesh(plan, decodes=decodes)
        side = OnMesh(network, "pallas" if decodes else "cudnn")
        return Sides(side, side if decodes else None, network.device_caches)
    whole = build(config, plan, rotated=kind == "searched")
    side: Any = OnCudnn(whole) if kind == "cudnn" else OnKernels(whole, options.chunk)
    return Sides(side, side, plan.layer_caches("bfloat16"))


def rows_that_fit(caches: tuple[LayerCacheSpec, ...], tokens: int) -> int:
    """Return how many sequences of this length fit into free memory, by their bytes."""
    stats = jax.local_devices()[0].memory_stats()
    free = (1 - KEPT) * (stats["bytes_limit"] - stats["bytes_in_use"])
    return int(free // cache_bytes(caches, tokens))


def fitting(time: Callable[[int], list[float]], most: int) -> tuple[int, list[float]]:
    """Return the largest batch of at most `most` that memory really holds, and its seconds per token.

    Raises:
      Exception: XLA's error for another reason, or for a batch of one.
    """
    batch = most
    while True:
        try:
            return batch, time(batch)
        except Exception as error:  # XLA has its own error type for a lack of memory.
            if batch == 1 or not any(word in str(error) for word in ("RESOURCE_EXHAUSTED", "memory")):
                raise
        gc.collect()
        batch = max(1, min(batch - 1, int(0.95 * batch)))


def quality(options: Options) -> dict[str, Any]:
    """Return the quality of the plan on the small model: bytes, perplexity, retention of each task.

    Retention covers all quarters of the context; `benchmarks.report` shows the quarters that count.

    Raises:
      SystemExit: the plan was not judged.
    """
    fits = is_judged(CompressionPlan.load(options.plan), options.judged, options.judged_context)
    if (judged := judged_quality(options.judged, fits)) is None:
        raise SystemExit(f"plan={options.plan} was not judged in {options.judged}; judge it with equal_bytes")
    return judged


def measured(
    kind: Kind, config: ModelConfig, options: Options, rows: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the row of each length after each of its figures; `rows` are earlier ones."""
    reads, decodes, caches = sides(kind, config, options)
    figures = options.figures if decodes is not None else ("first_token",)
    for length in options.lengths:
        row = kept(rows, length, figures) | {"bytes_a_row": cache_bytes(caches, length)}

        def time(batch, length=length):
            return decode_times(decodes, batch, length, options.steps, repeats=options.repeats)

        most = rows_that_fit(caches, capacity_for(length))
        if not most and decodes is not None:
            if "largest" in figures:
                row["largest"], row["commits"]["0"] = 0, commit()
                yield row
            continue
        batches = [batch for batch in (1, BATCH) if "token" in figures and batch < most]
        if isinstance(reads, OnMesh):
            prompts = [length] * ("first_token" in figures)
            reads.compile(prompts, {length: batches + [most] * ("largest" in figures)})
        for batch in batches:
            row["token"][str(batch)] = time(batch)
            row["commits"][str(batch)] = commit()
            yield row
        if "first_token" in figures:
            row["first_token"] = prefill_times(reads, length, options.repeats)
            row["commits"]["first_token"] = commit()
            yield row
        if "largest" in figures:
            row["largest"], times = fitting(time, most)
            row["token"][str(row["largest"])] = times
            row["commits"][str(row["largest"])] = commit()
            yield row
        gc.collect()


def kept(rows: list[dict[str, Any]], length: int, figures: tuple[Figure, ...]) -> dict[str, Any]:
    """Return the earlier row of this length, without the figures to be timed."""
    row = next(
        (row for row in rows if row["length"] == length), {"length": length, "token": {}, "commits": {}}
    )
    largest = str(row.get("largest"))
    names = {"token": {"1", str(BATCH)} - {largest}, "largest": {largest}, "first_token": {"first_token"}}
    gone = set().union(*(names[figure] for figure in figures))

    def stays(named):
        return {name: value for name, value in named.items() if name not in gone}

    rest = {name: value for name, value in row.items() if name not in figures}
    return rest | {"token": stays(row["token"]), "commits": stays(row["commits"])}


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with medians in milliseconds in place of all repeats."""

    def ms(times):
        return round(1e3 * float(np.median(times)), 2)

    token = {batch: ms(times) for batch, times in row["token"].items()}
    first = {"first_token": ms(row["first_token"])} if "first_token" in row else {}
    return row | {"token": token} | first


def main(options: Options) -> None:
    """Check that the plan was judged and that kernels decode it; then time and write one JSON file."""
    judged = quality(options)
    configs = {
        name: replace(SHAPES[name], layers=SHAPES[name].layers[: options.layers]) for name in options.shapes
    }
    devices = 1 if options.mesh is None else MeshConfig.parse(options.mesh).sequence
    for config in configs.values():
        heads = {"num_heads": config.num_heads // devices, "num_kv_heads": config.num_kv_heads // devices}
        own = replace(config, **heads)
        plan = transferred(CompressionPlan.load(options.plan), own, growth=1)
        check_on_kernels(plan, own, BATCH, capacity_for(max(options.lengths)))
    path = options.results / f"{options.name}.json"
    settings = {"chunk": options.chunk, "begun": BEGUN, "steps": options.steps, "quality": judged}
    settings |= {} if options.mesh is None else {"mesh": options.mesh}
    # A trial must not add to the rows of whole models.
    settings |= {} if options.layers == Options.layers else {"layers": options.layers}
    entries = earlier(path, settings)
    for shape, config in configs.items():
        for kind in options.kinds:
            rows = rows_of(entries, shape, kind)
            for row in measured(kind, config, options, list(rows)):
                rows[:] = [each for each in rows if each["length"] != row["length"]] + [row]
                print(shape, kind, shown(row), flush=True)
                write_result(options.name, settings, entries, options.results)
    print(path)


def rows_of(entries: list[dict[str, Any]], shape: str, kind: Kind) -> list[dict[str, Any]]:
    """Return the list of rows of a shape and kind, added to the results if there is none."""
    for entry in entries:
        if (entry["shape"], entry["kind"]) == (shape, kind):
            return entry["rows"]
    entries.append({"shape": shape, "kind": kind, "rows": []})
    return entries[-1]["rows"]


if __name__ == "__main__":
    main(tyro.cli(Options))
