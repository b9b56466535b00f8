"""Soak test of a server: every client gets the right answer, and no request is left over.

    zdc convert convert/demo_checkpoint model && python -m benchmarks.serving.soak --model model

One process serves. Clients ask over HTTP, more at once than may wait. Requests come from a pool, greedy or
seeded, with three priorities. Some ask for JSON of a schema or for a call of a tool, and some set penalties.
The truth is what `generate` gives to each alone, in float32. Some clients read a stream, some leave in the
middle of a stream, some before the first token. Refused clients retry. At the end no request may be running,
every client that stayed must have the right answer, and all sequences must be free.
"""

import asyncio
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tyro

from benchmarks.common import RESULTS, write_result
from zdc_jax import generate, load
from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.engine.checks import resolve_stop_ids
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import Event
from zdc_jax.loading import LanguageModel
from zdc_jax.server.app import make_app
from zdc_jax.server.http_settings import HttpSettings
from zdc_jax.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from zdc_jax.server.replies import ChatReply, CompletionReply, Reply
from zdc_jax.server.run import Server

WAYS = {"whole": 6, "stream": 2, "leaves": 1, "leaves at once": 1}
"""Behavior of clients, with weights."""
LONGEST = 256
"""Most tokens of a prompt and its answer."""
TEMPLATE = """{% if tools %}Write <tool_call>. {{ tools | tojson }}
{% endif %}{% for message in messages %}{{ message.content }}
{% endfor %}"""
"""Chat template of the served model."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
"""Schema of JSON answers, and of the arguments of the tool."""
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
      steps: decode steps of a call. On GPUs the engine's default is 4, on a CPU 1.
    """

    model: Path
    requests: int = 10_000
    clients: int = 48
    pool: int = 48
    rows: int = 4
    cache_tokens: int = 512
    waiting: int = 24
    steps: int = 4
    seed: int = 0
    name: str = "serving-soak"
    results: Path = RESULTS


@dataclass(frozen=True)
class Asked:
    """A body of a route, and the right answer to it."""

    path: str
    body: dict[str, Any]
    answer: str


def make_pool(model: LanguageModel, options: Options) -> list[Asked]:
    """Return prompts of 1 to 150 random tokens with 1 to 40 new tokens, and calls of a tool.

    A third is sampled. A sixth each asks for JSON, for a call, and for penalties and biases.
    """
    rng = np.random.default_rng(options.seed)
    return [_ask_alone(model, *_draw_body(model, rng, index)) for index in range(options.pool)]


def _draw_body(model: LanguageModel, rng: np.random.Generator, index: int) -> tuple[str, dict[str, Any]]:
    prompt = rng.integers(3, model.config.vocab_size, rng.integers(1, 150)).tolist()
    body: dict[str, Any] = {"max_tokens": int(rng.integers(1, 40)), "temperature": 0}
    if index % 3 == 0:
        body |= {"temperature": 0.8, "top_p": 0.9, "seed": index}
    if index % 6 == 1:
        body |= {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {str(prompt[0]): 5}}
    if index % 6 == 2:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        body |= {"max_tokens": 60, "response_format": form}
    if index % 6 != 4:
        return "/v1/completions", body | {"prompt": prompt}
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    message = {"role": "user", "content": f"Person {index}?"}
    calls = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80}
    return "/v1/chat/completions", body | calls | {"messages": [message]}


def _ask_alone(model: LanguageModel, path: str, body: dict[str, Any]) -> Asked:
    """Return a body with the answer of `generate`."""
    reply_of: type[Reply]
    parsed: GenerationRequest
    if "messages" in body:
        parsed, reply_of = ChatRequest.model_validate(body), ChatReply
    else:
        parsed, reply_of = CompletionRequest.model_validate(body), CompletionReply
    (request,) = parsed.engine_requests(model, LONGEST)
    found = generate(
        model,
        list(request.prompt),
        request.max_tokens,
        sampling=request.sampling,
        stop_tokens=resolve_stop_ids(model, request),
        new_text=request.new_text,
    ).completions[0]
    reply = reply_of("soak", model, parsed, [request])
    reply.add(0, Event(found.tokens, text=found.text, finish_reason=found.finish_reason))
    return Asked(path, body, read_choice(reply.whole()["choices"][0]))


def read_choice(choice: dict[str, Any]) -> str:
    """Return the text of a whole or streamed choice, and the arguments of its calls."""
    message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    calls = (call["function"] for call in message.get("tool_calls") or [])
    names = "".join((call.get("name") or "") + call["arguments"] for call in calls)
    return (message.get("content") or "") + names


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
            while (outcome := await self._ask(asked.path, body, way, asked.answer)) == "refused":
                self.seen["refused"] += 1
                await asyncio.sleep(0.02)
            self.seen[outcome] += 1

    async def _ask(self, path: str, body: dict[str, Any], way: str, answer: str) -> str:
        if way == "whole":
            reply = await self.http.post(path, json=body)
            return self._outcome(reply.status_code, reply, answer)
        async with self.http.stream("POST", path, json=body) as reply:
            if reply.status_code != 200 or way == "leaves at once":
                return self._outcome(reply.status_code, None, None)
            lines = [line async for line in self._lines(reply, until=1 if way == "leaves" else None)]
        if way == "leaves":
            return "left"
        chunks = [httpx.Response(200, text=line).json() for line in lines if line != "[DONE]"]
        received = "".join(read_choice(chunk["choices"][0]) for chunk in chunks)
        return "right" if lines[-1] == "[DONE]" and received == answer else "wrong"

    async def _lines(self, reply: httpx.Response, until: int | None) -> Any:
        count = 0
        async for line in reply.aiter_lines():
            if line and not line.startswith(":"):  # Comments keep the connection open.
                yield line.removeprefix("data: ")
                count += 1
            if count == until:
                return

    def _outcome(self, status: int, reply: httpx.Response | None, answer: str | None) -> str:
        if status == 429:
            return "refused"
        if status != 200:
            return "unanswered"
        if reply is None:
            return "left"
        return "right" if read_choice(reply.json()["choices"][0]) == answer else "wrong"


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
    model = replace(load(options.model, dtype="float32"), chat_template=ChatTemplate(TEMPLATE))
    pool = make_pool(model, options)
    config = EngineConfig(
        options.rows,
        LONGEST,
        options.cache_tokens,
        page=16,
        chunk=64,
        decode_steps=options.steps,
        max_waiting=options.waiting,
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
        write_result(
            options.name,
            {"requests": options.requests, "rows": options.rows, "steps": options.steps},
            row,
            options.results,
        )
    )
    if seen["wrong"] or seen["unanswered"] or leaked:
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Options))
