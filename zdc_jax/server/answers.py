"""Requests under way in an engine, as a coroutine sees them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from zdc_jax.engine.request import EngineRequest, Event, Serving, Ticket
from zdc_jax.server.errors import RequestError
from zdc_jax.server.metrics import Metrics, Stopwatch

Arrival = tuple[int, Event]
"""Which request of several, and what came of it."""


@dataclass(frozen=True)
class Answers:
    """What came of all engine requests of one client, in one queue."""

    tickets: list[Ticket] = field(default_factory=list)
    arrived: asyncio.Queue[Arrival] = field(default_factory=asyncio.Queue)

    @classmethod
    def begun(cls, engine: Serving, requests: Sequence[EngineRequest], metrics: Metrics) -> Self:
        """Submits all requests or none; raises what `Serving.submit` does. Needs a running event loop."""
        answers = cls()
        try:
            for index, request in enumerate(requests):
                notify = answers._notify(index, Stopwatch(metrics))
                answers.tickets.append(engine.submit(request, notify))
        except BaseException:
            answers.cancel()
            raise
        return answers

    def cancel(self) -> None:
        """Gives up those that have not ended."""
        for ticket in self.tickets:
            ticket.cancel()

    async def events(self) -> AsyncIterator[Arrival]:
        """Events as they come, until all have ended.

        Raises:
          RequestError: one of them failed, or the engine gave it up.
        """
        left = len(self.tickets)
        while left:
            index, event = await self.arrived.get()
            if event.finish_reason == "error":
                raise RequestError(event.error or "the engine failed", status=500)
            if event.finish_reason == "cancelled":
                raise RequestError("the request was cancelled", status=503)
            left -= event.finish_reason is not None
            yield index, event

    def _notify(self, index: int, watch: Stopwatch) -> Callable[[Event], None]:
        """What the engine calls on its own thread: hands events over to this one."""
        loop = asyncio.get_running_loop()

        def take(event: Event) -> None:
            watch.take(event)
            self.arrived.put_nowait((index, event))

        def notify(event: Event) -> None:
            # A loop that is closed has nobody who waits, and the engine must not suffer from it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(take, event)

        return notify
