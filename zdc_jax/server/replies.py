"""Response bodies: OpenAI's completions and chats, whole or as streamed chunks."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic_core import to_json

from zdc_jax.conversation.tools.parser import CallDelta, ToolDelta
from zdc_jax.engine.request import EndReason, EngineRequest, Event
from zdc_jax.generation.detokenise import Detokeniser
from zdc_jax.loading import TextModel
from zdc_jax.server.answers import Answers
from zdc_jax.server.errors import RequestError
from zdc_jax.server.protocol import CompletionRequest, GenerationRequest
from zdc_jax.server.spelling import SpelledToken, Speller
from zdc_jax.server.tools import ToolOutput, format_call_delta, format_calls

MIN_LOGPROB = -9999.0
"""Smallest log-probability sent, as in vLLM: JSON has no infinity."""


@dataclass(kw_only=True)
class AnswerPart:
    """Part of an answer.

    Attributes:
      text: text of the part.
      calls: parts of tool calls.
      logprobs: its tokens with log-probabilities, if requested.
      finish_reason: reason why the answer ended; None while it continues.
      first: whether nothing of the answer was shown before.
    """

    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    logprobs: list[SpelledToken] = field(default_factory=list)
    finish_reason: EndReason | None = None
    first: bool = True

    @property
    def has_content(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.text or self.calls or self.logprobs or self.finish_reason)


@dataclass(kw_only=True)
class Answer(AnswerPart):
    """Answer to one engine request so far.

    Attributes:
      speller: speller of its tokens.
      tools: reader of its tool calls; None without tools.
      tokens: number of generated tokens.
      cached_tokens: prompt tokens reused from earlier requests.
      shown: characters of the text in earlier parts.
    """

    speller: Speller
    tools: ToolOutput | None = None
    tokens: int = 0
    cached_tokens: int = 0
    shown: int = 0

    def add(self, event: Event) -> AnswerPart:
        """Add an event and return what is new."""
        spelled = self.speller.spell_prompt(event.prompt_logprobs)
        spelled += self.speller.spell_answer(event.logprobs)
        new = ToolDelta(event.text or "") if self.tools is None else self.tools.read(event)
        self.text += new.content
        self.calls += new.calls
        self.logprobs += spelled
        self.tokens += len(event.tokens)
        self.finish_reason = event.finish_reason
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        part = AnswerPart(
            text=self.text[self.shown :],
            calls=list(new.calls),
            logprobs=spelled,
            finish_reason=event.finish_reason,
            first=self.first,
        )
        self.shown = len(self.text)
        self.first = self.first and not part.has_content
        return part


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
        self, name: str, model: TextModel, body: GenerationRequest, requests: Sequence[EngineRequest]
    ):
        self._name, self._body, self._requests = name, body, requests
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self._answers = [
            Answer(speller=Speller(model.tokenizer, request), tools=body.make_tool_output(model))
            for request in requests
        ]

    def add(self, index: int, event: Event) -> AnswerPart:
        """Add an event of one of the engine requests, and return what is new."""
        return self._answers[index].add(event)

    def whole(self) -> dict[str, Any]:
        """Return the body of the complete response."""
        choices = [self._format_choice(index, answer) for index, answer in enumerate(self._answers)]
        return self._format_header(self.whole_kind) | {"choices": choices, "usage": self._count_tokens()}

    async def stream(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yield server-sent events.

        The status has been sent before, so an error is an event, too, followed by the final `[DONE]`.
        """
        header, counts = self._format_header(self.chunk_kind), self._body.stream_options.include_usage
        if counts:
            header["usage"] = None
        try:
            async for index, event in answers.events():
                part = self.add(index, event)
                if part.has_content:
                    yield format_event(header | {"choices": [self._format_chunk_choice(index, part)]})
            if counts:
                yield format_event(header | {"choices": [], "usage": self._count_tokens()})
        except RequestError as error:
            yield format_event(error.body)
        yield b"data: [DONE]\n\n"

    def _count_tokens(self) -> dict[str, Any]:
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

    def _format_header(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._name}

    @abstractmethod
    def _format_choice(self, index: int, part: AnswerPart) -> dict[str, Any]:
        """Format a complete answer."""

    @abstractmethod
    def _format_chunk_choice(self, index: int, part: AnswerPart) -> dict[str, Any]:
        """Format a part of an answer."""


class CompletionReply(Reply):
    """Response of /v1/completions."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, name: str, model: TextModel, body: CompletionRequest, requests: Sequence[EngineRequest]
    ):
        super().__init__(name, model, body, requests)
        self._echoes_only = body.echoes_only
        for index, answer in enumerate(self._answers if body.echo else ()):
            answer.text = _write_prompt(model, body.prompts[index // body.n])
            answer.speller = Speller(model.tokenizer, requests[index], answer.text)

    def add(self, index: int, event: Event) -> AnswerPart:
        """Add an event; drop the generated token of a request for the prompt alone."""
        if self._echoes_only:
            reason = event.finish_reason and "length"
            event = replace(event, tokens=(), text="", logprobs=(), finish_reason=reason)
        return super().add(index, event)

    def _format_choice(self, index: int, part: AnswerPart) -> dict[str, Any]:
        return {
            "index": index,
            "text": part.text,
            "logprobs": self._format_logprobs(part) if part.logprobs else None,
            "finish_reason": part.finish_reason,
        }

    _format_chunk_choice = _format_choice

    def _format_logprobs(self, part: AnswerPart) -> dict[str, Any]:
        return {
            "tokens": [_show_apart(each.data) for each in part.logprobs],
            "token_logprobs": [each.logprob and _make_finite(each.logprob) for each in part.logprobs],
            "top_logprobs": [self._format_top(each) for each in part.logprobs],
            "text_offset": [each.offset for each in part.logprobs],
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

    def _format_choice(self, index: int, part: AnswerPart) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.text}
        if part.calls:
            message |= {"content": part.text or None, "tool_calls": format_calls(part.calls)}
        return self._wrap_message(index, part, "message", message)

    def _format_chunk_choice(self, index: int, part: AnswerPart) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"} if part.first else {}
        if self._answers[index].tools is None:
            message["content"] = part.text
        elif part.text or part.first:
            message["content"] = part.text or None
        if part.calls:
            message["tool_calls"] = [format_call_delta(call) for call in part.calls]
        return self._wrap_message(index, part, "delta", message)

    def _wrap_message(
        self, index: int, part: AnswerPart, key: str, message: dict[str, Any]
    ) -> dict[str, Any]:
        reason: str | None = part.finish_reason
        if reason == "stop" and self._answers[index].calls:
            reason = "tool_calls"
        content = [self._format_logprobs(each) for each in part.logprobs]
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


def _write_prompt(model: TextModel, prompt: str | list[int]) -> str:
    """Return the text of a prompt, without a last character that the answer may finish."""
    if isinstance(prompt, str):
        return prompt
    return "" if model.tokenizer is None else Detokeniser(model.tokenizer).feed(prompt)


def format_event(content: Any, name: str = "") -> bytes:
    """Format a server-sent event with JSON content, and with a name if there is one."""
    start = b"event: " + name.encode() + b"\n" if name else b""
    return start + b"data: " + to_json(content) + b"\n\n"
