"""An engine that computes nothing, so that what is around it can be measured; and servers in processes."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from zdc_jax.engine.request import EngineRequest, EngineStats, Event, Serving
from zdc_jax.loading import TextModel
from zdc_jax.replicas.settings import ReplicaSettings
from zdc_jax.server.run import serve

TICK = 0.02
"""Seconds to a token."""


class Paced:
    """Gives a token each 20 ms and computes nothing (`Serving`)."""

    closing = False

    def __init__(self, model: TextModel):
        self.model, self.max_model_len = model, 512
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def submit(self, request: EngineRequest, notify: Callable[[Event], None]) -> Any:
        """A future, which can be cancelled."""
        return asyncio.run_coroutine_threadsafe(self._answer(request, notify), self._loop)

    def stats(self) -> EngineStats:
        """Nothing to tell."""
        return EngineStats()

    def close(self, *, drain: bool, timeout: float) -> None:
        """Leaves its thread to the end of the process."""

    async def _answer(self, request: EngineRequest, notify: Callable[[Event], None]) -> None:
        """All answers have their tokens at the same times, as those of a batch do."""
        await asyncio.sleep(TICK)
        for left in reversed(range(request.max_tokens)):
            notify(Event((5,), "a", None if left else "length"))
            await asyncio.sleep(TICK - time.monotonic() % TICK)


class PacedSettings(ReplicaSettings):
    """Replicas that compute nothing."""

    def new_engine(self) -> Serving:
        """One of them."""
        return Paced(self.text_side()[0])


def serve_alone(settings: PacedSettings, port: int) -> None:
    """In a process of its own."""
    serve(settings.new_engine(), name=settings.name, port=port)


def serve_many(settings: ReplicaSettings, port: int) -> None:
    """In a process of its own."""
    from zdc_jax.replicas.run import serve_replicas

    serve_replicas(settings, port=port)
