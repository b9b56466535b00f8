"""What clients ask: the bodies of requests, checked, and what they are for the engine.

Names and defaults are OpenAI's. `top_k`, `ignore_eos`, `min_tokens`, `stop_token_ids`, `priority`,
`cache_salt` and `chat_template_kwargs` are vLLM's. Fields that are not known here are ignored, for clients
send many. Those that would change the answer and are not supported are refused by name.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from zdc_jax.conversation.prompt import chat_prompt, chat_stop_tokens
from zdc_jax.engine.checks import check_length, resolve_stop_ids
from zdc_jax.engine.request import MAX_LOGPROBS, EngineRequest
from zdc_jax.generation.request import stop_strings, token_ids
from zdc_jax.generation.row_numbers import MAX_STOP_TOKENS
from zdc_jax.generation.sampling import SEEDS, Sampling
from zdc_jax.loading import TextModel
from zdc_jax.server.errors import RequestError, blaming

MOST_ANSWERS = 16
"""Answers to one prompt."""
MOST_STOP_STRINGS = 16
MOST_REQUESTS = 128
"""Prompts of one body, times their answers."""
COMPLETION_TOKENS = 16
"""Tokens of a completion where the client gives no limit."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "continue_final_message": (False,),
}
"""Fields that are not supported, and the values that ask for nothing, beside null."""

Token = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]


def _as_list(prompt: Any) -> Any:
    """One prompt as a list of one."""
    several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    return prompt if several else [prompt]


Prompts = Annotated[list[str | list[int]], Field(min_length=1), BeforeValidator(_as_list)]
"""Each a text or token ids."""


class Body(BaseModel):
    """A body of JSON; null stands for a field that is not there, and a number in quotes is none."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class ToModel(Body):
    """model: the one that is served, or none."""

    model: str | None = None


class StreamOptions(Body):
    """include_usage: a last piece of the stream counts tokens."""

    include_usage: bool = False


class Asked(ToModel, ABC):
    """What completions and chats have in common."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    n: int = Field(1, ge=1, le=MOST_ANSWERS)
    seed: int | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOP_STRINGS)] = Field(default_factory=list)
    stop_token_ids: list[Token] = Field(default_factory=list, max_length=MAX_STOP_TOKENS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    priority: int = 0
    cache_salt: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        for name in given.keys() & NEUTRAL.keys() if isinstance(given, dict) else ():
            if given[name] is not None and given[name] not in NEUTRAL[name]:
                raise RequestError(f"{name}={given[name]!r:.80} is not supported", param=name)
        return given

    @abstractmethod
    def engine_requests(self, model: TextModel, max_model_len: int) -> list[EngineRequest]:
        """`n` requests for each prompt, in order; their seeds follow each other.

        Raises:
          RequestError: fields that contradict each other, or that this model cannot serve; a prompt that is
            empty, too long, or cannot be encoded.
          ChatError: the model cannot chat, or its template refuses the messages.
        """

    @property
    def _limit(self) -> str:
        """The field that says how long an answer may be."""
        return "max_tokens"

    def _requests(
        self,
        prompts: Iterable[tuple[Sequence[int], int]],
        stop_tokens: Sequence[int],
        logprobs: int | None,
    ) -> list[EngineRequest]:
        """prompts: token ids, and how many to generate. stop_tokens: beside those the client names."""
        seed = secrets.randbelow(SEEDS) if self.seed is None else self.seed
        with blaming("temperature"):  # The other numbers have been checked.
            top_k = None if self.top_k < 1 else self.top_k
            samplings = [
                Sampling(self.temperature, top_k, self.top_p, (seed + i) % SEEDS) for i in range(self.n)
            ]
        stop_tokens = () if self.ignore_eos else stop_tokens
        requests = [
            EngineRequest(
                prompt=tuple(prompt),
                max_tokens=max_tokens,
                sampling=sampling,
                stop_tokens=tuple(dict.fromkeys([*stop_tokens, *self.stop_token_ids])),
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
                ignore_eos=self.ignore_eos,
                min_tokens=self.min_tokens,
                logprobs=logprobs,
                priority=self.priority,
                salt=self.cache_salt,
            )
            for prompt, max_tokens in prompts
            for sampling in samplings
        ]
        if any(self.min_tokens > request.max_tokens for request in requests):
            raise RequestError(f"min_tokens={self.min_tokens} exceeds {self._limit}", param="min_tokens")
        return requests

    def _check(self, requests: Sequence[EngineRequest], model: TextModel, max_model_len: int) -> None:
        """Raises `RequestError` where the engine would refuse one: it does not know the client's names."""
        limit = self._limit
        for request in requests:
            room = limit in self.model_fields_set and len(request.prompt) < max_model_len
            with blaming(limit if room else "prompt"):
                check_length(len(request.prompt), request.max_tokens, max_model_len, limit)
        with blaming("stop"):
            stop_strings(model, self.stop)
        vocab, param = model.config.vocab_size, "stop_token_ids"
        if bad := [token for token in self.stop_token_ids if token >= vocab]:
            raise RequestError(
                f"{param}: token id {bad[0]} lies outside the vocabulary 0…{vocab - 1}", param=param
            )
        if len(resolve_stop_ids(model, requests[0])) > MAX_STOP_TOKENS:
            message = f"{param}: at most {MAX_STOP_TOKENS} are allowed, the model's own among them"
            raise RequestError(message, param=param)


class CompletionRequest(Asked):
    """Body of /v1/completions."""

    prompt: Prompts
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if (asked := len(self.prompt) * self.n) > MOST_REQUESTS:
            raise RequestError(f"{asked} answers asked for, at most {MOST_REQUESTS}", param="prompt")
        return self

    def engine_requests(self, model: TextModel, max_model_len: int) -> list[EngineRequest]:
        """Prompts are encoded as `generate` does."""
        limit = self.max_tokens or COMPLETION_TOKENS
        with blaming("prompt"):
            prompts = [(token_ids(model, prompt).tolist(), limit) for prompt in self.prompt]
        requests = self._requests(prompts, (), self.logprobs)
        self._check(requests, model, max_model_len)
        scored = self.echo and self.logprobs is not None
        return [replace(request, prompt_logprobs=scored) for request in requests]


class TextPart(Body):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message; `developer` is what some clients call the system."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """As chat templates take it; parts of a text become lines."""
        parts = self.content
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Asked):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _top_of_some(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs", param="top_logprobs")
        return self

    @property
    def _limit(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def engine_requests(self, model: TextModel, max_model_len: int) -> list[EngineRequest]:
        """Without a limit, a reply may take all positions that the messages leave."""
        messages = [message.plain() for message in self.messages]
        with blaming("messages"):
            prompt = token_ids(model, chat_prompt(model, messages, self.chat_template_kwargs)).tolist()
        if (room := max_model_len - len(prompt)) < 1:
            raise RequestError(
                f"the messages take {len(prompt)} tokens, of {max_model_len} with the reply (max_model_len)",
                param="messages",
            )
        limit = self.max_completion_tokens or self.max_tokens or room
        logprobs = self.top_logprobs if self.logprobs else None
        requests = self._requests([(prompt, limit)], chat_stop_tokens(model), logprobs)
        self._check(requests, model, max_model_len)
        return requests


class TokenizeRequest(ToModel):
    """Body of /tokenize."""

    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(ToModel):
    """Body of /detokenize."""

    tokens: list[Token]
