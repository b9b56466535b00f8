"""Asynchronous access to the engine requests of one client."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self

from zdc_jax.engine.request import EngineRequest, Event, Serving, Ticket
from zdc_jax.server.errors import RequestError
from zdc_jax.server.metrics import Metrics, Stopwatch
from zdc_jax.server.middleware import request_id

IndexedEvent = tuple[int, Event]
"""Index of a request and one of its events."""


@dataclass(frozen=True)
class Answers:
    """Engine requests of one client, with their events in one queue.

    Attributes:
      tickets: handles of the requests.
      arrived: events that were not read yet.
    """

    tickets: list[Ticket] = field(default_factory=list)
    arrived: asyncio.Queue[IndexedEvent] = field(default_factory=asyncio.Queue)

    @classmethod
    def submit(cls, engine: Serving, requests: Sequence[EngineRequest], metrics: Metrics) -> Self:
        """Submit all requests, or none if one is refused.

        Raises the errors of `Serving.submit`. Needs a running event loop.
        """
        answers = cls()
        name = request_id.get()
        try:
            for index, request in enumerate(requests):
                if name is not None:
                    request = replace(request, id=name if len(requests) == 1 else f"{name}-{index}")
                notify = answers._make_callback(index, Stopwatch(metrics, request))
                answers.tickets.append(engine.submit(request, notify))
        except BaseException:
            answers.cancel()
            raise
        return answers

    def cancel(self) -> None:
        """Cancel the requests that have not ended."""
        for ticket in self.tickets:
            ticket.cancel()

    async def events(self) -> AsyncIterator[IndexedEvent]:
        """Yield events as they arrive, until all requests have ended.

        Raises:
          RequestError: a request failed or was cancelled.
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

    def _make_callback(self, index: int, watch: Stopwatch) -> Callable[[Event], None]:
        """Return a callback for the engine's thread that passes events to the event loop."""
        loop = asyncio.get_running_loop()

        def record(event: Event) -> None:
            watch.record(event)
            self.arrived.put_nowait((index, event))

        def notify(event: Event) -> None:
            # The loop may be closed already; the engine's thread must not fail then.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(record, event)

        return notify
