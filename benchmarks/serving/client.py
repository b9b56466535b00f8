"""HTTP client of the serving benchmarks: streamed completions over bare sockets, for the least overhead."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from benchmarks.serving.loads import Load
from benchmarks.serving.replay import Served

HOST = "127.0.0.1"
GET_SECONDS = 10.0
"""Time that a server has to answer a GET request."""
MODEL = "model"
"""Name under which each server serves its model."""
SHOWN = 300
"""Most characters of a server's error that a message repeats."""


class RequestFailed(Exception):
    """Request that the server refused, or whose answer is incomplete."""


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to a server on this machine, and close it afterwards."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def get(port: int, path: str) -> tuple[int, str]:
    """Return the status and the body of a GET request; status 0 if no server answers."""
    try:
        async with asyncio.timeout(GET_SECONDS), connect(port) as (reader, writer):
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
            status = await _read_head(reader)
            return status, (await reader.read()).decode(errors="replace")
    except OSError:
        return 0, ""


async def stream_events(port: int, body: bytes) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a streamed completion as they come.

    Raises:
      RequestFailed: the server refused the request, or closed the connection before the end.
      OSError: there is no server.
    """
    async with connect(port) as (reader, writer):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        if (status := await _read_head(reader)) != 200:
            text = (await reader.read()).decode(errors="replace")
            raise RequestFailed(f"status {status}: {text:.{SHOWN}}")
        # Servers send each event as one chunk, so that the lines between events are sizes of chunks.
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
        raise RequestFailed("the connection closed before the end of the answer")


async def _read_head(reader: asyncio.StreamReader) -> int:
    """Read a response up to its body and return its status, 0 for a connection that closed."""
    line = await reader.readline()
    while (await reader.readline()).strip():
        pass
    return int(line.split()[1]) if line else 0


def encode_requests(load: Load, *, vocab_size: int, seed: int, salt: str) -> list[bytes]:
    """Return the bodies of all requests of a load.

    Args:
      load: the requests.
      vocab_size: bound of the random token ids.
      seed: seed of the prompts that a trace does not determine.
      salt: salt of the prefix cache. Only requests with the same salt share prefixes.
    """
    common = {"model": MODEL, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
    common |= {"stream": True, "stream_options": {"include_usage": True}}
    first = seed * 2**20  # Each request has its own seed.
    return [
        json.dumps(
            common | {"prompt": arrival.tokens(first + index, vocab_size), "max_tokens": arrival.answer}
        ).encode()
        for index, arrival in enumerate(load.requests)
    ]


async def ask(port: int, body: bytes, served: Served, began: float) -> None:
    """Send one request, and record its times in seconds since `began`, its tokens or its error.

    The first token is the first event with a choice. Servers count the tokens in the last event.
    """
    try:
        async for event in stream_events(port, body):
            if error := event.get("error"):
                raise RequestFailed(f"{error}"[:SHOWN])
            if event.get("choices"):
                served.last = time.perf_counter() - began
                served.first = served.first or served.last
            if usage := event.get("usage"):
                served.tokens = usage["completion_tokens"]
        if served.tokens != served.arrival.answer:
            raise RequestFailed(f"{served.tokens} tokens came, but {served.arrival.answer} were asked for")
    except (RequestFailed, OSError, ValueError) as error:  # Events that are no JSON are a `ValueError`.
        served.error = f"{error}" or type(error).__name__


async def replay_load(port: int, load: Load, bodies: Sequence[bytes]) -> list[Served]:
    """Send all requests of a load, and return their times in seconds since its start.

    In a closed loop each client sends its next request when its last one has ended. Other requests are sent
    at their times, and their latency counts from those times.
    """
    served = [Served(arrival) for arrival in load.requests]
    waiting = iter(zip(served, bodies, strict=True))
    began = time.perf_counter()

    async def send_one_by_one(requests: Iterator[tuple[Served, bytes]]) -> None:
        for one, body in requests:
            one.came = time.perf_counter() - began
            await ask(port, body, one, began)

    async def send_in_time(one: Served, body: bytes) -> None:
        one.came = one.arrival.time
        await asyncio.sleep(one.came - (time.perf_counter() - began))
        await ask(port, body, one, began)

    async with asyncio.TaskGroup() as tasks:
        if load.clients is None:
            for one, body in waiting:
                tasks.create_task(send_in_time(one, body))
        else:
            for _ in range(load.clients):
                tasks.create_task(send_one_by_one(waiting))
    return served
