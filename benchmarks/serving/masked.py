"""Throughput of `zdc serve` where some of the answers must belong to a grammar.

    python -m benchmarks.serving.masked --model CONVERTED --plan none 3bit

All clients send one request each at once, with prompts of random tokens. In each round they do so twice:
without a grammar, and with one in the requests of the first `--masked` clients. Random weights choose what
no grammar allows. So this is the worst case: such requests go back, and get masks for more and more tokens.
The host makes masks: of JSON in microseconds, of the expression in half a millisecond. `throughput` counts
output tokens per second from the first request to the last token; `kept` is its share with masks, as a
median over rounds.
"""

import asyncio
import json
import signal
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import tyro

from benchmarks.common import RESULTS, ask_environment, commit, write_result
from benchmarks.serving.client import encode_requests, replay_load
from benchmarks.serving.loads import Load, parse_loop
from benchmarks.serving.systems import Limits, ServerFailed, make_ours, run_server
from zdc_jax.checkpoint import Checkpoint

GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"guided_json": {"type": "array", "items": {"type": "string"}, "minItems": 4000}},
    "regex": {"guided_regex": "[a-z ]{4000}"},
}
"""Fields of requests with grammars that no answer completes, so that masks last as long as the answer."""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      model: converted folder with a tokenizer.
      plan: plans to serve with, one after another: presets or files.
      load: tokens of a prompt and of an answer, and the number of clients: PROMPT/OUTPUT@CLIENTS.
      masked: number of clients whose requests have a grammar.
      grammars: grammars to measure, one after another.
      rounds: number of rounds that count, after one that warms up.
      memory: share of the GPU's memory that the server may use.
    """

    model: Path
    plan: tuple[str, ...] = ("none", "3bit")
    load: str = "512/256@32"
    masked: int = 8
    grammars: tuple[Literal["json", "regex"], ...] = ("json", "regex")
    rounds: int = 5
    memory: float = 0.9
    dtype: str = "bfloat16"
    start_seconds: float = 600.0
    name: str = "serving-masked"
    results: Path = RESULTS


def measure(port: int, load: Load, *, masked: int, grammar: str, vocab_size: int, salt: str) -> float:
    """Send all requests at once, the first `masked` with a grammar, and return output tokens per second.

    Raises:
      ServerFailed: a request failed.
    """
    bodies = encode_requests(load, vocab_size=vocab_size, seed=0, salt=salt)
    with_masks = [json.dumps(json.loads(body) | GRAMMARS[grammar]).encode() for body in bodies[:masked]]
    served = asyncio.run(replay_load(port, load, [*with_masks, *bodies[masked:]]))
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
        own = {"plan": plan, "load": options.load, "masked": options.masked, "commit": commit()}
        try:
            with run_server(make_ours("ours", options.model, plan, limits), options.start_seconds) as server:
                for grammar in options.grammars:
                    speeds = {0: list[float](), options.masked: list[float]()}
                    for number, masked in product(range(1 + options.rounds), speeds):
                        given = {"grammar": grammar, "salt": f"{grammar}-{number}-{masked}"}
                        speed = measure(server.port, load, masked=masked, vocab_size=vocab_size, **given)
                        speeds[masked].append(speed)
                    without, beside = (of_rounds[1:] for of_rounds in speeds.values())
                    row = {"grammar": grammar, "throughput": without, "throughput_masked": beside}
                    row["kept"] = median(b / a for a, b in zip(without, beside, strict=True))
                    rows.append(own | row)
        except ServerFailed as failure:
            rows.append(own | {"failed": f"{failure}", "log": failure.log})
        print(*(row for row in rows if row["plan"] == plan), sep="\n", flush=True)
        write_result(options.name, settings, rows, options.results, measured_in=where)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # This process must still end its server.
    main(tyro.cli(Options))
