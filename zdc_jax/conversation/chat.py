"""Conversations: `chat` starts one, and its KV cache is kept from turn to turn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.conversation.prompt import (
    chat_prompt,
    chat_stop_tokens,
    get_template_and_tokenizer,
    opening,
)
from zdc_jax.conversation.template import Message
from zdc_jax.errors import PromptError
from zdc_jax.generation.api import STREAM_STEPS
from zdc_jax.generation.request import (
    Request,
    capacity_for,
    check_limit,
    encode,
    tokenized,
    warn_beyond_calibration,
)
from zdc_jax.generation.results import Generation
from zdc_jax.generation.run import Run
from zdc_jax.generation.sampling import Sampling
from zdc_jax.generation.token_bytes import get_token_bytes
from zdc_jax.loading import LanguageModel
from zdc_jax.ops.attention import Implementation


def chat(
    model: LanguageModel,
    *,
    system: str | None = None,
    max_new_tokens: int = 512,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] | int | None = None,
    stop: Sequence[str] | str = (),
    prefill_chunk: int | None = None,
    implementation: Implementation | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> "Conversation":
    """Start a conversation.

    Args:
      model: model with a tokenizer and a chat template.
      system: system message; None for none.
      max_new_tokens: most tokens of a reply. A reply is shorter if the model's positions end.
      sampling: sampling parameters; default greedy.
      stop_tokens: id or ids that end a reply; default those of `chat_stop_tokens`.
      stop: string or strings that end a reply.
      prefill_chunk: most prompt tokens of one prefill call, as in `generate`.
      implementation: attention implementation, as in `generate`.
      template_options: further variables of the chat template, see `ChatTemplate.render`.

    Raises:
      ChatError: the model has no template or tokenizer, or the template fails or refuses the system message.
      PromptError: an option is invalid.
    """
    options = dict(template_options or {})
    stop_tokens = chat_stop_tokens(model) if stop_tokens is None else stop_tokens
    # Render a greeting, to find errors of the template and its options at once.
    *system_messages, greeting = opening(system, "Hello")
    prompt = chat_prompt(model, [*system_messages, greeting], options)
    check_limit(max_new_tokens)
    request = Request.from_arguments(
        model, [prompt], 1, sampling, stop_tokens, stop, prefill_chunk, new_text=True
    )
    request = replace(request, max_new_tokens=int(max_new_tokens))
    return Conversation(model, request, system_messages, options, implementation)


@dataclass(frozen=True)
class Turn:
    """Cost and result of a reply.

    Attributes:
      prompt_tokens: tokens of the chat before the reply.
      cached_tokens: those of them that were still in the cache.
      generation: result of the reply.
    """

    prompt_tokens: int
    cached_tokens: int
    generation: Generation


class Conversation:
    """Messages of a conversation and their KV cache; `chat` creates it.

    The cache is kept between turns, with the exact tokens that the model chose. In each turn the template
    renders the whole history again. If that text starts with the cached text, only the tokens after it are
    prefilled. Otherwise the whole history is prefilled again. That happens

    - if the template rewrites it: some leave out the model's earlier thoughts, some strip its replies;
    - after a reply that ended at a stop string or was not read to its end, because the cache has more tokens;
    - when the cache is full; the next one has room for twice as much;
    - with token classes, because decoded tokens are classified differently from prefilled ones;
    - on a mesh, where prompts are prefilled whole.

    In every case a reply is that of `generate` for the same token ids, up to rounding.

    Args:
      model: model that replies.
      request: request of each turn, except for its prompt.
      system_messages: messages before the first turn.
      options: further variables of the template.
      implementation: attention implementation.

    Attributes:
      turn: the newest turn; None before the first one, and if its reply was not read to its end.
    """

    def __init__(
        self,
        model: LanguageModel,
        request: Request,
        system_messages: Sequence[Message],
        options: Mapping[str, Any],
        implementation: Implementation | None,
    ):
        self._model, self._request, self._implementation = model, request, implementation
        self._template, self._tokenizer = get_template_and_tokenizer(model)
        self._system_messages, self._options = system_messages, options
        self._keeps_cache = keeps_cache(model)
        self.start_over()

    @property
    def history(self) -> list[dict[str, str]]:
        """All messages, oldest first. An unfinished reply has the text yielded so far."""
        return [dict(message) for message in self._messages]

    def start_over(self) -> None:
        """Forget everything but the system message, and free the cache."""
        self._messages = list(self._system_messages)
        self.turn: Turn | None = None
        self._cached: CachedText | None = None
        self._capacity = 0

    def say(self, message: str) -> str:
        """Return the whole reply to a message; errors are those of `stream`."""
        return "".join(self.stream(message))

    def stream(self, message: str) -> Iterator[str]:
        """Yield the text of the reply to a message; nothing runs before the first text is requested.

        Raises:
          ChatError: the message is not a string, or the template refuses it.
          PromptError: the tokenizer cannot encode the message, or the history leaves no room for a reply.
          CacheMemoryError: the KV cache does not fit.
          NotImplementedError: the chosen implementation does not support the call; the message says why.
        """
        messages = [*self._messages, {"role": "user", "content": message}]
        text = self._template.render(messages, self._options)
        self.turn = None
        request, cache = self._plan_turn(text)
        cached_tokens, reply = 0 if cache is None else int(cache.lengths[0]), ""
        run = Run(self._model, request, self._implementation, cache)
        for delta in run.deltas(STREAM_STEPS):
            new_text = delta.text or ""
            reply += new_text
            self._messages = [*messages, {"role": "assistant", "content": reply}]
            if new_text:
                yield new_text
        prompt = request.prompts[0]
        self.turn = Turn(len(prompt), cached_tokens, run.result())
        if self._keeps_cache:
            (chosen,), state = run.settled()
            decode = partial(get_token_bytes(self._tokenizer).join, before=(ids := prompt.tolist()))
            self._cached = CachedText(
                cache=state.cache,
                tokens=(*ids, *chosen),
                text=text + decode(chosen),
                text_in_cache=text + decode(chosen[:-1]),
            )

    def _plan_turn(self, text: str) -> tuple[Request, KVCache | None]:
        """Return the request for a chat with this text, and the cache to continue from, if possible.

        The cache is given up; the request's run consumes it.
        """
        cached, limit = self._cached, self._model.config.max_positions
        rendered_ids = tokenized(self._tokenizer, text, add_special_tokens=False)
        continued = None if cached is None else cached.continue_to(self._tokenizer, text, rendered_ids)
        cache = None if cached is None or continued is None else cached.cache
        ids = rendered_ids if continued is None else continued
        if (room := limit - len(ids)) < 1:
            raise PromptError(
                f"the conversation has {len(ids)} tokens and leaves no room for a reply within the model's "
                f"{limit} positions; start over, or say less"
            )
        max_new_tokens = min(self._request.max_new_tokens, room)
        prompt, longest = encode(self._model, ids, max_new_tokens), len(ids) + max_new_tokens
        self._cached = None
        if longest > self._capacity:
            warn_beyond_calibration(self._model, longest, stacklevel=4)
            self._capacity = capacity_for(min(2 * longest, limit), limit)
            cache = None
        request = replace(
            self._request, prompts=(prompt,), max_new_tokens=max_new_tokens, capacity=self._capacity
        )
        return request, cache


def keeps_cache(model: LanguageModel) -> bool:
    """Return whether the cache after decoding equals the one after prefill of the same tokens."""
    network = model.network
    return network.mesh is None and all(
        "chunked" in spec.clauses and spec.alignment == 1 for spec in network.layer_caches
    )


@dataclass(frozen=True)
class CachedText:
    """Cache between turns, with the text that it stands for.

    Attributes:
      cache: KV cache.
      tokens: tokens in the cache, followed by the newest token, which is not in the cache yet.
      text: text of `tokens`.
      text_in_cache: text of the tokens in the cache.
    """

    cache: KVCache
    tokens: tuple[int, ...]
    text: str
    text_in_cache: str

    def continue_to(self, tokenizer: Tokenizer, text: str, ids: list[int]) -> list[int] | None:
        """Return token ids of `text` that start with those in the cache; None if its start differs.

        The template may not write the newest token, or write it differently. That token may be dropped.

        Args:
          tokenizer: tokenizer of the model.
          text: text of the chat.
          ids: token ids of the whole text, which may start with other ids.
        """
        for known, beginning in ((self.tokens, self.text), (self.tokens[:-1], self.text_in_cache)):
            rest = tokenize_after(tokenizer, beginning, text, ids)
            if rest is not None and len(known) + len(rest) >= len(self.tokens):
                return [*known, *rest]
        return None


def tokenize_after(tokenizer: Tokenizer, beginning: str, text: str, ids: list[int]) -> list[int] | None:
    """Return the ids of a text after its beginning; None if it starts differently or a token spans the end.

    Args:
      tokenizer: tokenizer of the model.
      beginning: expected start of the text.
      text: whole text.
      ids: token ids of the whole text.
    """
    if not text.startswith(beginning):
        return None
    first = tokenized(tokenizer, beginning, add_special_tokens=False)
    return ids[len(first) :] if ids[: len(first)] == first else None
