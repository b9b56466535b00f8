"""`chat`: a conversation with a model, whose KV cache stays from turn to turn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from tokenizers import Tokenizer

from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.conversation.prompt import chat_prompt, chat_stop_tokens, means_to_chat, opening
from zdc_jax.conversation.template import Message
from zdc_jax.errors import PromptError
from zdc_jax.generation.api import STREAM_STEPS
from zdc_jax.generation.detokenise import CONTEXT
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
from zdc_jax.generation.steps import PREFILL_CHUNK
from zdc_jax.loading import LanguageModel
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation


def chat(
    model: LanguageModel,
    *,
    system: str | None = None,
    max_new_tokens: int = 512,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] | int | None = None,
    stop: Sequence[str] | str = (),
    prefill_chunk: int = PREFILL_CHUNK,
    implementation: Implementation | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> "Conversation":
    """Begins a conversation.

    Args:
      system: what the model is told before the first message.
      max_new_tokens: most tokens of a reply; fewer where the model's positions end.
      stop_tokens: id or ids that end a reply; default those of `chat_stop_tokens`.
      template_options: further variables of the model's template, see `ChatTemplate.render`.
      sampling, stop, prefill_chunk, implementation: as `generate` takes them.

    Raises:
      ChatError: no template or tokenizer, or the template cannot be used or refuses the system message.
      PromptError: bad option.
    """
    options = dict(template_options or {})
    stop_tokens = chat_stop_tokens(model) if stop_tokens is None else stop_tokens
    # What each turn asks for, but for its prompt; a greeting shows at once whether template and options work.
    *told, hello = opening(system, "Hello")
    greeting = chat_prompt(model, [*told, hello], options)
    check_limit(max_new_tokens)
    request = Request.from_arguments(model, [greeting], 1, sampling, stop_tokens, stop, prefill_chunk)
    request = replace(request, max_new_tokens=int(max_new_tokens))
    return Conversation(model, request, told, options, implementation)


@dataclass(frozen=True)
class Turn:
    """What the newest reply took: tokens of the chat before it, how many of them the cache still held."""

    prompt_tokens: int
    cached_tokens: int
    generation: Generation


class Conversation:
    """What was said, and the KV cache of it; made by `chat`.

    The cache stays between turns, with the very tokens that the model chose. In each turn the template writes
    the whole history anew. Where that text begins with the text that the cache stands for, only the tokens
    behind it are read. Otherwise the whole history is read again, which happens

    - where the template rewrites it: some leave out earlier thoughts of the model, some strip its replies;
    - after a reply that ended at a stop string or was not read to its end, for the cache holds more of it;
    - when the cache is full; the next has room for as much again;
    - with token classes, since tokens that are decoded are classified otherwise than tokens that are read;
    - on a mesh, where prompts come whole.

    In every case a reply is what `generate` gives for the same token ids, up to rounding.
    """

    def __init__(
        self,
        model: LanguageModel,
        request: Request,
        told: Sequence[Message],
        options: Mapping[str, Any],
        implementation: Implementation | None,
    ):
        """request: what each turn asks for, but for its prompt. told: messages before the first turn."""
        self._model, self._request, self._implementation = model, request, implementation
        self._template, self._tokenizer = means_to_chat(model)
        self._told, self._options = told, options
        self._keeps = keeps_cache(model)
        self.start_over()

    @property
    def history(self) -> list[dict[str, str]]:
        """All messages, oldest first. Of a reply that is on its way, or that broke off, what was given."""
        return [dict(message) for message in self._messages]

    @property
    def turn(self) -> Turn | None:
        """What the newest reply took; None before the first, and where it was not read to its end."""
        return self._turn

    def start_over(self) -> None:
        """Forgets everything but the system message, and gives the cache back."""
        self._messages = list(self._told)
        self._turn: Turn | None = None
        self._held: Held | None = None
        self._capacity = 0

    def say(self, message: str) -> str:
        """The whole reply to a message; raises what `stream` does."""
        return "".join(self.stream(message))

    def stream(self, message: str) -> Iterator[str]:
        """The reply to a message, piece by piece; nothing is done before the first is asked for.

        Raises:
          ChatError: the message is no string, or the template refuses it.
          PromptError: the tokenizer cannot encode it, or the history leaves no room for a reply.
          CacheMemoryError: the KV cache does not fit.
          NotImplementedError: the chosen implementation cannot do this call, with the reason.
        """
        messages = [*self._messages, {"role": "user", "content": message}]
        text = self._template.render(messages, self._options)
        self._turn = None
        request, cache = self._next(text)
        kept, reply = 0 if cache is None else int(cache.lengths[0]), ""
        run = Run(self._model, request, self._implementation, cache)
        for delta in run.deltas(STREAM_STEPS):
            piece = delta.text or ""
            reply += piece
            self._messages = [*messages, {"role": "assistant", "content": reply}]
            if piece:
                yield piece
        prompt = request.prompts[0]
        self._turn = Turn(len(prompt), kept, run.result())
        if self._keeps:
            (chosen,), state = run.settled()
            given = prompt.tolist(), chosen, state.cache
            self._held = Held.after(self._tokenizer, text, *given)

    def _next(self, text: str) -> tuple[Request, KVCache | None]:
        """What to ask for in a turn of this text; with the cache, which is given away, if it can go on."""
        held, limit = self._held, self._model.config.max_positions
        anew = tokenized(self._tokenizer, text, add_special_tokens=False)
        kept = None if held is None else held.continued(self._tokenizer, text, anew)
        cache = None if held is None or kept is None else held.cache
        ids = anew if kept is None else kept
        if (room := limit - len(ids)) < 1:
            raise PromptError(
                f"the conversation takes {len(ids)} tokens and leaves none of the model's {limit} positions "
                "for a reply; start over, or say less"
            )
        max_new_tokens = min(self._request.max_new_tokens, room)
        prompt, longest = encode(self._model, ids, max_new_tokens), len(ids) + max_new_tokens
        self._held = None
        if longest > self._capacity:
            warn_beyond_calibration(self._model, longest, stacklevel=4)
            self._capacity = capacity_for(min(2 * longest, limit), limit)
            cache = None
        given = replace(
            self._request, prompts=(prompt,), max_new_tokens=max_new_tokens, capacity=self._capacity
        )
        return given, cache


def keeps_cache(model: LanguageModel) -> bool:
    """Whether a model's cache, after tokens were decoded, can go on as if they had been read."""
    network = model.network
    return isinstance(network, Transformer) and all(
        "chunked" in spec.clauses and spec.alignment == 1 for spec in network.layer_caches
    )


@dataclass(frozen=True)
class Held:
    """A cache between turns, and what it stands for.

    tokens: those in the cache and, behind them, the newest one, which is not in it yet. text: that of
    `tokens`; text_held: that of those in the cache.
    """

    cache: KVCache
    tokens: tuple[int, ...]
    text: str
    text_held: str

    @classmethod
    def after(
        cls, tokenizer: Tokenizer, text: str, prompt: list[int], chosen: list[int], cache: KVCache
    ) -> Self:
        """After a turn: the text of the chat so far and its token ids, and what the model chose then."""
        more = [text + text_after(tokenizer, prompt, tokens) for tokens in (chosen, chosen[:-1])]
        return cls(cache, (*prompt, *chosen), *more)

    def continued(self, tokenizer: Tokenizer, text: str, ids: list[int]) -> list[int] | None:
        """Token ids of `text` that begin with those in the cache; None where it begins with another text.

        ids: those that the tokenizer gives for all of `text`, which may begin otherwise.
        The newest token may be one that the template does not write, or writes otherwise: it may go.
        """
        for known, beginning in ((self.tokens, self.text), (self.tokens[:-1], self.text_held)):
            rest = tokens_after(tokenizer, beginning, text, ids)
            if rest is not None and len(known) + len(rest) >= len(self.tokens):
                return [*known, *rest]
        return None


def text_after(tokenizer: Tokenizer, prompt: list[int], chosen: list[int]) -> str:
    """Text of chosen tokens, special ones included, where they stand: some decoders change a beginning."""
    context = prompt[-CONTEXT:]
    before = tokenizer.decode(context, skip_special_tokens=False)
    return tokenizer.decode([*context, *chosen], skip_special_tokens=False)[len(before) :]


def tokens_after(tokenizer: Tokenizer, beginning: str, text: str, ids: list[int]) -> list[int] | None:
    """Tokens of a text, all of them `ids`, behind its beginning; None where it has another, or a token spans
    the end of it."""
    if not text.startswith(beginning):
        return None
    first = tokenized(tokenizer, beginning, add_special_tokens=False)
    return ids[len(first) :] if ids[: len(first)] == first else None
