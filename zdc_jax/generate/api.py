"""`generate` and `stream`: text or token ids in, text and measurements out."""

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from zdc_jax.cache.prefix_ring import KVCache
from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.generate.compile_time import compile_seconds
from zdc_jax.generate.loop import (
    MAX_STOP_TOKENS,
    PREFILL_CHUNK,
    DecodeState,
    bucket,
    decode,
    prefill,
    prefill_on_mesh,
)
from zdc_jax.generate.sampling import Sampling
from zdc_jax.loading import LanguageModel
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.transformer import ShardedTransformer

Prompt = str | Sequence[int]
FinishReason = Literal["length", "stop"]

STREAM_STEPS = 8
"""Tokens decoded between two looks of the host, when streaming or watching for stop strings."""
SMALLEST_CAPACITY = 128


@dataclass(frozen=True)
class Timings:
    """Seconds of wall time. `compile` is the part of both that XLA took where a shape was new."""

    prefill: float
    decode: float
    compile: float

    def tokens_per_second(self, tokens: int) -> float:
        """Decode rate; the first token of each row belongs to prefill."""
        return tokens / self.decode if self.decode > 0 else float("inf")


@dataclass(frozen=True)
class Completion:
    """What one prompt gave: token ids (with the stop token, if one ended it) and their text (without)."""

    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason


@dataclass(frozen=True)
class Generation:
    """Result of `generate`: one completion a prompt, KV cache bytes (all rows), timings."""

    completions: tuple[Completion, ...]
    kv_bytes: int
    capacity: int
    timings: Timings


@dataclass(frozen=True)
class Delta:
    """One piece of a stream: row of the prompt, new token ids and text, and why the row ended (else None)."""

    row: int
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason | None


def generate(
    model: LanguageModel,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int = 64,
    *,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] | int | None = None,
    stop: Sequence[str] | str = (),
    prefill_chunk: int = PREFILL_CHUNK,
    implementation: Implementation | None = None,
) -> Generation:
    """Continues each prompt by up to `max_new_tokens` tokens.

    On a mesh (`load(mesh=…)`) prompts come whole, without `prefill_chunk`, with their tokens over `sequence`,
    and decoding divides heads over the same devices.

    Args:
      prompts: one prompt or a list, each a text or a sequence of token ids; lengths may differ.
      sampling: default greedy.
      stop_tokens: id or ids that end a row (checked on the device); default the model's end-of-sequence ids.
      stop: string or strings that end a row (checked every few steps; what was decoded past one is trimmed).
      prefill_chunk: longest prompt piece of one prefill call, a power of two >= 32.
      implementation: of attention: `pallas`, `xla`, or None for the first that can (`zdc_jax.ops.attention`).

    Raises:
      PromptError: empty prompt, too many tokens for the model, id outside the vocabulary, bad option.
      MeshError: the batch cannot be divided over the model's mesh.
      CacheMemoryError: the KV cache does not fit; says what would.
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    session = _Session(
        model, prompts, max_new_tokens, sampling, stop_tokens, stop, prefill_chunk, implementation
    )
    state = session.prefill()
    step = STREAM_STEPS if stop else max_new_tokens
    while not session.finished(state):
        state = session.decode(state, step)
    return session.result(state)


def stream(
    model: LanguageModel,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int = 64,
    *,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] | int | None = None,
    stop: Sequence[str] | str = (),
    prefill_chunk: int = PREFILL_CHUNK,
    implementation: Implementation | None = None,
) -> Iterator[Delta]:
    """As `generate`, giving the pieces of each row as they come; joined, they equal `generate`'s result."""
    session = _Session(
        model, prompts, max_new_tokens, sampling, stop_tokens, stop, prefill_chunk, implementation
    )
    return session.deltas()


class _Session:
    """One call of `generate` or `stream`: checked prompts, compiled steps, trimming."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int,
        sampling: Sampling | None,
        stop_tokens: Sequence[int] | int | None,
        stop: Sequence[str] | str,
        prefill_chunk: int,
        implementation: Implementation | None,
    ):
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not isinstance(max_new_tokens, (int, np.integer)) or max_new_tokens < 1:
            raise PromptError(f"{max_new_tokens=} must be a whole number >= 1")
        max_new_tokens = int(max_new_tokens)
        if prefill_chunk != bucket(prefill_chunk):
            raise PromptError(f"{prefill_chunk=} must be a power of two >= 32")
        classes = model.plan.classes
        if classes is not None and prefill_chunk % classes.block:
            raise PromptError(f"{prefill_chunk=} must be a multiple of the plan's blocks of {classes.block}")
        if stop and model.tokenizer is None:
            raise PromptError("stop strings need a model with a tokenizer")
        if any(not text for text in stop):
            raise PromptError(f"stop={list(stop)} must not hold an empty string")
        self.model, self.limit, self.stop, self.chunk = model, max_new_tokens, stop, prefill_chunk
        self.implementation, self.network = implementation, model.network
        self.prompts = [_encode(model, prompt, max_new_tokens) for prompt in _as_list(prompts)]
        self.stop_ids = _stop_ids(model, stop_tokens)
        self.sampling = (sampling or Sampling()).arrays(model.config.vocab_size)
        longest = max(len(prompt) for prompt in self.prompts) + max_new_tokens
        self.capacity = capacity_for(longest, model.config.max_positions)
        if model.basis is not None and longest > model.basis.context_length:
            warnings.warn(
                f"a row may hold {longest} tokens, the basis was calibrated on contexts of "
                f"{model.basis.context_length}; quality beyond that is unmeasured",
                stacklevel=4,
            )
        self.seconds = {"prefill": 0.0, "decode": 0.0, "compile": 0.0}
        self.kv_bytes = 0

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began, compiled = time.perf_counter(), compile_seconds()
        yield
        self.seconds[stage] += time.perf_counter() - began
        self.seconds["compile"] += compile_seconds() - compiled

    def prefill(self) -> DecodeState:
        with self._timed("prefill"):
            state = self._prefill()
            jax.block_until_ready(state.last)
        return state

    def _prefill(self) -> DecodeState:
        if isinstance(self.network, ShardedTransformer):
            return self._prefill_on_mesh(self.network)
        cache = KVCache.create(
            self.model.plan,
            batch=len(self.prompts),
            capacity=self.capacity,
            dtype=self.model.network.dtype,
        )
        self.kv_bytes = cache.bytes()
        return prefill(
            self.network,
            cache,
            self.prompts,
            self.sampling,
            self.stop_ids,
            bucket(self.limit),
            chunk=self.chunk,
            implementation=self.implementation,
        )

    def _prefill_on_mesh(self, network: ShardedTransformer) -> DecodeState:
        network.check_fits(len(self.prompts), self.capacity)
        longest = max(len(prompt) for prompt in self.prompts)
        state = prefill_on_mesh(
            network,
            self.prompts,
            capacity_for(longest, self.model.config.max_positions),
            self.capacity,
            self.sampling,
            self.stop_ids,
            bucket(self.limit),
            implementation=self.implementation,
        )
        self.kv_bytes = state.cache.bytes()
        return state

    def decode(self, state: DecodeState, steps: int) -> DecodeState:
        with self._timed("decode"):
            limit = jnp.int32(min(self.limit, int(state.count.max()) + steps))
            state = decode(
                self.network,
                state,
                limit,
                self.sampling,
                self.stop_ids,
                implementation=self.implementation,
            )
            if self.stop:
                state = self._mark_stopped(state)
            jax.block_until_ready(state.last)
        return state

    def finished(self, state: DecodeState) -> bool:
        return bool(np.all(np.asarray(state.done) | (np.asarray(state.count) >= self.limit)))

    def _mark_stopped(self, state: DecodeState) -> DecodeState:
        done = np.asarray(state.done) | [self._cut(self._text(row)) is not None for row in self._rows(state)]
        return DecodeState(state.cache, state.tokens, state.count, state.last, jnp.asarray(done))

    def _rows(self, state: DecodeState) -> list[np.ndarray]:
        tokens, count = np.asarray(state.tokens), np.asarray(state.count)
        return [row[:n] for row, n in zip(tokens, count, strict=True)]

    def _text(self, tokens: np.ndarray) -> str:
        assert self.model.tokenizer is not None
        body = tokens[:-1] if len(tokens) and tokens[-1] in np.asarray(self.stop_ids) else tokens
        return self.model.tokenizer.decode(body.tolist())

    def _cut(self, text: str) -> int | None:
        """Where the first stop string begins in `text`."""
        found = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        return min(found) if found else None

    def completion(self, tokens: np.ndarray) -> Completion:
        """Trims one row's tokens to the stop string, if one was met."""
        stopped = len(tokens) > 0 and tokens[-1] in np.asarray(self.stop_ids)
        if self.model.tokenizer is None:
            return Completion(tuple(tokens.tolist()), None, "stop" if stopped else "length")
        text = self._text(tokens)
        if (cut := self._cut(text)) is None:
            return Completion(tuple(tokens.tolist()), text, "stop" if stopped else "length")
        while self._cut(self._text(tokens[:-1])) is not None:
            tokens = tokens[:-1]
        return Completion(tuple(tokens.tolist()), text[:cut], "stop")

    def result(self, state: DecodeState) -> Generation:
        completions = tuple(self.completion(row) for row in self._rows(state))
        return Generation(completions, self.kv_bytes, self.capacity, Timings(**self.seconds))

    def deltas(self) -> Iterator[Delta]:
        state = self.prefill()
        sent_tokens = [0] * len(self.prompts)
        sent_text = [0] * len(self.prompts)
        open_rows = set(range(len(self.prompts)))
        held = max((len(text) - 1 for text in self.stop), default=0)
        while True:
            done = np.asarray(state.done) | (np.asarray(state.count) >= self.limit)
            rows = self._rows(state)
            for row in sorted(open_rows):
                whole = self.completion(rows[row])
                ended = bool(done[row]) or (bool(self.stop) and whole.finish_reason == "stop")
                text, tokens = whole.text, whole.tokens
                if not ended and text is not None:
                    # What may still turn into a stop string, or is half a character, waits.
                    text = text[: max(len(text) - held, sent_text[row])].rstrip("\ufffd")
                piece = None if text is None else text[sent_text[row] :]
                new = tokens[sent_tokens[row] :]
                sent_tokens[row] = len(tokens)
                sent_text[row] += len(piece or "")
                if new or piece or ended:
                    yield Delta(row, new, piece, whole.finish_reason if ended else None)
                if ended:
                    open_rows.discard(row)
            if not open_rows:
                return
            state = self.decode(state, STREAM_STEPS)


def capacity_for(tokens: int, max_positions: int) -> int:
    """Cache capacity for so many tokens: powers of two to 2048, then multiples of 2048, so shapes repeat."""
    rounded = bucket(tokens, SMALLEST_CAPACITY) if tokens <= 2048 else -(-tokens // 2048) * 2048
    return max(tokens, min(rounded, max_positions))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise PromptError(f"{prompts=} must be a text, a list of token ids, or a list of either")
    items = list(prompts)
    if not items:
        raise PromptError("prompts=[] must hold at least one prompt")
    if isinstance(items[0], (int, np.integer)):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _encode(model: LanguageModel, prompt: Prompt, max_new_tokens: int) -> np.ndarray:
    """Token ids of one prompt, checked."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise PromptError("this model has no tokenizer; give token ids instead of text")
        with foreign_errors_as(PromptError, f"the tokenizer cannot encode {prompt!r:.80}"):
            ids = np.array(model.tokenizer.encode(prompt).ids, np.int64)
    else:
        ids = _flat(prompt)
    if ids.size == 0:
        raise PromptError(f"prompt {prompt!r} is empty; it must give at least one token")
    vocab = model.config.vocab_size
    if ids.min() < 0 or ids.max() >= vocab:
        bad = ids[(ids < 0) | (ids >= vocab)][0]
        raise PromptError(f"token id {bad} lies outside the vocabulary 0…{vocab - 1}")
    limit = model.config.max_positions
    if len(ids) + max_new_tokens > limit:
        raise PromptError(
            f"{len(ids)} prompt tokens and {max_new_tokens=} exceed the model's {limit} positions"
        )
    return ids.astype(np.int32)


def _flat(prompt: Sequence[int]) -> np.ndarray:
    try:
        ids = np.array(prompt)
    except ValueError:  # Lists of several lengths.
        ids = np.array([[]])
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise PromptError(f"a prompt of ids must be a flat list of integers, got {prompt!r:.80}")
    return ids


def _stop_ids(model: LanguageModel, stop_tokens: Sequence[int] | int | None) -> jax.Array:
    """Fixed-size array of stop ids, padded with -1 that no token equals."""
    given = model.config.eos_ids if stop_tokens is None else stop_tokens
    ids = [given] if isinstance(given, (int, np.integer)) else list(given)
    if len(ids) > MAX_STOP_TOKENS:
        raise PromptError(f"{len(ids)} stop tokens given, at most {MAX_STOP_TOKENS} are allowed")
    return jnp.array(ids + [-1] * (MAX_STOP_TOKENS - len(ids)), jnp.int32)
