"""Benchmark of replicas on Ray: their overhead, and the cost of a replica that dies.

    zdc convert convert/demo_checkpoint model && python -m benchmarks.serving.bench_replicas --model model

`killed`: streams run on two replicas of the demo model in float32. One replica is killed (SIGKILL) when the
first stream has some events. Texts are compared with those of a run without a kill. `gap` is the longest time
between two events of a stream, and `replaced` the seconds until another replica has loaded. Half of the
streams are sampled, with seeds.

`first_token`: TTFT at many clients, with an engine that computes nothing and gives one token every 20 ms.
`engine` is asked in its own process, `http` through the server, and `ray` through HAProxy and the front of
two replicas. `added_p50_ms` is the time beyond the median of `engine`. Clients run on the same cores, so
their work counts too.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.common import RESULTS, write_result
from benchmarks.serving.client import get, stream_events
from benchmarks.serving.paced import PacedSettings, serve_alone, serve_many
from zdc_jax.engine.request import EngineRequest
from zdc_jax.replicas.front import stream as stream_of
from zdc_jax.replicas.settings import ReplicaSettings

EVENTS_BEFORE_THE_KILL = 10
SETTLING = 10.0
"""Seconds after a server answers for the first time, in which Ray's other processes start."""
STARTING = 180.0
"""Seconds within which a server must answer."""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      streams: streams while a replica is killed.
      tokens: tokens of each of these streams.
      kills: number of kills.
      clients: clients that measure TTFT.
      requests: requests of each client.
      answer: tokens of each answer.
    """

    model: Path
    streams: int = 8
    tokens: int = 400
    kills: int = 3
    clients: int = 32
    requests: int = 20
    answer: int = 16
    name: str = "serving-replicas"
    results: Path = RESULTS


@contextmanager
def served(target: Callable[..., None], settings: ReplicaSettings) -> Iterator[int]:
    """Run a server in a process and yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = get_context("spawn").Process(target=target, args=(settings, port))
    process.start()
    until = time.monotonic() + STARTING
    try:
        while asyncio.run(get(port, "/health"))[0] != 200:
            assert process.is_alive(), "the server ended"
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.join()


async def events_of(port: int, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a streamed completion."""
    async for event in stream_events(port, json.dumps(body | {"stream": True}).encode()):
        yield event


async def read(port: int, body: dict[str, Any], on_event: Callable[[int], None]) -> tuple[str, float]:
    """Return a streamed text and the longest seconds between two events; `on_event` gets their number."""
    text, last, gap, count = "", 0.0, 0.0, 0
    async for chunk in events_of(port, body):
        now = time.monotonic()
        gap, last, count = max(gap, now - (last or now)), now, count + 1
        text += chunk["choices"][0]["text"] if "choices" in chunk else f"<{chunk}>"
        on_event(count)
    return text, gap


async def read_all(port: int, options: Options, on_event: Callable[[int], None]) -> list[tuple[str, float]]:
    """Read all streams at once; `on_event` follows the first."""

    def ignore(count):
        return None

    bodies = [
        {"prompt": [5 + i, 7, 8], "max_tokens": options.tokens, "temperature": 0.8 * (i % 2), "seed": i}
        | {"ignore_eos": True}
        for i in range(options.streams)
    ]
    return await asyncio.gather(
        *(read(port, body, ignore if i else on_event) for i, body in enumerate(bodies))
    )


def replicas_of(name: str) -> set[int]:
    """Return process ids of loaded replicas; titles of Ray's processes show which ones still load."""
    listed = subprocess.run(
        ["pgrep", "-af", f"^ray::ServeReplica:{name}:replica"], capture_output=True, text=True, check=False
    )
    return {int(line.split()[0]) for line in listed.stdout.splitlines() if "initialize" not in line}


def killed(options: Options) -> list[dict[str, Any]]:
    """Return a row for each kill; the next kill comes when there are two replicas again."""
    name = f"killed-{os.getpid()}"
    engine = {"max_sequences": options.streams, "max_model_len": 512, "chunk": 64}
    settings = ReplicaSettings(str(options.model.resolve()), name, engine=engine, dtype="float32")
    rows = []
    with served(serve_many, settings) as port:
        true = asyncio.run(read_all(port, options, lambda count: None))
        for _ in range(options.kills):
            victim, when = min(replicas_of(name)), 0.0

            def kill(count: int, victim: int = victim) -> None:
                nonlocal when
                if count == EVENTS_BEFORE_THE_KILL:
                    os.kill(victim, signal.SIGKILL)
                    when = time.monotonic()

            texts = asyncio.run(read_all(port, options, kill))
            while len(replicas_of(name) - {victim}) < settings.replicas:
                time.sleep(0.05)
            back = time.monotonic() - when
            same = sum(ours == theirs for (ours, _), (theirs, _) in zip(texts, true, strict=True))
            row = {"streams": options.streams, "same": same, "gap": max(gap for _, gap in texts)}
            rows.append(row | {"gap_without": max(gap for _, gap in true), "replaced": back})
            print(rows[-1], flush=True)
            time.sleep(SETTLING)  # The proxy must learn of the new replica.
    return rows


async def first_tokens(
    options: Options, ask: Callable[[dict[str, Any]], AsyncIterator[Any]]
) -> dict[str, float]:
    """Return milliseconds to the first token at all clients, each with one request after another."""
    body = {"prompt": [5, 7, 8], "max_tokens": options.answer, "temperature": 0}
    seconds: list[float] = []

    async def client() -> None:
        for index in range(options.requests + 1):
            begun, first = time.perf_counter(), 0.0
            async for _ in ask(body):
                first = first or time.perf_counter() - begun
            assert first, "no token came"
            if index:  # The first request opens connections.
                seconds.append(first)

    await asyncio.gather(*(client() for _ in range(options.clients)))
    assert len(seconds) == options.clients * options.requests
    return {f"p{share}_ms": 1e3 * float(np.percentile(seconds, share)) for share in (50, 90, 99)}


def first_token(options: Options) -> list[dict[str, Any]]:
    """Return a row for each way to the engine."""
    settings = PacedSettings(str(options.model.resolve()), f"paced-{os.getpid()}")
    engine = settings.new_engine()

    async def by_itself() -> dict[str, float]:
        return await first_tokens(
            options, lambda body: stream_of(engine, EngineRequest(tuple(body["prompt"]), body["max_tokens"]))
        )

    rows = [{"way": "engine"} | asyncio.run(by_itself())]
    for way, target in (("http", serve_alone), ("ray", serve_many)):
        with served(target, settings) as port:
            time.sleep(SETTLING)
            for _ in range(2):  # The first round warms up the processes.
                times = asyncio.run(first_tokens(options, partial(events_of, port)))
            rows.append({"way": way} | times)
    for row in rows:
        row["added_p50_ms"] = row["p50_ms"] - rows[0]["p50_ms"]
        print(row, flush=True)
    return rows


def main(options: Options) -> None:
    """Write one JSON file."""
    load = os.getloadavg()[0]  # Load of other work on the same cores.
    results = {"first_token": first_token(options), "killed": killed(options)}
    config = {name: value for name, value in vars(options).items() if isinstance(value, int)}
    print(
        write_result(
            options.name, config | {"cores": os.cpu_count(), "load_before": load}, results, options.results
        )
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
