"""Bodies of client requests: their validation, and their conversion to engine requests.

Names and defaults are OpenAI's. `top_k`, `min_p`, `repetition_penalty`, `allowed_token_ids`, `bad_words`,
`ignore_eos`, `min_tokens`, `stop_token_ids`, `priority`, `cache_salt` and `chat_template_kwargs` are vLLM's.
Unknown fields are ignored, since clients send many. Unsupported fields that would change the answer are
refused by name.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from zdc_jax.conversation.prompt import chat_prompt, chat_stop_tokens
from zdc_jax.engine.checks import check_length, resolve_stop_ids
from zdc_jax.engine.request import MAX_LOGPROBS, EngineRequest
from zdc_jax.generation.request import stop_strings, token_ids
from zdc_jax.generation.row_numbers import MAX_STOP_TOKENS
from zdc_jax.generation.sampling import MAX_BIAS, MAX_PENALTY, REPETITION_PENALTIES, SEEDS, Sampling
from zdc_jax.generation.shaping import token_biases
from zdc_jax.loading import TextModel
from zdc_jax.server.body import Body, ModelRequest
from zdc_jax.server.errors import RequestError, report_errors_of
from zdc_jax.server.structured import StructuredRequest

MAX_ANSWERS = 16
"""Most answers to one prompt (`n`)."""
MAX_STOP_STRINGS = 16
MAX_REQUESTS = 128
"""Most prompts of one body, times `n`."""
COMPLETION_TOKENS = 16
"""Default `max_tokens` of a completion."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "continue_final_message": (False,),
}
"""Unsupported fields, with the values that are accepted because they have no effect; null always is."""

Token = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Word = Annotated[str, Field(pattern=r"\S")]
"""Text that is not blank."""


def _read_token_ids(biases: Any) -> Any:
    """Convert the keys of a JSON object to token ids, as far as they are whole numbers."""
    if not isinstance(biases, dict):
        return biases
    return {int(key) if key.isdecimal() else key: bias for key, bias in biases.items()}


Biases = Annotated[
    dict[Token, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]], BeforeValidator(_read_token_ids)
]
"""Numbers by token id."""


def _wrap_prompt(prompt: Any) -> Any:
    """Wrap a single prompt in a list."""
    is_list = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    return prompt if is_list else [prompt]


Prompts = Annotated[list[str | list[int]], Field(min_length=1), BeforeValidator(_wrap_prompt)]
"""Prompts, each a text or token ids."""


class StreamOptions(Body):
    """Options of a streamed answer.

    Attributes:
      include_usage: send a last chunk with token counts.
    """

    include_usage: bool = False


class GenerationRequest(StructuredRequest, ABC):
    """Common fields of completions and chats.

    Attributes:
      max_tokens: most tokens of an answer.
      temperature: softmax temperature; 0 is greedy decoding.
      top_p: probability of the set of most likely tokens to sample from.
      top_k: number of most likely tokens to sample from; 0 or -1 for all.
      min_p: smallest share of the largest probability that a token must have.
      presence_penalty: subtracted from logits of generated tokens.
      frequency_penalty: subtracted from a token's logit for each time it was generated.
      repetition_penalty: divisor of positive logits, and factor of others, of tokens in prompt or answer.
      logit_bias: numbers to add to logits, by token id.
      allowed_token_ids: the only tokens that may be generated; null for all.
      bad_words: words that are not generated.
      n: answers to each prompt.
      seed: seed of the first answer; the others use consecutive seeds. Null for a random seed.
      stop: string or strings that end an answer.
      stop_token_ids: token ids that end an answer.
      ignore_eos: do not stop at the model's end-of-sequence ids.
      min_tokens: fewest tokens before an answer may end.
      priority: requests with smaller numbers start first.
      cache_salt: prefix-cache salt; cached tokens are shared only between requests with the same salt.
      stream: send the answer as server-sent events.
      stream_options: options of the stream.
    """

    max_tokens: int | None = Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    repetition_penalty: float = Field(1.0, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    logit_bias: Biases = Field(default_factory=dict)
    allowed_token_ids: list[Token] | None = Field(None, min_length=1)
    bad_words: list[Word] = Field(default_factory=list)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    seed: int | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS)] = Field(default_factory=list)
    stop_token_ids: list[Token] = Field(default_factory=list, max_length=MAX_STOP_TOKENS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    priority: int = 0
    cache_salt: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        for name in body.keys() & UNSUPPORTED.keys() if isinstance(body, dict) else ():
            if body[name] is not None and body[name] not in UNSUPPORTED[name]:
                raise RequestError(f"{name}={body[name]!r:.80} is not supported; leave it out", param=name)
        return body

    @abstractmethod
    def engine_requests(self, model: TextModel, max_model_len: int) -> list[EngineRequest]:
        """Return `n` engine requests for each prompt, in order, with consecutive seeds.

        Args:
          model: model that serves the requests.
          max_model_len: most tokens of a prompt and its answer together.

        Raises:
          RequestError: fields contradict each other or do not suit the model, or a prompt is empty, too long
            or cannot be encoded.
          ChatError: the model has no chat template, or the template refuses the messages.
        """

    @property
    def _limit_field(self) -> str:
        """Name of the field that limits the answer's tokens."""
        return "max_tokens"

    def _build_requests(
        self,
        prompts: Iterable[tuple[Sequence[int], int]],
        stop_tokens: Sequence[int],
        logprobs: int | None,
    ) -> list[EngineRequest]:
        """Return `n` engine requests for each prompt.

        Args:
          prompts: token ids of each prompt, and most tokens to generate.
          stop_tokens: stop tokens in addition to the client's.
          logprobs: number of alternatives of each token, or None.
        """
        seed = secrets.randbelow(SEEDS) if self.seed is None else self.seed
        _, grammar = self.read_grammar()
        with report_errors_of("temperature"):  # The other parameters have been checked.
            sampling = Sampling(
                temperature=self.temperature,
                top_k=None if self.top_k < 1 else self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self.logit_bias,
                allowed_token_ids=self.allowed_token_ids,
                bad_words=self.bad_words,
                grammar=grammar,
            )
            samplings = [replace(sampling, seed=(seed + i) % SEEDS) for i in range(self.n)]
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
        shortest = min(request.max_tokens for request in requests)
        if self.min_tokens > shortest:
            message = f"min_tokens={self.min_tokens} must be at most {self._limit_field}={shortest}"
            raise RequestError(message, param="min_tokens")
        return requests

    def _check_requests(
        self, requests: Sequence[EngineRequest], model: TextModel, max_model_len: int
    ) -> None:
        """Raise `RequestError` if the engine would refuse a request.

        The engine's own errors would not use the names of the client's fields.
        """
        limit = self._limit_field
        for request in requests:
            limit_is_cause = limit in self.model_fields_set and len(request.prompt) < max_model_len
            with report_errors_of(limit if limit_is_cause else "prompt"):
                check_length(len(request.prompt), request.max_tokens, max_model_len, limit)
        with report_errors_of("stop"):
            stop_strings(model, self.stop)
        sampling = requests[0].sampling
        for name in ("logit_bias", "allowed_token_ids", "bad_words"):
            with report_errors_of(name):
                token_biases(model, Sampling(**{name: getattr(sampling, name)}))
        with report_errors_of("bad_words"):
            token_biases(model, sampling)
        self.check_grammar(model)
        vocab, param = model.config.vocab_size, "stop_token_ids"
        if bad := [token for token in self.stop_token_ids if token >= vocab]:
            raise RequestError(
                f"{param}: token id {bad[0]} lies outside the vocabulary 0…{vocab - 1}", param=param
            )
        if (count := len(resolve_stop_ids(model, requests[0]))) > MAX_STOP_TOKENS:
            message = (
                f"{param} has {count} ids including the model's own; at most {MAX_STOP_TOKENS} are allowed"
            )
            raise RequestError(message, param=param)


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions.

    Attributes:
      prompt: one prompt or several, each a text or token ids.
      echo: start each answer with its prompt.
      logprobs: number of alternatives of each token; None for no log-probabilities.
    """

    prompt: Prompts
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_count(self) -> Self:
        if len(self.prompt) * self.n > MAX_REQUESTS:
            message = (
                f"{len(self.prompt)} prompts with n={self.n}; at most {MAX_REQUESTS} answers are allowed"
            )
            raise RequestError(message, param="prompt")
        return self

    def engine_requests(self, model: TextModel, max_model_len: int) -> list[EngineRequest]:
        limit = self.max_tokens or COMPLETION_TOKENS
        with report_errors_of("prompt"):
            prompts = [(token_ids(model, prompt).tolist(), limit) for prompt in self.prompt]
        requests = self._build_requests(prompts, (), self.logprobs)
        self._check_requests(requests, model, max_model_len)
        scored = self.echo and self.logprobs is not None
        return [replace(request, prompt_logprobs=scored) for request in requests]


class TextPart(Body):
    """Part of a message's text."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """Message of a chat.

    Attributes:
      role: author of the message; `developer` means `system`.
      content: text, or a list of text parts.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def to_template(self) -> dict[str, str]:
        """Convert to the format of chat templates, with one line for each text part."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions.

    Without a token limit, a reply may take all positions that the messages leave.

    Attributes:
      messages: messages, oldest first.
      max_completion_tokens: most tokens of a reply; takes precedence over `max_tokens`.
      logprobs: report log-probabilities of the reply's tokens.
      top_logprobs: number of alternatives of each token.
      chat_template_kwargs: further variables of the chat template.
    """

    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs={self.top_logprobs} needs logprobs=true"
            raise RequestError(message, param="top_logprobs")
        return self

    @property
    def _limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def engine_requests(self, model: TextModel, max_model_len: int) -> list[EngineRequest]:
        messages = [message.to_template() for message in self.messages]
        with report_errors_of("messages"):
            prompt = token_ids(model, chat_prompt(model, messages, self.chat_template_kwargs)).tolist()
        if (room := max_model_len - len(prompt)) < 1:
            raise RequestError(
                f"messages: {len(prompt)} tokens leave no room for a reply within {max_model_len=}; "
                "shorten the messages",
                param="messages",
            )
        limit = self.max_completion_tokens or self.max_tokens or room
        logprobs = self.top_logprobs if self.logprobs else None
        requests = self._build_requests([(prompt, limit)], chat_stop_tokens(model), logprobs)
        self._check_requests(requests, model, max_model_len)
        return requests


class TokenizeRequest(ModelRequest):
    """Body of /tokenize."""

    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(ModelRequest):
    """Body of /detokenize."""

    tokens: list[Token]
