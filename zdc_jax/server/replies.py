"""How answers are written: as OpenAI's completions and chats, whole or in pieces."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tokenizers import Tokenizer

from zdc_jax.engine.request import EndReason, EngineRequest, Event, TokenLogprobs
from zdc_jax.server.protocol import Asked, ChatRequest, CompletionRequest

LEAST_LOGPROB = -9999.0
"""JSON has no infinity; vLLM gives this too."""


@dataclass
class Answer:
    """What one engine request has given so far.

    shown: characters of the text that went out in pieces; begun: whether any piece did.
    """

    text: str = ""
    tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: EndReason | None = None
    cached_tokens: int = 0
    shown: int = 0
    begun: bool = False

    def take(self, event: Event) -> None:
        """Adds an event."""
        self.text += event.text or ""
        self.tokens += len(event.tokens)
        self.logprobs += [*event.prompt_logprobs, *event.logprobs]
        self.finish_reason = event.finish_reason
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)


@dataclass(frozen=True)
class AnswerDelta:
    """Part of an answer, or all of it. offset: characters of the answer before it; first: it begins one."""

    text: str
    logprobs: Sequence[TokenLogprobs]
    finish_reason: EndReason | None
    offset: int = 0
    first: bool = True


class Reply(ABC):
    """The answers to one request of a client; gathers events, and gives what is to be sent."""

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, name: str, tokenizer: Tokenizer | None, asked: Asked, requests: Sequence[EngineRequest]
    ):
        """name: of the model. requests: `asked.n` for each prompt, in order."""
        self._name, self._tokenizer, self._asked, self._requests = name, tokenizer, asked, requests
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self._answers = [Answer() for _ in requests]

    def take(self, index: int, event: Event) -> None:
        """Adds an event of one of the requests."""
        self._answers[index].take(event)

    def whole(self) -> dict[str, Any]:
        """The body of an answer that has ended."""
        choices = [
            self._choice(index, AnswerDelta(answer.text, answer.logprobs, answer.finish_reason))
            for index, answer in enumerate(self._answers)
        ]
        return self._head(self.whole_kind) | {"choices": choices, "usage": self.usage()}

    def chunk(self, index: int, event: Event) -> dict[str, Any] | None:
        """Adds an event, and gives what it brings; None where that is nothing to see."""
        answer = self._answers[index]
        answer.take(event)
        text, offset = answer.text[answer.shown :], answer.shown
        logprobs = [*event.prompt_logprobs, *event.logprobs]
        if not (text or logprobs or event.finish_reason):
            return None
        delta = AnswerDelta(text, logprobs, event.finish_reason, offset, not answer.begun)
        answer.shown, answer.begun = len(answer.text), True
        return self._head(self.chunk_kind) | {"choices": [self._chunk_choice(index, delta)]}

    def last_chunk(self) -> dict[str, Any]:
        """Counts tokens."""
        return self._head(self.chunk_kind) | {"choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once, however many answers it gets."""
        prompts = slice(None, None, self._asked.n)
        read = sum(len(request.prompt) for request in self._requests[prompts])
        written = sum(answer.tokens for answer in self._answers)
        cached = sum(answer.cached_tokens for answer in self._answers[prompts])
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._name}

    @abstractmethod
    def _choice(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        """An answer, whole."""

    @abstractmethod
    def _chunk_choice(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        """A piece of an answer."""

    def _token_text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.decode([token], skip_special_tokens=False)


class CompletionReply(Reply):
    """Answers of /v1/completions."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def echo(self, asked: CompletionRequest) -> None:
        """Lets each answer begin with its prompt."""
        for index, answer in enumerate(self._answers):
            prompt = asked.prompt[index // asked.n]
            answer.text = prompt if isinstance(prompt, str) else self._decoded(prompt)

    def _decoded(self, tokens: Sequence[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(tokens)

    def _choice(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        logprobs = self._logprobs(delta) if delta.logprobs else None
        return {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    _chunk_choice = _choice

    def _logprobs(self, delta: AnswerDelta) -> dict[str, Any]:
        texts = [self._token_text(one.token) for one in delta.logprobs]
        offsets = [delta.offset]
        for text in texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob and _finite(one.logprob) for one in delta.logprobs],
            "top_logprobs": [self._top(one) for one in delta.logprobs],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float] | None:
        """The likeliest, and the token itself. Of tokens with one text, the likelier counts."""
        if one.logprob is None:
            return None
        ranked = sorted([*one.top, (one.token, one.logprob)], key=lambda pair: pair[1])
        likelier_last = {self._token_text(token): _finite(logprob) for token, logprob in ranked}
        return dict(reversed(likelier_last.items()))


class ChatReply(Reply):
    """Answers of /v1/chat/completions."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text}
        return self._around(index, delta, "message", message)

    def _chunk_choice(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        message = {"role": "assistant"} if delta.first else {}
        return self._around(index, delta, "delta", message | {"content": delta.text})

    def _around(self, index: int, delta: AnswerDelta, key: str, message: dict[str, str]) -> dict[str, Any]:
        logprobs = {"content": [self._logprobs(one) for one in delta.logprobs]} if delta.logprobs else None
        return {"index": index, key: message, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _logprobs(self, one: TokenLogprobs) -> dict[str, Any]:
        assert one.logprob is not None  # Chats tell nothing of prompts.
        top = [self._likely(token, logprob) for token, logprob in one.top]
        return self._likely(one.token, one.logprob) | {"top_logprobs": top}

    def _likely(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)


def reply_to(
    asked: Asked, name: str, tokenizer: Tokenizer | None, requests: Sequence[EngineRequest]
) -> Reply:
    """The reply that a body asks for; arguments as `Reply` takes them."""
    if isinstance(asked, ChatRequest):
        return ChatReply(name, tokenizer, asked, requests)
    reply = CompletionReply(name, tokenizer, asked, requests)
    if isinstance(asked, CompletionRequest) and asked.echo:
        reply.echo(asked)
    return reply
