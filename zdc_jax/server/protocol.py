"""Bodies of client requests: their validation, and their conversion to engine requests.

Names and defaults are OpenAI's. `top_k`, `min_p`, `repetition_penalty`, `allowed_token_ids`, `bad_words`,
`ignore_eos`, `min_tokens`, `stop_token_ids`, `priority`, `cache_salt` and `chat_template_kwargs` are vLLM's.
Fields that are not implemented are listed in `fields.py`.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from zdc_jax.conversation.prompt import chat_prompt, chat_stop_tokens, get_template_and_tokenizer
from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.engine.checks import resolve_stop_ids
from zdc_jax.engine.request import MAX_LOGPROBS, EngineRequest
from zdc_jax.generation.grammar import Grammar, compile_grammar
from zdc_jax.generation.packed_parameters import MAX_STOP_TOKENS
from zdc_jax.generation.request import stop_strings, token_ids
from zdc_jax.generation.sampling import MAX_BIAS, MAX_PENALTY, REPETITION_PENALTIES, SEEDS, Sampling
from zdc_jax.generation.shaping import check_in_vocabulary, token_biases
from zdc_jax.loading import TextModel
from zdc_jax.server.body import Items, JsonObject, ModelRequest, StreamedRequest, show
from zdc_jax.server.errors import RequestError, make_length_error, report_errors_of
from zdc_jax.server.fields import IGNORED, IGNORED_IN_COMPLETIONS, REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS
from zdc_jax.server.messages import ChatMessage
from zdc_jax.server.structured import StructuredRequest
from zdc_jax.server.tool_grammar import tool_call_grammar
from zdc_jax.server.tools import NamedTool, Tool, ToolOutput, require_format

MAX_ANSWERS = 16
"""Most answers to one prompt (`n`)."""
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 1024
"""Most `bad_words`. All are compared with each answer in every step."""
MAX_REQUESTS = 128
"""Most prompts of one body, times `n`."""
COMPLETION_TOKENS = 16
"""Default `max_tokens` of a completion."""
SWITCHES = {"enable_thinking", "thinking"}
"""Variables that clients set for all models; templates of models that do not think ignore them."""
OWN_VARIABLES = {"tools", "documents"}
"""Variables of templates that have fields of their own."""

TOKENS = 2**31
"""Bound of token ids, whatever the vocabulary."""

Token = Annotated[int, Field(ge=0, lt=TOKENS)]
Text = Annotated[str, Field(min_length=1)]
Word = Annotated[str, Field(pattern=r"\S")]
"""Text that is not blank."""


def _read_token_ids(biases: Any) -> Any:
    """Convert the keys of a JSON object to token ids; return the first wrong pair alone."""
    if not isinstance(biases, dict):
        return biases
    read = {}
    for key, bias in biases.items():
        token = int(key) if key.isdecimal() and len(key) <= 10 else key
        is_number = type(bias) in (int, float) and abs(bias) <= MAX_BIAS
        if not (isinstance(token, int) and token < TOKENS and is_number):
            return {token: bias}
        read[token] = bias
    return read


Biases = Annotated[
    dict[Token, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]], BeforeValidator(_read_token_ids)
]
"""Numbers by token id."""


Prompt = str | Items[int]
"""Text or token ids."""
Prompts = Prompt | Annotated[Items[Prompt], Field(min_length=1)]
"""Prompt or prompts."""


class GenerationRequest(StructuredRequest, StreamedRequest, ABC):
    """Common fields of completions and chats.

    Attributes:
      max_tokens: most tokens of an answer, which also ends where the model's context does.
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
    """

    ignored: ClassVar = IGNORED

    max_tokens: int | None = Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    repetition_penalty: float = Field(1.0, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    logit_bias: Biases = Field(default_factory=dict)
    allowed_token_ids: Items[Token] | None = Field(None, min_length=1)
    bad_words: Items[Word] = Field(default_factory=list, max_length=MAX_BAD_WORDS)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    seed: int | None = None
    stop: Text | Annotated[Items[Text], Field(max_length=MAX_STOP_STRINGS)] = Field(default_factory=list)
    stop_token_ids: Items[Token] = Field(default_factory=list, max_length=MAX_STOP_TOKENS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    priority: int = 0
    cache_salt: str = ""

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

    def make_tool_output(self, model: TextModel) -> ToolOutput | None:
        """Return a reader for the calls of one answer; None if no tools are offered.

        Raises:
          RequestError: the chat template teaches no supported format of calls.
        """
        return None

    def check_answers(self, most: int) -> None:
        """Raise `RequestError` if the body asks for more answers than a server can run and queue."""
        prompts, most = self._count_prompts(), min(most, MAX_REQUESTS)
        if prompts * self.n > most:
            asked = f"n={self.n}" if prompts == 1 else f"prompt: {prompts} prompts with n={self.n}"
            message = f"{asked}; at most {most} answers are allowed at a time"
            raise RequestError(message, param="n" if prompts == 1 else "prompt")

    def _count_prompts(self) -> int:
        return 1

    @property
    def _limit_field(self) -> str:
        """Name of the field that limits the answer's tokens."""
        return "max_tokens"

    def _build_requests(
        self,
        model: TextModel,
        prompts: Iterable[tuple[Sequence[int], int]],
        logprobs: int | None,
        stop_tokens: Sequence[int] = (),
        **options: Any,
    ) -> list[EngineRequest]:
        """Return `n` engine requests for each prompt.

        Args:
          model: model that serves the requests.
          prompts: token ids of each prompt, and most tokens to generate.
          logprobs: number of alternatives of each token, or None.
          stop_tokens: stop tokens in addition to the client's.
          **options: further fields of the engine requests.

        Raises:
          RequestError: the model cannot serve a field. Errors of the engine name its own fields.
        """
        stop_tokens = () if self.ignore_eos else stop_tokens
        stops = tuple(dict.fromkeys([*stop_tokens, *self.stop_token_ids]))
        samplings = self._build_samplings(model)
        with report_errors_of("stop"):
            stop = stop_strings(model, self.stop)
        requests = [
            EngineRequest(
                prompt=tuple(prompt),
                max_tokens=max_tokens,
                sampling=sampling,
                stop_tokens=stops,
                stop=stop,
                ignore_eos=self.ignore_eos,
                min_tokens=self.min_tokens,
                logprobs=logprobs,
                priority=self.priority,
                salt=self.cache_salt,
                **options,
            )
            for prompt, max_tokens in prompts
            for sampling in samplings
        ]
        with report_errors_of(param := "stop_token_ids"):
            check_in_vocabulary(param, self.stop_token_ids, model)
            resolve_stop_ids(model, requests[0], name=param)
        return requests

    def _build_samplings(self, model: TextModel) -> list[Sampling]:
        """Return the sampling parameters of each answer to a prompt, with consecutive seeds."""
        field, grammar = self.choose_grammar(model)
        seed = secrets.randbelow(SEEDS) if self.seed is None else self.seed
        parameters = self.model_dump(include={each.name for each in fields(Sampling)})
        parameters |= {"top_k": None if self.top_k < 1 else self.top_k, "grammar": grammar}
        with report_errors_of():
            samplings = [Sampling(**parameters | {"seed": (seed + i) % SEEDS}) for i in range(self.n)]
            token_biases(model, samplings[0])
        if grammar is not None:
            self._try_grammar(model, field, grammar)
        return samplings

    def _try_grammar(self, model: TextModel, field: str, grammar: Grammar) -> None:
        """Raise `RequestError` if the grammar of a field cannot be used; a new one takes up to a second."""
        with report_errors_of(field.split(".")[0], prefix=f"{field}: "):
            compile_grammar(model, grammar)

    def _limit_answer(self, limit: int | None, prompt: Sequence[int], max_model_len: int, param: str) -> int:
        """Return the most tokens of an answer, at most `limit` and what the prompt leaves.

        Raises:
          RequestError: that is less than one token, or less than `min_tokens`.
        """
        if limit is not None and self.min_tokens > limit:
            message = f"min_tokens={self.min_tokens} must be at most {self._limit_field}={limit}"
            raise RequestError(message, param="min_tokens")
        if self.min_tokens >= max_model_len:
            message = f"min_tokens={self.min_tokens} must be less than the context of {max_model_len} tokens"
            raise RequestError(message, param="min_tokens")
        room, fewest = max_model_len - len(prompt), max(1, self.min_tokens)
        if room < fewest:
            raise make_length_error(param, len(prompt), limit or fewest, max_model_len)
        return min(limit or room, room)


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions.

    Attributes:
      prompt: one prompt or several, each a text or token ids.
      max_tokens: most tokens of an answer; 0 with `echo` for the prompt alone.
      echo: start each answer with its prompt.
      logprobs: number of alternatives of each token; None for no log-probabilities.
      add_special_tokens: add the special tokens that begin and end a text, such as BOS. Those that a text
        itself begins with are not added again.
    """

    refused: ClassVar = REFUSED_IN_COMPLETIONS
    ignored: ClassVar = IGNORED_IN_COMPLETIONS

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        """List of the prompt or prompts."""
        # Pydantic has checked the other items.
        single = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return cast(list[str | list[int]], [self.prompt] if single else self.prompt)

    @property
    def echoes_only(self) -> bool:
        """Whether the answer is the prompt alone. The engine generates a token, which is dropped."""
        return self.max_tokens == 0

    @field_validator("prompt", mode="before")
    @classmethod
    def _count_prompts_first(cls, prompt: Any) -> Any:
        """Refuse too many prompts before all are read."""
        if isinstance(prompt, list) and len(prompt) > MAX_REQUESTS and not isinstance(prompt[0], int):
            message = f"prompt: {len(prompt)} prompts; at most {MAX_REQUESTS} answers are allowed"
            raise RequestError(message, param="prompt")
        return prompt

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        if self.echoes_only and not self.echo:
            raise RequestError("max_tokens=0 needs echo=true; otherwise send at least 1", param="max_tokens")
        return self

    def _count_prompts(self) -> int:
        return len(self.prompts)

    def engine_requests(self, model: TextModel, max_model_len: int) -> list[EngineRequest]:
        limit = COMPLETION_TOKENS if self.max_tokens is None else max(1, self.max_tokens)
        with report_errors_of("prompt"):
            special = self.add_special_tokens
            encoded = [token_ids(model, prompt, add_special_tokens=special) for prompt in self.prompts]
        prompts = [ids.tolist() for ids in encoded]
        limits = [self._limit_answer(limit, prompt, max_model_len, "prompt") for prompt in prompts]
        scored = self.echo and self.logprobs is not None
        pairs = zip(prompts, limits, strict=True)
        return self._build_requests(model, pairs, self.logprobs, prompt_logprobs=scored)


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions.

    Without a token limit, a reply may take all positions that the messages leave.

    Attributes:
      messages: messages, oldest first.
      max_completion_tokens: most tokens of a reply; takes precedence over `max_tokens`.
      logprobs: report log-probabilities of the reply's tokens.
      top_logprobs: number of alternatives of each token.
      chat_template_kwargs: further variables of the chat template.
      add_special_tokens: add special tokens before the text of the template, which mostly has them.
      reasoning_effort: variable of some chat templates.
      add_generation_prompt: end the prompt with the start of a reply; default unless a message is continued.
      continue_final_message: continue the text of the last message.
      tools: tools that the model may call.
      tool_choice: `none` hides the tools from the model, `required` makes it call one, and an object makes it
        call the tool of this name; None means `auto`.
      parallel_tool_calls: report all calls of a reply, not only the first.
    """

    refused: ClassVar = REFUSED_IN_CHATS

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    add_special_tokens: bool = False
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: Items[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs={self.top_logprobs} needs logprobs=true"
            raise RequestError(message, param="top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            message = "continue_final_message=true needs add_generation_prompt=false"
            raise RequestError(message, param="continue_final_message")
        if self._must_call and not self._callable_tools:
            names = ", ".join(tool.function.name for tool in self.tools) or "none"
            message = f"tool_choice asks for a call, but no such tool is offered; the names in tools: {names}"
            raise RequestError(message, param="tool_choice")
        return self

    @property
    def _limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def engine_requests(self, model: TextModel, max_model_len: int) -> list[EngineRequest]:
        prompt = self._encode_messages(model)
        limit = self.max_completion_tokens or self.max_tokens
        limit = self._limit_answer(limit, prompt, max_model_len, "messages")
        logprobs = self.top_logprobs if self.logprobs else None
        stop_tokens, new_text = chat_stop_tokens(model), not self.continue_final_message
        return self._build_requests(model, [(prompt, limit)], logprobs, stop_tokens, new_text=new_text)

    @property
    def offered_tools(self) -> list[Tool]:
        """Tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def _must_call(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")

    @property
    def _callable_tools(self) -> list[Tool]:
        """Tools that `tool_choice` allows."""
        if not isinstance(self.tool_choice, NamedTool):
            return self.offered_tools
        return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]

    def choose_grammar(self, model: TextModel) -> tuple[str, Grammar | None]:
        """Return the grammar of the reply: that of a field, of calls, or of either.

        A reply in JSON may also be calls of tools, unless they are chosen by `tool_choice`.
        """
        field, grammar = super().choose_grammar(model)
        answer = grammar.source if grammar is not None and grammar.kind == "json" else None
        if not self._must_call and not (answer and self.offered_tools):
            return field, grammar
        if self._must_call and grammar is not None:
            message = f"{field} and tool_choice={show(self.tool_choice)}: both bind the reply; leave one out"
            raise RequestError(message, param="tool_choice")
        template, tokenizer = get_template_and_tokenizer(model)
        tools = [tool.to_template() for tool in self._callable_tools]
        parallel = self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)
        with report_errors_of(prefix="tools: "):
            format = require_format(template)
            calls = tool_call_grammar(tools, format, tokenizer, parallel=parallel, answer=answer)
        return field or "tools", calls

    def _try_grammar(self, model: TextModel, field: str, grammar: Grammar) -> None:
        try:
            super()._try_grammar(model, field, grammar)
        except RequestError:
            for index, tool in enumerate(self.offered_tools):  # One of them may be the cause.
                place = f"tools[{index}].function.parameters"
                with report_errors_of(place, prefix=f"{place}: "):
                    compile_grammar(model, Grammar.json(tool.to_template()["function"]["parameters"]))
            raise

    def make_tool_output(self, model: TextModel) -> ToolOutput | None:
        if not self.offered_tools:
            return None
        template, tokenizer = get_template_and_tokenizer(model)
        format, parallel = require_format(template), self.parallel_tool_calls
        return ToolOutput(format, tokenizer, self.offered_tools, parallel=parallel)

    def _encode_messages(self, model: TextModel) -> list[int]:
        """Return the token ids of the messages, as the chat template writes them."""
        template, _ = get_template_and_tokenizer(model)
        if self.offered_tools:
            require_format(template)
            template = template.for_tools()
        generate = self.add_generation_prompt
        with report_errors_of("messages"):
            prompt = chat_prompt(
                model,
                [message.to_template() for message in self.messages],
                self._select_options(template),
                tools=[tool.to_template() for tool in self.offered_tools],
                add_generation_prompt=not self.continue_final_message if generate is None else generate,
                continue_final_message=self.continue_final_message,
                add_special_tokens=self.add_special_tokens,
            )
            return token_ids(model, prompt).tolist()

    def _select_options(self, template: ChatTemplate) -> dict[str, Any]:
        """Return the variables of the template; raise `RequestError` for one that it does not use."""
        known = template.variables - OWN_VARIABLES
        options = {f"chat_template_kwargs.{name}": value for name, value in self.chat_template_kwargs.items()}
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        used = {}
        for field, value in options.items():
            name = field.removeprefix("chat_template_kwargs.")
            if name in known:
                used[name] = value
            elif name not in SWITCHES:
                others = f", or send one of {', '.join(sorted(known))}" if known else ""
                cause = "the chat template of this model does not read it; leave it out"
                raise RequestError(f"{field}={show(value)}: {cause}{others}", param=field)
        return used


class TokenizeRequest(ModelRequest):
    """Body of /tokenize."""

    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(ModelRequest):
    """Body of /detokenize."""

    tokens: Items[Token]
