"""Response bodies: OpenAI's completions and chats, whole or as streamed chunks."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from zdc_jax.engine.request import EndReason, EngineRequest, Event
from zdc_jax.generation.detokenise import Detokeniser
from zdc_jax.loading import TextModel
from zdc_jax.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from zdc_jax.server.spelling import SpelledToken, Speller
from zdc_jax.server.tools import format_call_delta, format_calls

MIN_LOGPROB = -9999.0
"""Smallest log-probability sent, as in vLLM: JSON has no infinity."""


@dataclass
class Answer:
    """Answer to one engine request so far.

    Attributes:
      speller: speller of its tokens.
      text: text of the answer.
      tokens: number of generated tokens.
      logprobs: tokens of the prompt and the answer with log-probabilities, if requested.
      finish_reason: reason why the answer ended; None while it continues.
      cached_tokens: prompt tokens reused from earlier requests.
      shown: characters of the text that were streamed.
      begun: whether a chunk was streamed.
    """

    speller: Speller
    text: str = ""
    tokens: int = 0
    logprobs: list[SpelledToken] = field(default_factory=list)
    finish_reason: EndReason | None = None
    cached_tokens: int = 0
    shown: int = 0
    begun: bool = False

    def add(self, event: Event) -> list[SpelledToken]:
        """Add an event and return its tokens with log-probabilities."""
        spelled = self.speller.spell_prompt(event.prompt_logprobs)
        spelled += self.speller.spell_answer(event.logprobs)
        self.text += event.text or ""
        self.tokens += len(event.tokens)
        self.logprobs += spelled
        self.finish_reason = event.finish_reason
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        return spelled


@dataclass(frozen=True)
class AnswerDelta:
    """Part of an answer, or all of it.

    Attributes:
      text: text of the part.
      logprobs: its tokens with log-probabilities, if requested.
      finish_reason: reason why the answer ended; None while it continues.
      first: whether the part starts the answer.
    """

    text: str
    logprobs: Sequence[SpelledToken]
    finish_reason: EndReason | None
    first: bool = True


class Reply(ABC):
    """Builder of the response to one client request.

    Args:
      name: name of the model in the API.
      model: model, whose tokenizer decodes tokens.
      body: body of the client's request.
      requests: its engine requests, `body.n` for each prompt, in order.
    """

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self,
        name: str,
        model: TextModel,
        body: GenerationRequest,
        requests: Sequence[EngineRequest],
    ):
        self._name, self._tokenizer, self._body, self._requests = name, model.tokenizer, body, requests
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self._answers = [Answer(Speller(model.tokenizer, request)) for request in requests]

    def add(self, index: int, event: Event) -> None:
        """Add an event of one of the engine requests."""
        self._answers[index].add(self._adapt(event))

    def whole(self) -> dict[str, Any]:
        """Return the body of the complete response."""
        choices = [
            self._format_choice(index, AnswerDelta(answer.text, answer.logprobs, answer.finish_reason))
            for index, answer in enumerate(self._answers)
        ]
        return self._format_header(self.whole_kind) | {"choices": choices, "usage": self.usage()}

    def chunk(self, index: int, event: Event) -> dict[str, Any] | None:
        """Add an event, and return its streamed chunk, or None if it has nothing to show."""
        answer, event = self._answers[index], self._adapt(event)
        logprobs = answer.add(event)
        text = answer.text[answer.shown :]
        if not (text or logprobs or event.finish_reason):
            return None
        delta = AnswerDelta(text, logprobs, event.finish_reason, not answer.begun)
        answer.shown = len(answer.text)
        if (choice := self._format_chunk_choice(index, delta)) is None:
            return None
        answer.begun = True
        return self._format_header(self.chunk_kind) | {"choices": [choice]}

    def last_chunk(self) -> dict[str, Any]:
        """Return the last streamed chunk, with token counts."""
        return self._format_header(self.chunk_kind) | {"choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Count tokens so far; a prompt counts once, however many answers it has."""
        prompts = slice(None, None, self._body.n)
        prompt_tokens = sum(len(request.prompt) for request in self._requests[prompts])
        completion_tokens = sum(answer.tokens for answer in self._answers)
        cached_tokens = sum(answer.cached_tokens for answer in self._answers[prompts])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def _adapt(self, event: Event) -> Event:
        """Return the event as the client should see it."""
        return event

    def _format_header(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._name}

    @abstractmethod
    def _format_choice(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        """Format a complete answer."""

    @abstractmethod
    def _format_chunk_choice(self, index: int, delta: AnswerDelta) -> dict[str, Any] | None:
        """Format a part of an answer; None if it has nothing to show."""


class CompletionReply(Reply):
    """Response of /v1/completions."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def echo(self, body: CompletionRequest) -> None:
        """Start each answer with its prompt."""
        for index, answer in enumerate(self._answers):
            prompt = body.prompts[index // body.n]
            answer.text = prompt if isinstance(prompt, str) else self._decode(prompt)
            answer.speller = Speller(self._tokenizer, self._requests[index], answer.text)

    def _adapt(self, event: Event) -> Event:
        """Drop the generated token of a request for the prompt alone."""
        if not (isinstance(self._body, CompletionRequest) and self._body.echoes_only):
            return event
        return replace(event, tokens=(), text="", logprobs=(), finish_reason=event.finish_reason and "length")

    def _decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a prompt, without a last character that the answer may finish."""
        return "" if self._tokenizer is None else Detokeniser(self._tokenizer).feed(tokens)

    def _format_choice(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._format_logprobs(delta) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    _format_chunk_choice = _format_choice

    def _format_logprobs(self, delta: AnswerDelta) -> dict[str, Any]:
        return {
            "tokens": [_show_apart(each.data) for each in delta.logprobs],
            "token_logprobs": [each.logprob and _make_finite(each.logprob) for each in delta.logprobs],
            "top_logprobs": [self._format_top(each) for each in delta.logprobs],
            "text_offset": [each.offset for each in delta.logprobs],
        }

    def _format_top(self, token: SpelledToken) -> dict[str, float] | None:
        """Format the most likely tokens and the token itself.

        If several tokens have the same bytes, the most likely one is reported.
        """
        if token.logprob is None:
            return None
        ascending = sorted([*token.top, (token.data, token.logprob)], key=lambda pair: pair[1])
        likelier_last = {_show_apart(data): _make_finite(logprob) for data, logprob in ascending}
        return dict(reversed(likelier_last.items()))


class ChatReply(Reply):
    """Response of /v1/chat/completions."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, name: str, model: TextModel, body: ChatRequest, requests: Sequence[EngineRequest]):
        super().__init__(name, model, body, requests)
        outputs = [body.make_tool_output(model) for _ in requests]
        self._outputs = [output for output in outputs if output is not None]

    def _adapt(self, event: Event) -> Event:
        return replace(event, text=self._outputs[0].marks.insert(event)) if self._outputs else event

    def _format_choice(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text}
        if self._outputs:
            output = self._outputs[index].read(delta.text, final=True)
            message["content"] = output.content
            if output.calls:
                message |= {"content": output.content or None, "tool_calls": format_calls(output.calls)}
        return self._wrap_message(index, delta, "message", message)

    def _format_chunk_choice(self, index: int, delta: AnswerDelta) -> dict[str, Any] | None:
        message: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        if not self._outputs:
            return self._wrap_message(index, delta, "delta", message | {"content": delta.text})
        output = self._outputs[index].read(delta.text, final=delta.finish_reason is not None)
        if not (output.content or output.calls or delta.logprobs or delta.finish_reason):
            return None
        if output.content or delta.first:
            message["content"] = output.content or None
        if output.calls:
            message["tool_calls"] = [format_call_delta(call) for call in output.calls]
        return self._wrap_message(index, delta, "delta", message)

    def _wrap_message(
        self, index: int, delta: AnswerDelta, key: str, message: dict[str, Any]
    ) -> dict[str, Any]:
        reason: str | None = delta.finish_reason
        if reason == "stop" and self._outputs and self._outputs[index].called:
            reason = "tool_calls"
        content = [self._format_logprobs(each) for each in delta.logprobs]
        logprobs = {"content": content} if content else None
        return {"index": index, key: message, "logprobs": logprobs, "finish_reason": reason}

    def _format_logprobs(self, token: SpelledToken) -> dict[str, Any]:
        assert token.logprob is not None  # Chats report no log-probabilities of the prompt.
        top = [self._format_token(data, logprob) for data, logprob in token.top]
        return self._format_token(token.data, token.logprob) | {"top_logprobs": top}

    def _format_token(self, data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": _show(data), "logprob": _make_finite(logprob), "bytes": list(data)}


def _show(data: bytes) -> str:
    r"""Return the text of a token, with escapes such as `\xe2` for parts of characters, as OpenAI's API."""
    return data.decode(errors="backslashreplace")


def _show_apart(data: bytes) -> str:
    r"""Return the text of a token; parts of characters become `bytes:\xe2`, as in OpenAI's completions."""
    shown = _show(data)
    return shown if shown.encode() == data else f"bytes:{shown}"


def _make_finite(logprob: float) -> float:
    return max(MIN_LOGPROB, logprob)


def make_reply(
    body: GenerationRequest, name: str, model: TextModel, requests: Sequence[EngineRequest]
) -> Reply:
    """Return the builder of the response to a body; arguments are those of `Reply`."""
    if isinstance(body, ChatRequest):
        return ChatReply(name, model, body, requests)
    reply = CompletionReply(name, model, body, requests)
    if isinstance(body, CompletionRequest) and body.echo:
        reply.echo(body)
    return reply
