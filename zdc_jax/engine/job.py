"""A submitted request on the host: its scheduling state, its answer so far, and its listener."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from zdc_jax.engine.checks import resolve_stop_ids
from zdc_jax.engine.request import EngineRequest, Event, TokenLogprobs
from zdc_jax.engine.scheduler import Work
from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.generation.guide import Guide, make_mask
from zdc_jax.generation.next_token import Choice, Scores
from zdc_jax.generation.packed_parameters import pack_parameters
from zdc_jax.generation.sampling import request_keys
from zdc_jax.generation.shaping import SequenceShaping, count_tokens, token_biases
from zdc_jax.generation.stopping import OutputSequence, StopStrings
from zdc_jax.loading import TextModel

logger = logging.getLogger("zdc_jax")

MASKED_TOKENS = 8
"""Tokens that get masks after the first refusal of a grammar; four times as many after each further one."""


class Job:
    """A submitted request (`Ticket`).

    A grammar mostly allows what a model chooses. So its answer takes steps without masks if it can go back
    to the tokens before one that the grammar refuses (ours).

    Args:
      model: model that answers.
      request: the request.
      notify: callback for its events.
      cancel: function that cancels the job.
      can_go_back: whether the engine can prefill an answer again from a part of its tokens, quickly.

    Attributes:
      request: the request.
      notify: callback for its events.
      work: its state in the scheduler.
      stop_ids: token ids that end the answer.
      answer: tokens and text of the answer so far.
      numbers: packed parameters for the device (`pack_parameters`).
      guide: masks of its next tokens; None if they do not depend on the answer.
      must_go_back: whether the grammar refused a token that was chosen without a mask. Later tokens are
        ignored, until the engine has prefilled those before it again.
      ended: whether the last event was sent.
      arrival_time: time of submission, of `time.monotonic`.
      queued: seconds from submission to the start of prefill; 0 before.
      cached: prompt tokens found in shared pages when prefill started; 0 before.

    Raises:
      PromptError: no token may come first, or the request's `generated` tokens end the answer or cannot be
        decoded.
    """

    def __init__(
        self,
        model: TextModel,
        request: EngineRequest,
        notify: Callable[[Event], None],
        cancel: Callable[["Job"], None],
        *,
        can_go_back: bool = False,
    ):
        self.request, self.notify, self._cancel = request, notify, cancel
        # The engine that generated the first tokens has reported the prompt's log-probabilities.
        self._to_score = len(request.prompt) if request.prompt_logprobs and not request.generated else 0
        self._prompt_logprobs = [
            TokenLogprobs(token, None, ()) for token in request.prompt[: self._to_score][:1]
        ]
        self.work = Work(request.prompt, request.max_tokens, request.priority, request.salt)
        self.work.output += request.generated
        self.work.skips_cache = self._to_score > 0
        self.stop_ids = resolve_stop_ids(model, request)
        self.guide = Guide.of(model, request.sampling, self.stop_ids, request.min_tokens)
        self.answer = OutputSequence(
            index=0,
            tokenizer=model.tokenizer,
            stop_ids=self.stop_ids,
            stop=StopStrings(request.stop),
            before=() if request.new_text else request.prompt,
            min_tokens=request.min_tokens,
        )
        self._can_go_back = (
            can_go_back and request.sampling.can_choose_before_mask and not self.work.skips_cache
        )
        self.must_go_back = False
        if self.guide is not None and (request.sampling.allowed_token_ids or request.sampling.bad_words):
            self.guide.check()
        self._accepted = self._refusals = self._masked_until = 0
        self._refused: PromptError | None = None
        self._resume(request.generated)
        (key,) = request_keys([request.sampling], [np.asarray(request.prompt, np.int32)])
        self.numbers = pack_parameters(
            len(request.prompt),
            request.max_tokens,
            self.stop_ids,
            request.sampling,
            key,
            min_tokens=request.min_tokens,
        )
        self._model = model
        self.ended = self._prompt_reported = False
        self.arrival_time, self.queued, self.cached = time.monotonic(), 0.0, 0

    @property
    def choice(self) -> Choice:
        """Cheapest kind of program that can choose its tokens."""
        request = self.request
        if request.sampling.temperature > 0:
            return "any"
        return "greedy" if request.logprobs is None and not request.min_tokens else "scored"

    @property
    def is_shaped(self) -> bool:
        """Whether the logits are changed before the next token is chosen."""
        return self.request.sampling.is_shaped and (self.guide is None or self.needs_mask)

    @property
    def needs_mask(self) -> bool:
        """Whether the next token is chosen with a mask."""
        is_free = self._can_go_back and self._accepted >= self._masked_until
        return self.guide is not None and not is_free

    @property
    def next_guide(self) -> Guide | None:
        """Guide of the next token; None if there is none, or if no further token counts."""
        if self.guide is None or self.ended or self._refused is not None:
            return None
        if self.must_go_back or self.guide.is_complete:
            return None
        return self.guide

    def note_start(self) -> bool:
        """Note that prefill has started, and return whether it had not; after a preemption it had."""
        if self.queued:
            return False
        self.queued, self.cached = time.monotonic() - self.arrival_time, self.work.cached
        return True

    def first_shaping(self) -> SequenceShaping | None:
        """Return the changes of logits after the prompt and the answer so far."""
        if not self.request.sampling.is_shaped:
            return None
        vocab = self._model.config.vocab_size
        return SequenceShaping(
            counts=count_tokens(vocab, self.request.prompt, self.work.output),
            bias=token_biases(self._model, self.request.sampling),
            mask=make_mask([self.guide], vocab)[0],
        )

    def cancel(self) -> None:
        self._cancel(self)

    def end(self, reason: Literal["cancelled", "error"], error: str | None = None) -> None:
        """Send the last event to the listener, unless it was sent before."""
        self._emit(finish_reason=reason, error=error)

    def _emit(self, **fields: Any) -> None:
        """Send an event with these fields to the listener, unless the last event was sent before."""
        if self.ended:
            return
        self.ended = fields.get("finish_reason") is not None
        scores = () if self._prompt_reported else tuple(self._prompt_logprobs)
        self._prompt_reported = True
        event = Event(**fields, prompt_logprobs=scores, cached_tokens=self.cached, queued=self.queued)
        try:
            self.notify(event)
        except Exception:
            logger.exception("the event callback of request %s failed", self.request.id)

    def _resume(self, tokens: tuple[int, ...]) -> None:
        """Add tokens reported by another engine; raise `PromptError` if the answer ends with them."""
        if self.guide is not None:
            self.guide.accept(tokens)
            self._accepted = len(tokens)
        with foreign_errors_as(PromptError, "generated: the tokenizer cannot decode these tokens"):
            complete = self.guide is not None and self.guide.is_complete
            self.answer.append(tokens, full=len(tokens) >= self.work.max_tokens, complete=complete)
        if self.answer.finish_reason is not None:
            raise PromptError(
                f"generated: these {len(tokens)} tokens end the answer; nothing is left to generate"
            )

    def wants_scores(self, begin: int) -> bool:
        """Return whether to score the prompt tokens after position `begin`."""
        return begin + 1 < self._to_score

    def add_scores(self, begin: int, end: int, scores: Scores) -> None:
        """Add the scores of the prompt tokens that follow positions `begin` to `end`.

        A prompt that is prefilled again after a preemption yields some scores twice; the first ones are kept.
        """
        following = self._to_logprobs(self.request.prompt[begin + 1 : end + 1], scores)
        self._prompt_logprobs += following[len(self._prompt_logprobs) - begin - 1 :]

    def show_guide(self, tokens: Sequence[int]) -> None:
        """Show new tokens to the guide, which needs them for the next mask, before they are delivered.

        Tokens after a complete answer, or after one that the guide refuses, are ignored.
        """
        for token in tokens:
            if (guide := self.next_guide) is None:
                return
            try:
                allowed = guide.try_accept(token)
            except PromptError as error:
                self._refused = error
                return
            if allowed:
                self._accepted += 1
            elif self.needs_mask:
                self._refused = PromptError(f"the grammar refuses the token {token}")
            else:
                self.must_go_back = True
                self._masked_until = self._accepted + MASKED_TOKENS * 4**self._refusals
                self._refusals += 1

    def add_tokens(self, tokens: list[int], scores: Scores | None) -> bool:
        """Add new tokens and send an event.

        Args:
          tokens: new token ids. A guide has seen them (`show_guide`), and perhaps later ones.
          scores: their log-probabilities, if the request asked for them.

        Returns:
          Whether the device, too, knows that these tokens end the answer.

        Raises:
          PromptError: the guide refuses one of them, or the tokenizer cannot decode them.
        """
        work = self.work
        kept, complete = tokens, False
        if self.guide is not None:
            kept = tokens[: self._accepted - len(self.answer.tokens)]
            complete = self.guide.is_complete and len(self.answer.tokens) + len(kept) == self._accepted
        is_cut = len(kept) < len(tokens)
        work.output += kept if self.must_go_back else tokens
        full = len(work.output) >= work.max_tokens
        with foreign_errors_as(PromptError, "the tokenizer cannot decode the answer"):
            delta = self.answer.append(kept, full=full and not is_cut, complete=complete)
        if delta is not None:
            shown = self._to_logprobs(delta.tokens, scores)
            self._emit(
                tokens=delta.tokens,
                text=delta.text,
                finish_reason=delta.finish_reason,
                logprobs=tuple(shown),
            )
        if is_cut and self._refused is not None and not self.ended:
            raise self._refused
        if self.must_go_back:
            return False
        return full or (len(work.output) >= self.answer.min_tokens and tokens[-1] in self.stop_ids)

    def _to_logprobs(self, tokens: Sequence[int], scores: Scores | None) -> list[TokenLogprobs]:
        """Convert arrays to log-probabilities of the first tokens, if the request asked for them."""
        if self.request.logprobs is None:
            return []
        assert scores is not None, "the program computes no log-probabilities"
        columns = zip(tokens, *(part.tolist() for part in scores), strict=False)
        return [
            TokenLogprobs(token, value, tuple(zip(ids, values, strict=True))[: self.request.logprobs])
            for token, value, ids, values in columns
        ]
