"""Many replicas as one engine: an answer that a dying replica leaves off goes on at another.

The front keeps what it has told of each answer. When a replica is lost, the request goes to another with the
tokens that the answer has already (`EngineRequest.generated`), and the client sees a pause and no more. Which
replica takes a request, and when a lost one is replaced, is up to the fleet.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Protocol

from zdc_jax.engine.checks import check_request
from zdc_jax.engine.request import Busy, Closing, EngineRequest, EngineStats, Event, Serving
from zdc_jax.errors import PromptError
from zdc_jax.loading import TextModel

logger = logging.getLogger("zdc_jax")

MOST_LOST = 3
"""Replicas that one request may lose. It might be what they die of, and should not take all of them."""
PAUSE = 0.1
"""Seconds before a request that lost its replica goes to another; the fleet may need them to notice."""


class Lost(Exception):
    """A replica died, or cannot go on, before an answer had ended."""


class Fleet(Protocol):
    """Replicas of one model, any of which answers a request in the same way."""

    def stream(self, request: EngineRequest) -> AsyncGenerator[Event, None]:
        """The events of a request on one replica, the last with a finish reason; waits while none is there.

        Whoever closes it gives the request up, there too. Raises `Lost`.
        """

    def stats(self) -> Sequence[EngineStats]:
        """Of the replicas that live; not for the thread of the event loop, since it waits for them."""


@dataclass(frozen=True)
class Passage:
    """A request under way through the front (`Ticket`)."""

    task: asyncio.Task[None]

    def cancel(self) -> None:
        """`Ticket.cancel`; on the event loop's thread."""
        self.task.cancel()


class Front:
    """Serves by a fleet (`Serving`). To be used on one event loop, but for `stats` and `close`."""

    def __init__(self, model: TextModel, max_model_len: int, fleet: Fleet, room: int):
        """room: requests at once, running or waiting; more are told to come again."""
        self._model, self._max_model_len, self._fleet, self._room = model, max_model_len, fleet, room
        self._tasks: dict[asyncio.Task[None], asyncio.AbstractEventLoop] = {}
        self._closing = False

    @property
    def model(self) -> TextModel:
        """`Serving.model`."""
        return self._model

    @property
    def max_model_len(self) -> int:
        """`Serving.max_model_len`."""
        return self._max_model_len

    @property
    def closing(self) -> bool:
        """`Serving.closing`."""
        return self._closing

    def submit(self, request: EngineRequest, notify: Callable[[Event], None]) -> Passage:
        """`Serving.submit`; `notify` is called on the event loop's thread."""
        check_request(self.model, self.max_model_len, request)
        if self._closing:
            raise Closing("the server is closing")
        if len(self._tasks) >= self._room:
            raise Busy(f"{self._room} requests are under way or wait")
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._relay(request, notify))
        self._tasks[task] = loop
        task.add_done_callback(partial(self._ended, notify))
        return Passage(task)

    def stats(self) -> EngineStats:
        """`Serving.stats`: sums over the replicas that live, and of the cache's use the mean."""
        found = self._fleet.stats()
        sums = {field.name: sum(getattr(each, field.name) for each in found) for field in fields(EngineStats)}
        return EngineStats(**sums | {"cache_usage": sums["cache_usage"] / max(1, len(found))})

    def close(self, *, drain: bool, timeout: float) -> None:
        """`Serving.close`; on another thread than the event loop's."""
        self._closing = True
        until = time.monotonic() + timeout * drain
        while self._tasks and time.monotonic() < until:
            time.sleep(0.05)
        for task, loop in list(self._tasks.items()):
            loop.call_soon_threadsafe(task.cancel)

    async def _relay(self, request: EngineRequest, notify: Callable[[Event], None]) -> None:
        """Tells of an answer from its first token to its end, whichever replicas give it."""
        told: list[int] = []
        for lost in range(1, MOST_LOST + 1):
            try:
                rest = replace(request, generated=(*request.generated, *told))
                async with aclosing(self._fleet.stream(rest)) as events:
                    async for event in events:
                        told += event.tokens
                        notify(event)
                        if event.finish_reason is not None:
                            return
            except Lost as error:
                logger.warning("a request lost its replica after %d tokens (%d): %s", len(told), lost, error)
            await asyncio.sleep(PAUSE)
        raise Lost(f"the request lost {MOST_LOST} replicas")

    def _ended(self, notify: Callable[[Event], None], task: asyncio.Task[None]) -> None:
        """Whatever ends a task, its request has a last event."""
        del self._tasks[task]
        if task.cancelled():
            notify(Event(finish_reason="cancelled"))
        elif (error := task.exception()) is not None:
            logger.error("a request failed", exc_info=error)
            notify(Event(finish_reason="error", error=str(error)))


async def stream(engine: Serving, request: EngineRequest) -> AsyncGenerator[Event, None]:
    """A replica's side: the events of a request as they come.

    Whoever closes it cancels the request.

    Raises:
      Lost: the engine takes no more requests, or cannot go on.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def notify(event: Event) -> None:
        loop.call_soon_threadsafe(arrived.put_nowait, event)

    try:
        ticket = engine.submit(request, notify)
    except Busy as error:
        raise Lost(str(error)) from error
    except PromptError as error:
        yield Event(finish_reason="error", error=str(error))
        return
    try:
        last = False
        while not last:
            event = await arrived.get()
            last = event.finish_reason is not None
            if event.finish_reason in ("error", "cancelled") and engine.closing:
                raise Lost(event.error or "the engine closed")
            yield event
    finally:
        ticket.cancel()
