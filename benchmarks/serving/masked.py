"""Throughput of `zdc serve` where some of the requests must match a regular expression.

    python -m benchmarks.serving.masked --model CONVERTED --plan none 3bit

All clients send one request each at once, with prompts of random tokens. In each round they do so twice:
without masks, and with a regular expression in the requests of the first `--masked` clients. Masks are made
on the host for each token. `throughput` counts output tokens per second from the first request to the last
token; `kept` is its share with masks, as a median over rounds.
"""

import asyncio
import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from benchmarks.common import RESULTS, ask_environment, commit, write_result
from benchmarks.serving.client import encode_requests, replay_load
from benchmarks.serving.loads import Load, parse_loop
from benchmarks.serving.systems import Limits, ServerFailed, make_ours, run_server
from zdc_jax.checkpoint import Checkpoint

REGEX = "[a-z ]{4000}"
"""Expression that no answer completes, so that masks last as long as the answer."""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      model: converted folder with a tokenizer.
      plan: plans to serve with, one after another: presets or files.
      load: tokens of a prompt and of an answer, and the number of clients: PROMPT/OUTPUT@CLIENTS.
      masked: number of clients whose requests have a mask.
      rounds: number of rounds that count, after one that warms up.
      memory: share of the GPU's memory that the server may use.
    """

    model: Path
    plan: tuple[str, ...] = ("none", "3bit")
    load: str = "512/256@32"
    masked: int = 8
    rounds: int = 5
    memory: float = 0.9
    dtype: str = "bfloat16"
    start_seconds: float = 600.0
    name: str = "serving-masked"
    results: Path = RESULTS


def measure(port: int, load: Load, *, masked: int, vocab_size: int, salt: str) -> float:
    """Send all requests at once, the first `masked` with a mask, and return output tokens per second.

    Raises:
      ServerFailed: a request failed.
    """
    bodies = encode_requests(load, vocab_size=vocab_size, seed=0, salt=salt)
    with_mask = [json.dumps(json.loads(body) | {"guided_regex": REGEX}).encode() for body in bodies[:masked]]
    served = asyncio.run(replay_load(port, load, [*with_mask, *bodies[masked:]]))
    if wrong := [one.error for one in served if one.error]:
        raise ServerFailed(f"a request failed: {wrong[0]}", [])
    return sum(one.tokens for one in served) / max(one.last for one in served)


def main(options: Options) -> None:
    """Measure each plan, and write the rows after each."""
    load = parse_loop(f"{options.load}x1")
    if not 0 < options.masked <= len(load.requests):
        raise SystemExit(
            f"--masked {options.masked}: must be 1 to {len(load.requests)}, the clients of --load"
        )
    request, clients = load.requests[0], len(load.requests)
    limits = Limits(request.prompt + request.answer, clients, options.memory, clients, options.dtype)
    vocab_size = Checkpoint.open(options.model).config.vocab_size
    rows: list[dict[str, Any]] = []
    where = ask_environment()
    settings = {key: str(value) for key, value in asdict(options).items() if key not in ("results", "name")}
    for plan in options.plan:
        system = make_ours("ours", options.model, plan, limits)
        row: dict[str, Any] = {
            "plan": plan,
            "load": options.load,
            "masked": options.masked,
            "commit": commit(),
        }
        try:
            with run_server(system, options.start_seconds) as server:
                found: dict[int, list[float]] = {0: [], options.masked: []}
                for number in range(1 + options.rounds):
                    for masked, speeds in found.items():
                        given = {"vocab_size": vocab_size, "salt": f"{number}-{masked}"}
                        speeds.append(measure(server.port, load, masked=masked, **given))
            without, beside = (speeds[1:] for speeds in found.values())
            row |= {"throughput": without, "throughput_masked": beside}
            row["kept"] = median(b / a for a, b in zip(without, beside, strict=True))
        except ServerFailed as failure:
            row |= {"failed": f"{failure}", "log": failure.log}
        rows.append(row)
        print(row, flush=True)
        write_result(options.name, settings, rows, options.results, measured_in=where)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # This process must still end its server.
    main(tyro.cli(Options))
