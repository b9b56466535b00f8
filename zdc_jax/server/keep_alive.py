"""Comments that keep a silent stream of server-sent events open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.types import Message, Send

SILENCE_SECONDS = 10.0
"""Longest silence of a stream. Proxies and clients commonly give up after 30 or 60 seconds."""
COMMENT = b": keep-alive\n\n"
"""Comment of a stream of events, which clients skip."""


@asynccontextmanager
async def keep_alive(send: Send) -> AsyncIterator[Send]:
    """Send a comment whenever a stream was silent for `SILENCE_SECONDS`.

    Args:
      send: ASGI callable of the response.

    Yields:
      Callable for the response to use instead. Each of its messages must hold whole events.
    """
    stream = _Stream(send)
    beats = asyncio.create_task(stream.beat())
    try:
        yield stream.send
    finally:
        beats.cancel()


class _Stream:
    """Response that may fall silent.

    Args:
      send: ASGI callable of the response.
    """

    def __init__(self, send: Send):
        self._send, self._loop = send, asyncio.get_running_loop()
        self._newest = self._loop.time()
        self._is_open = False

    async def send(self, message: Message) -> None:
        """Pass on a message, and note its time."""
        self._is_open = False  # Comments may neither precede the first message nor follow the last.
        await self._send(message)
        self._is_open = message["type"] == "http.response.start" or message.get("more_body", False)
        self._newest = self._loop.time()

    async def beat(self) -> None:
        """Send comments until the task is cancelled."""
        with suppress(OSError):  # The client has disconnected.
            while True:
                await asyncio.sleep(self._newest + SILENCE_SECONDS - self._loop.time())
                if self._loop.time() < self._newest + SILENCE_SECONDS:
                    continue
                self._newest = self._loop.time()
                if self._is_open:
                    await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
