"""Server that answers completions at once and computes nothing, to measure the client itself.

python -m benchmarks.serving.stub_server --port 8000
"""

import asyncio
import json
import re
from dataclasses import dataclass

import tyro

HOST = "127.0.0.1"
TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
VERSION = json.dumps({"version": "stub"}).encode()


@dataclass(frozen=True)
class Options:
    """Options of the server."""

    port: int


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request, and close its connection.

    A completion gets one event for each of `max_tokens` tokens, and one event that counts them. The prompt is
    not parsed.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    body = await reader.readexactly(int(length[1])) if length else b""
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    if (asked := TOKENS.search(body)) is None:
        writer.write(VERSION)
    else:
        count = int(asked[1])
        for _ in range(count):
            writer.write(encode_event({"choices": [{"index": 0, "text": "a"}]}))
        writer.write(encode_event({"choices": [], "usage": {"completion_tokens": count}}))
        writer.write(b"data: [DONE]\n\n")
    await writer.drain()
    writer.close()


def encode_event(event: dict[str, object]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(event).encode() + b"\n\n"


async def serve(port: int) -> None:
    """Serve on this machine until the process ends."""
    server = await asyncio.start_server(answer, HOST, port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(tyro.cli(Options).port))
