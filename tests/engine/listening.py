"""A small model for engines, and listeners to their answers."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from conftest import LLAMA, TinyModel

from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import EngineRequest, Event
from zdc_jax.loading import LanguageModel
from zdc_jax.plan import CompressionPlan

TWO_LAYERS = replace(LLAMA, layers=LLAMA.layers[:2])
"""A model of two layers, since each of an engine's programs compiles all layers."""
CONFIG = EngineConfig(max_sequences=3, max_model_len=160, page=16, chunk=32, decode_steps=4)


class Listener:
    """All events of one request, in order. The engine waits while `at_first` runs."""

    def __init__(self, at_first: Callable[[], object] = lambda: None) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()
        self.at_first = at_first

    def __call__(self, event: Event) -> None:
        assert not self.ended.is_set(), "nothing follows the last event"
        self.events.append(event)
        if event.finish_reason:
            self.ended_at = time.monotonic()
            self.ended.set()
        if len(self.events) == 1:
            self.at_first()

    def tokens(self) -> tuple[int, ...]:
        """Return the tokens of the whole answer, once it has ended."""
        assert self.ended.wait(600), "no end of the answer after 10 minutes"
        return tuple(token for event in self.events for token in event.tokens)

    @property
    def reason(self) -> str | None:
        return self.events[-1].finish_reason


def ask(engine: Engine, request: EngineRequest) -> Listener:
    listener = Listener()
    engine.submit(request, listener)
    return listener


def window_model(tiny: TinyModel) -> LanguageModel:
    """Return a model with a window and ranks."""
    plan = CompressionPlan.uniform(TWO_LAYERS, qk=16, v=16, sinks=2, window=16)
    return replace(tiny.model(plan, tiny.basis()), basis=None)  # The basis has a short context.
