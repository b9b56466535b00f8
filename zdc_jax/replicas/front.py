"""Front of several replicas, which acts as one engine and resumes answers of lost replicas.

The front records the tokens that it has relayed of each answer. If a replica is lost, the request goes to
another one with these tokens (`EngineRequest.generated`), and the client sees only a pause. The fleet decides
which replica takes a request, and when a lost one is replaced.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from functools import partial
from typing import Protocol

from zdc_jax.engine.checks import check_request
from zdc_jax.engine.request import Busy, Closing, EngineRequest, EngineStats, Event, Serving
from zdc_jax.errors import PromptError
from zdc_jax.generation.guide import check_sampling
from zdc_jax.loading import TextModel

logger = logging.getLogger("zdc_jax")

MAX_LOST = 3
"""Most replicas that one request may lose, in case the request itself makes them fail."""
PAUSE = 0.1
"""Seconds before a request is sent to another replica, in which the fleet may notice the loss."""


class ReplicaLostError(Exception):
    """A replica died or failed before an answer had ended."""


class Fleet(Protocol):
    """Replicas of one model, any of which gives the same answer to a request."""

    def stream(self, request: EngineRequest) -> AsyncGenerator[Event, None]:
        """Yield the events of a request from one replica; wait while there is no replica.

        The last event has a finish reason. Closing the generator cancels the request at the replica.

        Raises:
          ReplicaLostError: the replica was lost.
        """

    def stats(self) -> Sequence[EngineStats]:
        """Return statistics of the live replicas; blocks, so it must not run on the event loop's thread."""


class Front:
    """Engine that relays requests to a fleet (`Serving`).

    It belongs to one event loop, except for `stats` and `close`.

    Args:
      model: model whose tokenizer and chat template the server uses.
      max_model_len: most tokens of a prompt and its answer together.
      fleet: replicas that answer requests.
      max_requests: most running and waiting requests; further ones are refused.
    """

    def __init__(self, model: TextModel, max_model_len: int, fleet: Fleet, max_requests: int):
        self.model, self.max_model_len, self.closing = model, max_model_len, False
        self._fleet, self.max_requests = fleet, max_requests
        self._tasks = set[asyncio.Task[None]]()

    def submit(self, request: EngineRequest, notify: Callable[[Event], None]) -> asyncio.Task[None]:
        """Forward a request (`Serving.submit`); `notify` is called on the event loop's thread.

        The ticket is the task that relays the events. It must be cancelled on the event loop's thread.
        """
        check_request(self.model, self.max_model_len, request)
        if self.closing:
            raise Closing("the server is closing and accepts no more requests")
        if len(self._tasks) >= self.max_requests:
            raise Busy(f"the queue is full ({self.max_requests} running or waiting requests); retry later")
        task = asyncio.create_task(self._relay(request, notify))
        self._tasks.add(task)
        task.add_done_callback(partial(self._finish, notify))
        return task

    def stats(self) -> EngineStats:
        """Return the sums of the live replicas' statistics; cache usage is a mean."""
        stats = self._fleet.stats()
        sums = {field.name: sum(getattr(each, field.name) for each in stats) for field in fields(EngineStats)}
        return EngineStats(**sums | {"cache_usage": sums["cache_usage"] / max(1, len(stats))})

    def close(self, *, drain: bool, timeout: float) -> None:
        """Close the front (`Serving.close`); must not run on the event loop's thread."""
        self.closing = True
        until = time.monotonic() + timeout * drain
        while self._tasks and time.monotonic() < until:
            time.sleep(0.05)
        for task in list(self._tasks):
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def _relay(self, request: EngineRequest, notify: Callable[[Event], None]) -> None:
        """Forward an answer from start to end, from as many replicas as it takes."""
        relayed: list[int] = []
        for lost in range(1, MAX_LOST + 1):
            try:
                rest = replace(request, generated=(*request.generated, *relayed))
                async with aclosing(self._fleet.stream(rest)) as events:
                    async for event in events:
                        relayed += event.tokens
                        notify(event)
                        if event.finish_reason is not None:
                            return
            except ReplicaLostError as error:
                logger.warning(
                    "request %s lost replica %d of at most %d after %d tokens: %s",
                    request.id,
                    lost,
                    MAX_LOST,
                    len(relayed),
                    error,
                )
            await asyncio.sleep(PAUSE)
        raise ReplicaLostError(f"the request lost {MAX_LOST} replicas")

    def _finish(self, notify: Callable[[Event], None], task: asyncio.Task[None]) -> None:
        """Send the last event of a request whose task was cancelled or failed."""
        self._tasks.remove(task)
        if task.cancelled():
            notify(Event(finish_reason="cancelled"))
        elif (error := task.exception()) is not None:
            logger.error("a request failed", exc_info=error)
            notify(Event(finish_reason="error", error=str(error)))


async def stream(engine: Serving, request: EngineRequest) -> AsyncGenerator[Event, None]:
    """Yield the events of a request; this is the replica's side of `Fleet.stream`.

    Closing the generator cancels the request.

    Raises:
      ReplicaLostError: the engine's queue is full, or the engine is closing or failed.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def notify(event: Event) -> None:
        loop.call_soon_threadsafe(arrived.put_nowait, event)

    try:
        if request.sampling.grammar is not None:  # Compiling takes up to a second.
            await asyncio.to_thread(check_sampling, engine.model, request.sampling)
        ticket = engine.submit(request, notify)
    except Busy as error:
        raise ReplicaLostError(str(error)) from error
    except PromptError as error:
        yield Event(finish_reason="error", error=str(error))
        return
    try:
        last = False
        while not last:
            event = await arrived.get()
            last = event.finish_reason is not None
            if event.finish_reason in ("error", "cancelled") and engine.closing:
                raise ReplicaLostError(event.error or "the engine closed")
            yield event
    finally:
        ticket.cancel()
