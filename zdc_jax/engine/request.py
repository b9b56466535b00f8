"""What is asked of an engine, and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from zdc_jax.generation.next_token import MAX_LOGPROBS as MAX_LOGPROBS
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import TextModel

EndReason = Literal["stop", "length", "cancelled", "error"]
"""`stop`: at a stop token or string. `error`: `Event.error` says which."""


@dataclass(frozen=True)
class EngineRequest:
    """One prompt to be continued.

    prompt: token ids. max_tokens: to generate, at least 1. stop_tokens: that end it, beside the model's own
    unless `ignore_eos`; stop: strings that end it and are no part of its text. min_tokens: before so many
    neither ends it, and tokens that would are not generated. logprobs: so many alternatives of each token, up
    to `MOST_LOGPROBS`; None for no log-probabilities at all. prompt_logprobs: also those of the prompt's
    tokens; it is read anew, whatever others read. priority: requests of smaller numbers are begun first, then
    those that came first. salt: the cache of an earlier request serves this one only if both have the same.
    generated: tokens that the answer begins with, where another engine gave them: only what follows is told,
    and it is what one engine alone would have given behind them; limits count all.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    priority: int = 0
    salt: str = ""
    generated: tuple[int, ...] = ()


class TokenLogprobs(NamedTuple):
    """Of one token: its natural log-probability, before temperature, and those of the likeliest.

    A prompt's first token has none.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Event:
    """One piece of an answer: new tokens and text (None without a tokenizer), and why it ended (else None).

    tokens: with the stop token, if one ended it; text: without. logprobs: of the tokens, if asked for;
    prompt_logprobs: of the prompt's, if asked for, in the first event alone. cached_tokens: of the prompt,
    that were read for an earlier request. queued: seconds that it waited before any of its tokens were read.
    """

    tokens: tuple[int, ...] = ()
    text: str | None = None
    finish_reason: EndReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    cached_tokens: int = 0
    queued: float = 0.0


class Ticket(Protocol):
    """A request under way."""

    def cancel(self) -> None:
        """Frees what it holds, soon; a last event says `cancelled`, unless it ended before."""


@dataclass(frozen=True)
class EngineStats:
    """Of now: requests in steps, requests that wait, share of the cache's rows in use. Since the start:
    tokens of texts that requests came with, or came back with after a preemption, and generated ones; of the
    former those looked for and found in earlier requests' rows; preemptions.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


class Busy(Exception):
    """As many requests wait as may; come again later."""


class Closing(Busy):
    """The engine takes no more requests, and will not again."""


class Serving(Protocol):
    """What a server needs of an engine."""

    @property
    def model(self) -> TextModel:
        """What the server reads and writes texts with."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together, at most."""

    def submit(self, request: EngineRequest, notify: Callable[[Event], None]) -> Ticket:
        """Queues a request. `notify` gets its events in order, on a thread of the engine's: it must be quick.

        Exactly one event of each request has a finish reason, and it is the last.

        Raises:
          PromptError: the request cannot be served at all, and why.
          Busy: the queue is full; as `Closing`, the engine is.
        """

    @property
    def closing(self) -> bool:
        """Whether it takes no more requests: it was closed, or cannot go on."""

    def stats(self) -> EngineStats:
        """Numbers of now."""

    def close(self, *, drain: bool, timeout: float) -> None:
        """Takes no more requests. With `drain` waits for those under way, at most so many seconds. Then
        cancels what is left.
        """
