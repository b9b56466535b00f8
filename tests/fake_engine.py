"""A serving engine without a network, which spells the same answer for all requests."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from types import SimpleNamespace

from chat_templates import CHATML
from conftest import LLAMA
from tiny_tokenizers import chat_tokenizer

from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.engine.checks import resolve_stop_ids
from zdc_jax.engine.request import Busy, EngineRequest, EngineStats, Event, TokenLogprobs
from zdc_jax.errors import PromptError
from zdc_jax.generation.stopping import OutputSequence, StopStrings

ANSWER = "in the end it is"
END = 1
"""The token that ends a turn. It follows each answer and does not end the model's own text."""
FAILS, HANGS = "!", "?"
"""Ends of completion prompts that fail after a token, or wait until they are cancelled."""
CACHED = 3
TOKENIZER = chat_tokenizer()
"""One tokenizer for all models, since each that compiles grammars starts a process."""


def chat_model(**changes: object) -> SimpleNamespace:
    """Return the parts of a model that a server needs."""
    special = {"eos_token": "<|im_end|>"}
    model = {"tokenizer": TOKENIZER, "chat_template": ChatTemplate(CHATML, special), "config": LLAMA}
    return SimpleNamespace(**model | changes)


@dataclass
class FakeTicket:
    """A ticket that only records its cancellation."""

    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


class FakeEngine:
    """A fake `Serving` with a thread per request; `submitted` and `tickets` list accepted requests."""

    def __init__(
        self,
        model: SimpleNamespace | None = None,
        room: int = 100,
        answer: str = ANSWER,
        max_model_len: int = 200,
    ):
        """Start without requests.

        room: most requests at a time.
        """
        self.model, self.max_model_len = model or chat_model(), max_model_len
        self._spelled = answer
        self.submitted: list[EngineRequest] = []
        self.tickets: list[FakeTicket] = []
        self.max_requests = 128
        self._room, self._running, self._closed = room, 0, False
        self._lock, self._pool = threading.Lock(), ThreadPoolExecutor(32)

    def submit(self, request: EngineRequest, notify: Callable[[Event], None]) -> FakeTicket:
        if len(request.prompt) + request.max_tokens > self.max_model_len:
            raise PromptError(f"more than {self.max_model_len} tokens")
        with self._lock:
            if self._closed or self._running >= self._room:
                raise Busy("the queue is full")
            self._running += 1
        ticket = FakeTicket()
        self.submitted.append(request)
        self.tickets.append(ticket)
        self._pool.submit(self._answer, request, ticket, notify)
        return ticket

    @property
    def closing(self) -> bool:
        return self._closed

    def stats(self) -> EngineStats:
        return EngineStats(self._running, 4, 0.5, 60, 70, 80, 90, 100, 110)

    def close(self, *, drain: bool, timeout: float) -> None:
        """Drain until the timeout, then cancel."""
        self._closed = True
        until = time.monotonic() + timeout * drain
        while self._running and time.monotonic() < until:
            time.sleep(0.01)
        for ticket in self.tickets:
            ticket.cancel()
        self._pool.shutdown()

    def spell_answer(self) -> list[int]:
        """Return the tokens of each answer, which repeat."""
        tokenizer = self.model.tokenizer
        return [5, 6] if tokenizer is None else tokenizer.encode(self._spelled).ids

    def _answer(self, request: EngineRequest, ticket: FakeTicket, notify: Callable[[Event], None]) -> None:
        try:
            last = self._spell(request, ticket, notify)
        finally:
            with self._lock:
                self._running -= 1
        notify(last)

    def _spell(self, request: EngineRequest, ticket: FakeTicket, notify: Callable[[Event], None]) -> Event:
        """Notify about all events except the last, which is returned."""
        tokenizer = self.model.tokenizer
        asked = "" if tokenizer is None else tokenizer.decode(request.prompt)
        stop_ids = resolve_stop_ids(self.model, request)
        before = () if request.new_text else request.prompt
        row = OutputSequence(0, tokenizer, stop_ids, StopStrings(request.stop), before=before)
        answer = self.spell_answer()
        row.append(request.generated, full=False)
        spelled = islice(cycle([*answer, END]), len(request.generated), None)
        of_prompt = prompt_logprobs(request)
        for count, token in enumerate(spelled, len(request.generated) + 1):
            delta = row.append([token], full=count == request.max_tokens)
            event = Event((token,), cached_tokens=CACHED, logprobs=logprobs(request, token))
            event, of_prompt = replace(event, prompt_logprobs=of_prompt), ()
            if delta is not None:
                event = replace(event, text=delta.text, finish_reason=delta.finish_reason)
            if event.finish_reason is not None:
                return event
            notify(event)
            if asked.endswith(FAILS):
                return Event(finish_reason="error", error="the device is lost")
            if asked.endswith(HANGS) and not ticket.cancelled.wait(10):
                return Event(finish_reason="error", error="the request was not cancelled")
            if ticket.cancelled.is_set():
                return Event(finish_reason="cancelled")
        raise AssertionError("a cycle has no end")


def prompt_logprobs(request: EngineRequest) -> tuple[TokenLogprobs, ...]:
    """Return a logprob for each token of the prompt; the first token has None."""
    if not request.prompt_logprobs:
        return ()
    first, *others = request.prompt
    return TokenLogprobs(first, None, ()), *(one for token in others for one in logprobs(request, token))


def logprobs(request: EngineRequest, token: int) -> tuple[TokenLogprobs, ...]:
    """Return -0.5 for the chosen token, half less for each next token, and -inf for the last."""
    if request.logprobs is None:
        return ()
    others = [(token, -0.5), (9, -1.0), (10, -1.5), (11, -2.0), (12, float("-inf"))]
    return (TokenLogprobs(token, -0.5, tuple(others[: request.logprobs])),)
