"""Time that programs of the engine keep the host, measured in `zdc serve` under load.

    python -m benchmarks.serving.host_times --model model --max-model-len 4096 --plan none 3bit \
        --loop 500/64@1 500/64@4 1000/64@4

A server is started for each plan, answers all loads, and ends. `seconds` are median and quartiles of the
calls of one program. A call returns when the work is queued, so that short programs of the GPU wait for the
host if their time is longer than the GPU's. Calls that begin while the queue is full take as long as the GPU.
"""

import asyncio
import json
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tyro

from benchmarks.common import RESULTS, ask_environment, commit, write_result
from benchmarks.serving.client import encode_requests, replay_load
from benchmarks.serving.loads import Load, parse_loops
from benchmarks.serving.systems import Limits, ServerFailed, System, make_ours, run_server
from benchmarks.serving.timed_server import VARIABLE
from zdc_jax.checkpoint import Checkpoint

TIMED = "benchmarks.serving.timed_server"
LEAST_CALLS = 5
"""Programs with fewer calls are left out."""


@dataclass(frozen=True)
class Options:
    """Options of the measurement.

    Attributes:
      model: converted folder.
      max_model_len: most tokens of a prompt and its answer.
      loop: closed loops, each PROMPT/OUTPUT@CLIENTSxREQUESTS.
      plan: plans to serve with, one after another: presets or files.
      slots: most requests at once.
      memory: share of the GPU's memory that the server may use.
      seed: seed of the prompts.
    """

    model: Path
    max_model_len: int
    loop: tuple[str, ...]
    plan: tuple[str, ...] = ("none", "3bit")
    slots: int = 64
    memory: float = 0.9
    dtype: str = "bfloat16"
    seed: int = 0
    start_seconds: float = 1200.0
    name: str = "host-times"
    results: Path = RESULTS


def make_timed(plan: str, options: Options, loads: list[Load], times: Path) -> System:
    """Return `zdc serve` with timers, which writes to `times`."""
    queue = max(len(load.requests) for load in loads)
    limits = Limits(options.max_model_len, options.slots, options.memory, queue, options.dtype)
    ours = make_ours(plan, options.model, plan, limits)
    command = tuple(TIMED if part == "convert.cli.entry" else part for part in ours.command)
    return replace(ours, command=command, environment=ours.environment | {VARIABLE: str(times)})


def measure(system: System, loads: list[Load], options: Options, vocab_size: int, times: Path) -> Any:
    """Serve all loads; return the seconds of each call by program.

    Raises:
      SystemExit: the server failed, or refused a request.
    """
    try:
        with run_server(system, options.start_seconds) as server:
            for load in loads:
                bodies = encode_requests(load, vocab_size=vocab_size, seed=options.seed, salt=load.name)
                served = asyncio.run(replay_load(server.port, load, bodies))
                if failed := [one.error for one in served if one.error]:
                    raise SystemExit(f"{system.name}, --loop {load.name}: {failed[0]}")
    except ServerFailed as failure:
        raise SystemExit("\n".join([f"{system.name}: {failure}", *failure.log])) from failure
    return json.loads(times.read_text())


def summarize(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each program with enough calls."""

    def find_quartiles(calls: list[float]) -> dict[str, float]:
        return dict(zip(("p25", "p50", "p75"), np.percentile(calls, (25, 50, 75)).tolist(), strict=True))

    return [
        {"program": name, "calls": len(calls), "seconds": find_quartiles(calls)}
        for name, calls in sorted(seconds.items())
        if len(calls) >= LEAST_CALLS
    ]


def main(options: Options) -> None:
    """Measure each plan, print a line for each program, and write the results."""
    loads = parse_loops(options.loop, options.max_model_len)
    vocab_size = Checkpoint.open(options.model).config.vocab_size
    where, rows = ask_environment(), []
    for plan in options.plan:
        with TemporaryDirectory() as folder:
            times = Path(folder) / "times.json"
            system = make_timed(plan, options, loads, times)
            found = summarize(measure(system, loads, options, vocab_size, times))
        for row in found:
            low, median, high = (1e3 * row["seconds"][key] for key in ("p25", "p50", "p75"))
            print(
                f"{plan}, {row['program']}: {median:.2f} ms ({low:.2f} to {high:.2f}), {row['calls']} calls"
            )
        rows += [{"plan": plan, "commit": commit()} | row for row in found]
    settings = asdict(options) | {"model": options.model.resolve().name}
    settings = {key: value for key, value in settings.items() if key not in ("name", "results")}
    print(write_result(options.name, settings, rows, options.results, measured_in=where))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # This process must still end its server.
    main(tyro.cli(Options))
