"""Asynchronous access to the engine requests of one client."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial

from zdc_jax.engine.request import EngineRequest, Event, Serving, Ticket
from zdc_jax.server.errors import RequestError
from zdc_jax.server.mailbox import Mailbox
from zdc_jax.server.metrics import Metrics, Stopwatch
from zdc_jax.server.middleware import request_id

IndexedEvent = tuple[int, Event]
"""Index of a request and one of its events."""


class Answers:
    """Engine requests of one client, with their events in one queue.

    All requests are submitted, or none if one is refused. Needs a running event loop. Raises the errors of
    `Serving.submit`.

    Args:
      engine: engine that answers the requests.
      requests: requests to submit.
      metrics: metrics of the server.
    """

    def __init__(self, engine: Serving, requests: Sequence[EngineRequest], metrics: Metrics):
        self._tickets: list[Ticket] = []
        self._arrived: asyncio.Queue[IndexedEvent] = asyncio.Queue()
        name = request_id.get()
        try:
            for index, request in enumerate(requests):
                if name is not None:
                    request = replace(request, id=name if len(requests) == 1 else f"{name}-{index}")
                notify = self._make_callback(index, Stopwatch(metrics, request))
                self._tickets.append(engine.submit(request, notify))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the requests that have not ended."""
        for ticket in self._tickets:
            ticket.cancel()

    async def events(self) -> AsyncIterator[IndexedEvent]:
        """Yield events as they arrive, until all requests have ended.

        Raises:
          RequestError: a request failed or was cancelled.
        """
        left = len(self._tickets)
        while left:
            index, event = await self._arrived.get()
            if event.finish_reason == "error":
                raise RequestError(event.error or "the engine failed", status=500)
            if event.finish_reason == "cancelled":
                raise RequestError("the request was cancelled", status=503)
            left -= event.finish_reason is not None
            yield index, event

    def _make_callback(self, index: int, watch: Stopwatch) -> Callable[[Event], None]:
        """Return a callback for the engine's thread that passes events to the event loop."""
        loop, mailbox = asyncio.get_running_loop(), Mailbox.of_running_loop()

        def record(event: Event) -> None:
            watch.record(event)
            self._arrived.put_nowait((index, event))

        return partial(mailbox.put, loop, record)
