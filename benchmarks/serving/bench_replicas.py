"""What Ray costs, and what a replica that dies costs.

    zdc convert convert/demo_checkpoint model && python -m benchmarks.serving.bench_replicas --model model

`killed`: streams run on two replicas of the demo model in float32; one is killed (SIGKILL) when the first
stream has some pieces. Texts are compared with those of a run without a kill; `gap` is the longest time
between two pieces of a stream; `replaced`: seconds until another replica has loaded. Half of the streams are
drawn, with seeds.

`first_token`: the time to the first token at many clients, with an engine that computes nothing and gives the
first token after 20 ms, a further one each 20 ms. `engine`: asked in its own process; `http`: behind the
server; `ray`: two behind HAProxy and the front. `added` is what a client waits beyond the median of `engine`.
Clients run on the same cores, so that their own work counts too.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.common import RESULTS, write_result
from benchmarks.serving.paced import PacedSettings, serve_alone, serve_many
from zdc_jax.engine.request import EngineRequest
from zdc_jax.replicas.front import stream as stream_of
from zdc_jax.replicas.settings import ReplicaSettings

PIECES_BEFORE_THE_KILL = 10
SETTLING = 10.0
"""Seconds that a server has after it answers: Ray's other processes still start."""
STARTING = 180.0
"""Seconds in which a server must be there."""


@dataclass(frozen=True)
class Options:
    """streams, tokens: while a replica is killed. clients, requests, answer: of the time to the first token;
    requests: of each client, answer: tokens of each."""

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
    """The port of a server in a process that ends afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = get_context("spawn").Process(target=target, args=(settings, port))
    process.start()
    until = time.monotonic() + STARTING
    try:
        while asyncio.run(status(port)) != 200:
            assert process.is_alive(), "the server ended"
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.join()


async def status(port: int) -> int:
    """Of /health; 0 where nobody listens."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return 0
    with closing(writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return int((await reader.readline() or b"x 0").split()[1])


async def pieces_of(port: int, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Of a streamed completion. A bare socket costs least of what is measured."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with closing(writer):
        data = json.dumps(body | {"stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        while line := await reader.readline():
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def read(port: int, body: dict[str, Any], on_piece: Callable[[int], None]) -> tuple[str, float]:
    """A streamed text, and the longest seconds between two of its pieces; `on_piece` gets their number."""
    text, last, gap, count = "", 0.0, 0.0, 0
    async for chunk in pieces_of(port, body):
        now = time.monotonic()
        gap, last, count = max(gap, now - (last or now)), now, count + 1
        text += chunk["choices"][0]["text"] if "choices" in chunk else f"<{chunk}>"
        on_piece(count)
    return text, gap


async def read_all(port: int, options: Options, on_piece: Callable[[int], None]) -> list[tuple[str, float]]:
    """All streams at once; `on_piece` follows the first."""

    def nothing(count):
        return None

    bodies = [
        {"prompt": [5 + i, 7, 8], "max_tokens": options.tokens, "temperature": 0.8 * (i % 2), "seed": i}
        | {"ignore_eos": True}
        for i in range(options.streams)
    ]
    return await asyncio.gather(
        *(read(port, body, nothing if i else on_piece) for i, body in enumerate(bodies))
    )


def replicas_of(name: str) -> set[int]:
    """Process ids of those that have loaded; Ray's titles say which still do."""
    found = subprocess.run(
        ["pgrep", "-af", f"^ray::ServeReplica:{name}:replica"], capture_output=True, text=True, check=False
    )
    return {int(line.split()[0]) for line in found.stdout.splitlines() if "initialize" not in line}


def killed(options: Options) -> list[dict[str, Any]]:
    """A row for each kill; the next comes when there are two replicas again."""
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
                if count == PIECES_BEFORE_THE_KILL:
                    os.kill(victim, signal.SIGKILL)
                    when = time.monotonic()

            given = asyncio.run(read_all(port, options, kill))
            while len(replicas_of(name) - {victim}) < settings.replicas:
                time.sleep(0.05)
            back = time.monotonic() - when
            same = sum(ours == theirs for (ours, _), (theirs, _) in zip(given, true, strict=True))
            row = {"streams": options.streams, "same": same, "gap": max(gap for _, gap in given)}
            rows.append(row | {"gap_without": max(gap for _, gap in true), "replaced": back})
            print(rows[-1], flush=True)
            time.sleep(SETTLING)  # The door hears of the new one.
    return rows


async def first_tokens(
    options: Options, ask: Callable[[dict[str, Any]], AsyncIterator[Any]]
) -> dict[str, float]:
    """Milliseconds to the first token, at so many clients that ask again and again."""
    body = {"prompt": [5, 7, 8], "max_tokens": options.answer, "temperature": 0}
    seconds: list[float] = []

    async def client() -> None:
        for index in range(options.requests + 1):
            begun, first = time.perf_counter(), 0.0
            async for _ in ask(body):
                first = first or time.perf_counter() - begun
            assert first, "no token came"
            if index:  # The first one finds connections to be made.
                seconds.append(first)

    await asyncio.gather(*(client() for _ in range(options.clients)))
    assert len(seconds) == options.clients * options.requests
    return {f"p{share}_ms": 1e3 * float(np.percentile(seconds, share)) for share in (50, 90, 99)}


def first_token(options: Options) -> list[dict[str, Any]]:
    """A row for each way to the engine."""
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
            for _ in range(2):  # The first round finds processes that have not done this before.
                found = asyncio.run(first_tokens(options, partial(pieces_of, port)))
            rows.append({"way": way} | found)
    for row in rows:
        row["added_p50_ms"] = row["p50_ms"] - rows[0]["p50_ms"]
        print(row, flush=True)
    return rows


def main(options: Options) -> None:
    """Writes one JSON."""
    load = os.getloadavg()[0]  # Of others, who use the same cores.
    results = {"first_token": first_token(options), "killed": killed(options)}
    config = {name: value for name, value in vars(options).items() if isinstance(value, int)}
    print(
        write_result(
            options.name, config | {"cores": os.cpu_count(), "load_before": load}, results, options.results
        )
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
