"""Comparison of `zdc serve` with `vllm serve` over HTTP, by one client with equal requests and limits.

    python -m benchmarks.serving.compare --model model --max-model-len 8192 --loop 8000/128@1 8000/128@8

A slice of a trace is a load, too:

    python -m benchmarks.serving.compare --model model --max-model-len 32768 --slots 64 \
        --trace conversation.jsonl.gz --seconds 120 --rates 0.5 1 2

`benchmarks.serving.random_folder` writes a folder with random weights that both servers accept.

Each system is started, replays all loads, and is ended. Limits are equal: tokens of a request, requests at
once, and share of the GPU's memory. Prompts are token ids, answers have a fixed length, and decoding is
greedy. A warm-up of one short request per client precedes each load. Salts keep it out of the prefix cache.

`compare-MODEL-LOAD.json` has one row per system. Times are in seconds: `ttft` from arrival to the first
token, `tpot` between later tokens, `jct` from arrival to the end. `throughput` counts output tokens per
second. `goodput` counts requests per second that met the objectives of `benchmarks.serving.replay`.
`quality` is measured elsewhere. A system that failed has its reason in `failed` and the end of its `log`.

With `--measure-client` the rows of `stub` are those of a server that answers at once. Their `ttft` with one
client is the client's own time, and their `throughput` the most tokens per second that it can read.
"""

import asyncio
import json
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.common import RESULTS, ask_environment, commit, earlier, write_result
from benchmarks.serving.client import encode_requests, get, replay_load
from benchmarks.serving.loads import Load, parse_loops, slice_trace
from benchmarks.serving.replay import Served, summarize_times
from benchmarks.serving.systems import (
    NAMES,
    Limits,
    Name,
    ServerFailed,
    ServerProcess,
    System,
    make_ours,
    make_stub,
    make_vllm,
    run_server,
)
from zdc_jax.checkpoint import MANIFEST, Checkpoint
from zdc_jax.config import Dtype

WARM_UP = 4
"""Requests of the warm-up before a trace; closed loops warm up with one request per client."""
WARM_UP_TOKENS = 64
"""Most output tokens of a request of the warm-up."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Options of the comparison.

    Attributes:
      model: converted folder, which our systems serve.
      max_model_len: most tokens of a prompt and its answer.
      hf: Hugging Face folder that vLLM serves, by default `model`. Without weights vLLM makes random ones.
      systems: systems to run, in this order.
      measure_client: also run a server that answers at once.
      plan: plan of `ours-plan`, a preset or a file.
      loop: closed loops, each PROMPT/OUTPUT@CLIENTSxREQUESTS. Each client sends REQUESTS, by default 8.
      trace: trace of Azure (`.csv.gz`) or Mooncake (`.jsonl.gz`).
      start: start of the slice of the trace in seconds.
      seconds: length of the slice.
      rates: mean rates of the slice in requests per second.
      slots: most requests at once, by default the most clients of a loop.
      memory: share of the GPU's memory that a system may use.
      quality: figure of quality by system, to store in its rows.
      vllm: program of vLLM.
      seed: seed of the prompts.
      start_seconds: time that a server has until it answers.
    """

    model: Path
    max_model_len: int
    hf: Path | None = None
    systems: tuple[Name, ...] = NAMES
    measure_client: bool = False
    plan: str = "3bit"
    loop: tuple[str, ...] = ()
    trace: Path | None = None
    start: float = 0.0
    seconds: float = 120.0
    rates: tuple[float, ...] = ()
    slots: int | None = None
    memory: float = 0.9
    dtype: Dtype = "bfloat16"
    quality: dict[str, float] = field(default_factory=dict)
    vllm: str = "vllm"
    seed: int = 0
    start_seconds: float = 1200.0
    results: Path = RESULTS


def make_loads(options: Options) -> list[Load]:
    """Return all loads.

    Raises:
      SystemExit: no load, or one that does not fit the options.
    """
    if (options.trace is None) != (not options.rates):
        raise SystemExit(f"--trace {options.trace} --rates {options.rates}: a trace needs rates; pass both")
    loads = parse_loops(options.loop, options.max_model_len)
    if options.trace is not None:
        loads += slice_trace(
            options.trace,
            start=options.start,
            seconds=options.seconds,
            rates=options.rates,
            max_model_len=options.max_model_len,
        )
    if not loads:
        raise SystemExit("no load: pass --loop PROMPT/OUTPUT@CLIENTS, or --trace with --rates")
    return loads


def make_limits(options: Options, loads: list[Load]) -> Limits:
    """Return the limits of all systems.

    Raises:
      SystemExit: a limit is missing or out of range.
    """
    if wrong := options.quality.keys() - set(NAMES):
        raise SystemExit(f"--quality {min(wrong)}: must be one of {', '.join(NAMES)}")
    if not 0 < options.memory < 1:
        raise SystemExit(f"--memory {options.memory:g}: must lie between 0 and 1")
    clients = [load.clients for load in loads if load.clients is not None]
    slots = max(clients, default=0) if options.slots is None else options.slots
    if slots < 1:
        raise SystemExit(f"--slots {options.slots}: must be at least 1; a trace alone has no default")
    queue = max(len(load.requests) for load in loads)
    return Limits(options.max_model_len, slots, options.memory, queue, options.dtype)


def make_systems(options: Options, limits: Limits) -> Iterator[System]:
    """Yield the systems to run."""
    if options.measure_client:
        yield make_stub()
    for name in options.systems:
        match name:
            case "ours-16" | "ours-plan":
                plan = "none" if name == "ours-16" else options.plan
                yield make_ours(name, options.model, plan, limits)
            case "vllm-16" | "vllm-fp8":
                cache_dtype = "auto" if name == "vllm-16" else "fp8"
                yield make_vllm(name, options.hf or options.model, cache_dtype, limits, options.vllm)


def read_vocab_size(model: Path) -> int:
    """Return the size of the vocabulary of a converted folder or of a Hugging Face folder.

    Raises:
      SystemExit: the folder is neither.
    """
    if (model / MANIFEST).exists():
        return Checkpoint.open(model).config.vocab_size
    try:
        return json.loads((model / "config.json").read_text())["vocab_size"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"--model {model}: no {MANIFEST}, and no config.json with vocab_size") from error


def measure(system: System, loads: list[Load], options: Options, vocab_size: int) -> Iterator[Row]:
    """Yield a row for each load, in order; rows of a server that failed say why."""
    left = list(loads)
    try:
        with run_server(system, options.start_seconds) as server:
            version = json.loads(asyncio.run(get(server.port, "/version"))[1])["version"]
            while left:
                row: Row = {"version": version}
                print(f"{system.name} {left[0].name}: {len(left[0].requests)} requests", flush=True)
                row |= summarize(replay_warm(server, left[0], vocab_size, options.seed), left[0])
                if "failed" in row:
                    row["log"] = server.read_log()
                left.pop(0)
                yield row
    except ServerFailed as failure:
        for load in left:
            yield {"version": None, "load": load.name, "failed": f"{failure}", "log": failure.log}


def replay_warm(server: ServerProcess, load: Load, vocab_size: int, seed: int) -> list[Served]:
    """Replay a load after its warm-up.

    Raises:
      ServerFailed: the server ended.
    """
    first = load.take_first(load.clients or WARM_UP, WARM_UP_TOKENS)
    for part, salt in ((first, f"{load.name} warm-up"), (load, load.name)):
        bodies = encode_requests(part, vocab_size=vocab_size, seed=seed, salt=salt)
        served = asyncio.run(replay_load(server.port, part, bodies))
        server.check()
    return served


def summarize(served: list[Served], load: Load) -> Row:
    """Return the row of a load without its system; one with failed requests has no times."""
    row: Row = {"load": load.name, "requests": len(served), "left_out": load.left_out}
    if failed := [one.error for one in served if one.error]:
        return row | {"failed": f"{len(failed)} requests failed; the first: {failed[0]}"}
    end = max(one.last for one in served)
    decoded = [one.between for one in served if one.tokens > 1]
    last_arrival = max(one.came for one in served)
    return row | {
        # Clients of a loop send as they are served; requests of a trace come at a rate of their own.
        "rate": len(served) / (last_arrival if load.clients is None and last_arrival else end),
        "ttft": summarize_times([one.first - one.came for one in served]),
        "tpot": summarize_times(decoded) if decoded else None,
        "jct": summarize_times([one.last - one.came for one in served]),
        "throughput": sum(one.tokens for one in served) / end,
        "attained": float(np.mean([one.attained for one in served])),
        "goodput": sum(one.attained for one in served) / end,
        "each": {
            "arrival": [one.came for one in served],
            "first": [one.first for one in served],
            "last": [one.last for one in served],
            "prompt": [one.arrival.prompt for one in served],
            "tokens": [one.tokens for one in served],
        },
    }


def write_row(row: Row, load: Load, settings: dict[str, Any], where: Row, options: Options) -> Path:
    """Write a row to the file of its load, in place of an earlier row of the same system.

    Raises:
      SystemExit: the file has rows of other settings or of another device.
    """
    name = name_results(options, load)
    rows = earlier(options.results / f"{name}.json", settings, where["device"])
    others = [other for other in rows if other["system"] != row["system"]]
    return write_result(name, settings, [*others, row], options.results, measured_in=where)


def name_results(options: Options, load: Load) -> str:
    """Return the name of a load's results."""
    return f"compare-{options.model.resolve().name}-{load.file_name}"


def describe(row: Row) -> str:
    """Return a row as one line of text, with medians."""
    head = f"{row['system']} {row['load']}:"
    if "failed" in row:
        return "\n".join([f"{head} {row['failed']}", *row["log"]])
    tpot = "no" if row["tpot"] is None else f"{1e3 * row['tpot']['p50']:.2f} ms"
    return (
        f"{head} TTFT {1e3 * row['ttft']['p50']:.1f} ms, {tpot} TPOT, JCT {row['jct']['p50']:.3f} s, "
        f"{row['throughput']:.1f} tokens/s, {row['attained']:.0%} in time"
    )


def main(options: Options) -> None:
    """Run all systems and write a file for each load, again after each row."""
    loads = make_loads(options)
    limits = make_limits(options, loads)
    systems = list(make_systems(options, limits))
    vocab_size, where = read_vocab_size(options.model), ask_environment()
    settings = {"model": options.model.resolve().name, "seed": options.seed} | asdict(limits)
    for load in loads:  # Refuse before any work.
        earlier(options.results / f"{name_results(options, load)}.json", settings, where["device"])
    for system in systems:
        facts: Row = {"system": system.name, "quality": options.quality.get(system.name)}
        facts |= {"command": system.command, "environment": system.environment, "commit": commit()}
        for load, row in zip(loads, measure(system, loads, options, vocab_size), strict=True):
            print(describe(facts | row), flush=True)
            print(write_row(facts | row, load, settings, where, options), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # This process must still end its server.
    main(tyro.cli(Options))
