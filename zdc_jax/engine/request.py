"""Interface of an engine: requests, events, statistics and the `Serving` protocol."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from zdc_jax.generation.next_token import MAX_LOGPROBS as MAX_LOGPROBS
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import TextModel

EndReason = Literal["stop", "length", "cancelled", "error"]
"""Reason why an answer ended.

`stop` means a stop token or stop string, `length` the token limit; `error` is explained by `Event.error`.
"""


@dataclass(frozen=True)
class EngineRequest:
    """Request to continue one prompt.

    Attributes:
      prompt: token ids of the prompt.
      max_tokens: most tokens to generate, at least 1.
      sampling: sampling parameters; default greedy.
      stop_tokens: ids that end the answer, in addition to the model's own unless `ignore_eos`.
      stop: strings that end the answer and are not part of its text.
      ignore_eos: do not stop at the model's end-of-sequence ids.
      min_tokens: fewest tokens of the answer. Until then stop tokens are not generated and stop strings do
        not end it.
      logprobs: number of alternatives of each token to report with log-probabilities, up to `MAX_LOGPROBS`;
        None for no log-probabilities at all.
      prompt_logprobs: report log-probabilities of the prompt's tokens, too. The prompt is then prefilled
        without the prefix cache.
      priority: requests with smaller numbers start first; equal ones start in order of arrival.
      salt: prefix-cache salt. Cached tokens are shared only between requests with the same salt.
      generated: first tokens of the answer, if another engine has already generated them. Only later tokens
        are reported, and they are those that one engine would have generated. Limits count all tokens.
      id: name of the request in logs.
      new_text: whether the answer is a text of its own, as a reply in a chat. By default its text continues
        the prompt; with SentencePiece it may begin with a space.
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
    id: str = "-"
    new_text: bool = False


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities of one token, before temperature is applied.

    Attributes:
      token: token id.
      logprob: its log-probability; None for the first token of a prompt.
      top: ids and log-probabilities of the most likely tokens at its position.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Event:
    """Part of an answer.

    Attributes:
      tokens: new token ids, including the stop token if one ended the answer.
      text: new text, without the stop token or stop string; None without a tokenizer.
      finish_reason: reason why the answer ended; None while it continues.
      logprobs: log-probabilities of `tokens`, if requested.
      prompt_logprobs: log-probabilities of the prompt, if requested; only in the first event.
      error: message of an `error` finish reason.
      cached_tokens: prompt tokens reused from earlier requests.
      queued: seconds that the request waited before its prefill started.
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
    """Handle of a submitted request."""

    def cancel(self) -> object:
        """Free the request's resources soon; its last event is `cancelled` unless it ended before."""


@dataclass(frozen=True)
class EngineStats:
    """Engine statistics. The first three are gauges, the others are counters since the start.

    Attributes:
      running: requests that are prefilled or decoded.
      waiting: requests in the queue.
      cache_usage: share of the cache in use, from 0 to 1.
      prompt_tokens: prompt tokens, with those of an answer that another engine began.
      generation_tokens: generated tokens, including those of a call after the end of an answer, and
        those from a token on that a grammar refused.
      prefix_queries: tokens looked up in the prefix cache.
      prefix_hits: tokens found in the prefix cache.
      preemptions: preempted requests.
      rewinds: answers that were prefilled again from the tokens before one that a grammar refused.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    rewinds: int = 0


class Busy(Exception):
    """The request queue is full; the client may retry later."""


class Closing(Busy):
    """The engine is closed or failed and accepts no further requests."""


class Serving(Protocol):
    """Engine as a server sees it."""

    @property
    def model(self) -> TextModel:
        """Model whose tokenizer and chat template the server uses."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""

    @property
    def max_requests(self) -> int:
        """Most running and waiting requests; an idle engine refuses further ones."""

    def submit(self, request: EngineRequest, notify: Callable[[Event], None]) -> Ticket:
        """Queue a request.

        Args:
          request: request to answer.
          notify: callback for its events, in order. It runs on a thread of the engine and must return
            quickly. Exactly one event has a finish reason, the last one.

        Raises:
          PromptError: the request is invalid; the message says why.
          Busy: the queue is full, or (as `Closing`) the engine accepts no requests.
        """

    @property
    def closing(self) -> bool:
        """Whether the engine accepts no further requests, because it was closed or failed."""

    def stats(self) -> EngineStats:
        """Return current statistics."""

    def close(self, *, drain: bool, timeout: float) -> None:
        """Stop accepting requests, then cancel all that remain.

        With `drain`, running and waiting requests first get up to `timeout` seconds to finish.
        """
