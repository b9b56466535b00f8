"""A request under way: what of it is known on the host, and who is told."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from zdc_jax.axes import Array
from zdc_jax.engine.checks import stop_ids
from zdc_jax.engine.request import EngineRequest, Event, TokenLogprobs
from zdc_jax.engine.scheduler import Work
from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.generation.next_token import Choice, Scores, Token
from zdc_jax.generation.row_numbers import row_numbers
from zdc_jax.generation.sampling import request_keys
from zdc_jax.generation.stopping import OutputSequence, StopStrings
from zdc_jax.loading import TextModel

logger = logging.getLogger("zdc_jax")


class Job:
    """A request under way (`Ticket`): its work, its answer so far, and who is told.

    Raises:
      PromptError: its `generated` tokens end the answer, or cannot be decoded.
    """

    def __init__(
        self,
        model: TextModel,
        request: EngineRequest,
        notify: Callable[[Event], None],
        cancel: Callable[["Job"], None],
    ):
        self.request, self.notify, self._cancel = request, notify, cancel
        # Who gave the beginning of an answer told of the prompt, too.
        self._to_score = len(request.prompt) if request.prompt_logprobs and not request.generated else 0
        self._scores = [TokenLogprobs(token, None, ()) for token in request.prompt[: self._to_score][:1]]
        self.work = Work(request.prompt, request.max_tokens, request.priority, request.salt)
        self.work.output += request.generated
        self.work.anew = self._to_score > 0
        self.stop_ids = stop_ids(model, request)
        given = model.tokenizer, self.stop_ids, StopStrings(request.stop), request.min_tokens
        self.answer = OutputSequence(0, *given)
        self._go_on(request.generated)
        (key,) = request_keys([request.sampling], [np.asarray(request.prompt, np.int32)])
        self.numbers = row_numbers(
            len(request.prompt),
            request.max_tokens,
            self.stop_ids,
            request.sampling,
            key,
            min_tokens=request.min_tokens,
        )
        self.ended = self._told_of_prompt = False
        self.came, self.queued = time.monotonic(), 0.0

    @property
    def choice(self) -> Choice:
        """How its tokens must be chosen."""
        request = self.request
        if request.sampling.temperature > 0:
            return "any"
        return "greedy" if request.logprobs is None and not request.min_tokens else "scored"

    def cancel(self) -> None:
        """`Ticket.cancel`."""
        self._cancel(self)

    def tell(self, event: Event) -> None:
        """Hands an event on, and none after the last."""
        if self.ended:
            return
        self.ended = event.finish_reason is not None
        if not self._told_of_prompt:
            event = replace(event, prompt_logprobs=tuple(self._scores))
        self._told_of_prompt = True
        try:
            self.notify(replace(event, cached_tokens=self.work.cached, queued=self.queued))
        except Exception:
            logger.exception("who listens to a request failed")

    def _go_on(self, tokens: tuple[int, ...]) -> None:
        """Adds tokens that were told of elsewhere; raises `PromptError` where none can follow them."""
        with foreign_errors_as(PromptError, "the tokenizer cannot decode generated"):
            self.answer.append(tokens, full=len(tokens) >= self.work.max_tokens)
        if self.answer.finish_reason is not None:
            raise PromptError(f"generated: these {len(tokens)} tokens end the answer, so that none follows")

    def wants_scores(self, begin: int) -> bool:
        """Whether tokens behind those from position `begin` on are of the prompt, and asked for."""
        return begin + 1 < self._to_score

    def score(self, begin: int, end: int, scores: Scores) -> None:
        """Adds log-probabilities of the prompt's tokens behind those at positions `begin` to `end`.

        A text that is read again, after its pages went to another, brings some again.
        """
        behind = self._logprobs(self.request.prompt[begin + 1 : end + 1], *scores)
        self._scores += behind[len(self._scores) - begin - 1 :]

    def take(self, tokens: list[int], chosen: Token) -> bool:
        """Adds tokens and tells of them; whether the device knows, too, that they end the answer.

        chosen: arrays of a row; their log-probabilities are there if the request asked.
        """
        work = self.work
        work.output += tokens
        full = len(work.output) >= work.max_tokens
        with foreign_errors_as(PromptError, "the tokenizer cannot decode the answer"):
            delta = self.answer.append(tokens, full=full)
        if delta is not None:
            shown = self._logprobs(delta.tokens, *chosen[1:])
            self.tell(Event(delta.tokens, delta.text, delta.finish_reason, tuple(shown)))
        return full or (len(work.output) >= self.answer.min_tokens and tokens[-1] in self.stop_ids)

    def _logprobs(
        self,
        tokens: Sequence[int],
        logprob: Array | None,
        likeliest: Array | None,
        logprobs: Array | None,
    ) -> list[TokenLogprobs]:
        """Of as many tokens as there are numbers for, if the request asked."""
        if self.request.logprobs is None:
            return []
        assert logprob is not None, "they were asked for"
        assert likeliest is not None
        assert logprobs is not None
        given = zip(tokens, logprob.tolist(), likeliest.tolist(), logprobs.tolist(), strict=False)
        return [
            TokenLogprobs(token, value, tuple(zip(ids, values, strict=True))[: self.request.logprobs])
            for token, value, ids, values in given
        ]
