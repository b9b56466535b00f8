"""Soak test of a server: every client gets the right answer, and no request is left over.

    zdc convert convert/demo_checkpoint model && python -m benchmarks.serving.soak --model model

One process serves. Clients ask over HTTP, more at once than may wait. Requests come from a pool, greedy or
seeded, with three priorities. The truth is what `generate` gives to each alone, in float32. Some clients read
a stream, some leave in the middle of a stream, some before the first token. Refused clients retry. At the end
no request may be running, every client that stayed must have the right text, and all sequences must be free.
"""

import asyncio
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tyro

from benchmarks.common import RESULTS, write_result
from zdc_jax import generate, load
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import LanguageModel
from zdc_jax.server.app import make_app
from zdc_jax.server.http_settings import HttpSettings
from zdc_jax.server.run import Server

WAYS = {"whole": 6, "stream": 2, "leaves": 1, "leaves at once": 1}
"""Behavior of clients, with weights."""
SETTLING = 30.0
"""Seconds within which requests of clients that left must be gone."""


@dataclass(frozen=True)
class Options:
    """Options of the test.

    Attributes:
      requests: number of requests.
      clients: concurrent clients.
      pool: number of different requests.
      rows: sequences of the engine.
      cache_tokens: tokens of the engine's cache.
      waiting: longest queue.
    """

    model: Path
    requests: int = 10_000
    clients: int = 48
    pool: int = 48
    rows: int = 4
    cache_tokens: int = 512
    waiting: int = 24
    seed: int = 0
    name: str = "serving-soak"
    results: Path = RESULTS


@dataclass(frozen=True)
class Asked:
    """A body of /v1/completions, and its right text."""

    body: dict[str, Any]
    text: str


def pool_of(model: LanguageModel, options: Options) -> list[Asked]:
    """Return prompts of 1 to 150 random tokens with 1 to 40 new tokens; a third is sampled."""
    rng, pool = np.random.default_rng(options.seed), []
    for index in range(options.pool):
        prompt = rng.integers(3, model.config.vocab_size, rng.integers(1, 150)).tolist()
        limit, drawn = int(rng.integers(1, 40)), index % 3 == 0
        sampling = Sampling(0.8, top_p=0.9, seed=index) if drawn else Sampling()
        text = generate(model, prompt, limit, sampling=sampling).completions[0].text
        asked = {"prompt": prompt, "max_tokens": limit, "temperature": sampling.temperature}
        asked |= {"seed": index, "top_p": 0.9} if drawn else {}
        pool.append(Asked(asked, text or ""))
    return pool


class Client:
    """A client that asks until all requests are done, and counts the outcomes."""

    def __init__(self, http: httpx.AsyncClient, pool: list[Asked], seed: int):
        self.http, self.pool, self.random = http, pool, random.Random(seed)
        self.seen: Counter[str] = Counter()

    async def run(self, left: list[int]) -> None:
        """Take requests off `left` until there are none."""
        while left:
            left.pop()
            asked = self.random.choice(self.pool)
            (way,) = self.random.choices(list(WAYS), list(WAYS.values()))
            body = asked.body | {"priority": self.random.randrange(3), "stream": way != "whole"}
            while (outcome := await self._ask(body, way, asked.text)) == "refused":
                self.seen["refused"] += 1
                await asyncio.sleep(0.02)
            self.seen[outcome] += 1

    async def _ask(self, body: dict[str, Any], way: str, text: str) -> str:
        if way == "whole":
            reply = await self.http.post("/v1/completions", json=body)
            return self._outcome(reply.status_code, reply, text)
        async with self.http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200 or way == "leaves at once":
                return self._outcome(reply.status_code, None, None)
            lines = [line async for line in self._lines(reply, until=1 if way == "leaves" else None)]
        if way == "leaves":
            return "left"
        chunks = [httpx.Response(200, text=line).json() for line in lines if line != "[DONE]"]
        received = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        return "right" if lines[-1] == "[DONE]" and received == text else "wrong"

    async def _lines(self, reply: httpx.Response, until: int | None) -> Any:
        count = 0
        async for line in reply.aiter_lines():
            if line:
                yield line.removeprefix("data: ")
                count += 1
            if count == until:
                return

    def _outcome(self, status: int, reply: httpx.Response | None, text: str | None) -> str:
        if status == 429:
            return "refused"
        if status != 200:
            return "unanswered"
        if reply is None:
            return "left"
        return "right" if reply.json()["choices"][0]["text"] == text else "wrong"


async def soak(address: str, pool: list[Asked], options: Options) -> Counter[str]:
    """Return the outcomes of all clients."""
    left = list(range(options.requests))
    limits = httpx.Limits(max_connections=options.clients)
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as http:
        clients = [Client(http, pool, options.seed + i) for i in range(options.clients)]
        await asyncio.gather(*(client.run(left) for client in clients))
    return sum((client.seen for client in clients), Counter())


def main(options: Options) -> None:
    """Write one JSON file; exit with status 1 if an answer was wrong or missing, or a request is left."""
    model = load(options.model, dtype="float32")
    pool = pool_of(model, options)
    config = EngineConfig(
        options.rows, 256, options.cache_tokens, page=16, chunk=64, max_waiting=options.waiting
    )
    engine = Engine(model, config)
    settings = HttpSettings(port=0, access_log=False)
    server = Server(make_app(engine, name="soak"), engine, "soak", settings, drain_seconds=5)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    began = time.monotonic()
    seen = asyncio.run(soak(server.address, pool, options))
    seconds, until = time.monotonic() - began, time.monotonic() + SETTLING
    while (stats := engine.stats()).running + stats.waiting and time.monotonic() < until:
        time.sleep(0.05)
    server.should_exit = True
    thread.join()
    leaked = stats.running + stats.waiting
    row = dict(seen) | {"leaked": leaked, "seconds": seconds, "preemptions": stats.preemptions}
    row |= {"generated": stats.generation_tokens, "prefix_hits": stats.prefix_hits}
    print(row)
    print(
        write_result(options.name, {"requests": options.requests, "rows": options.rows}, row, options.results)
    )
    if seen["wrong"] or seen["unanswered"] or leaked:
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Options))
