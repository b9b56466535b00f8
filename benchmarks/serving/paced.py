"""An engine that computes nothing, to measure its surroundings, and servers in processes."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from zdc_jax.engine.request import EngineRequest, EngineStats, Event, Serving
from zdc_jax.loading import TextModel
from zdc_jax.replicas.settings import ReplicaSettings
from zdc_jax.server.run import serve

TICK = 0.02
"""Seconds per token."""


class Paced:
    """An engine that gives a token every 20 ms and computes nothing (`Serving`)."""

    closing, max_requests = False, sys.maxsize

    def __init__(self, model: TextModel):
        self.model, self.max_model_len = model, 512
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def submit(self, request: EngineRequest, notify: Callable[[Event], None]) -> Any:
        """Return a future of the answer, which can be cancelled."""
        return asyncio.run_coroutine_threadsafe(self._answer(request, notify), self._loop)

    def stats(self) -> EngineStats:
        """Return empty statistics."""
        return EngineStats()

    def close(self, *, drain: bool, timeout: float) -> None:
        """Close the engine; its thread ends with the process."""

    async def _answer(self, request: EngineRequest, notify: Callable[[Event], None]) -> None:
        """Send tokens at multiples of the tick, so that all answers advance together as in a batch."""
        await asyncio.sleep(TICK)
        for left in reversed(range(request.max_tokens)):
            notify(Event((5,), "a", None if left else "length"))
            await asyncio.sleep(TICK - time.monotonic() % TICK)


class PacedSettings(ReplicaSettings):
    """Settings of replicas that compute nothing."""

    def new_engine(self) -> Serving:
        """Return a paced engine."""
        return Paced(self.text_side()[0])


def serve_alone(settings: PacedSettings, port: int) -> None:
    """Serve one engine in this process."""
    serve(settings.new_engine(), name=settings.name, port=port)


def serve_many(settings: ReplicaSettings, port: int) -> None:
    """Serve replicas in this process."""
    from zdc_jax.replicas.run import serve_replicas

    serve_replicas(settings, port=port)
