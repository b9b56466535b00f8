"""Execution of one call of `generate` or `stream`: prefill, then decoding until every sequence has ended."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zdc_jax.cache.kv_cache import KVCache, check_fits_now, fits_program
from zdc_jax.errors import NonFiniteError
from zdc_jax.generation.chunks import bucket, choose_chunk, divide_prompt, find_block, padded
from zdc_jax.generation.compile_time import compile_seconds
from zdc_jax.generation.guide import Guide, make_mask
from zdc_jax.generation.next_token import Choice
from zdc_jax.generation.packed_parameters import pack_parameters
from zdc_jax.generation.request import Request, capacity_for
from zdc_jax.generation.results import Delta, Generation, Timings
from zdc_jax.generation.sampling import request_keys
from zdc_jax.generation.shaping import Shaping
from zdc_jax.generation.steps import (
    DecodeState,
    Flat,
    SampledTokens,
    decode,
    first,
    prefill,
    prefill_new,
)
from zdc_jax.generation.stopping import OutputSequence, StopStrings
from zdc_jax.loading import LanguageModel
from zdc_jax.ops.attention import Implementation


class Run:
    """Execution of one request.

    Attributes:
      model: model that runs the request.
      request: validated request.
      cache: cache of the request's capacity that already has the first tokens of each prompt, but not all
        tokens of any. The run consumes it. None starts with an empty cache.
      state: state after the run has ended; None before.
      sequences: output of each prompt.
      chosen: tokens of each sequence that the host has read. `settled` returns all tokens.
      seconds: time spent in each stage, as in `Timings`.
    """

    def __init__(
        self,
        model: LanguageModel,
        request: Request,
        implementation: Implementation | None,
        cache: KVCache | None = None,
    ):
        self.model, self.request, self.cache = model, request, cache
        self.state: DecodeState | None = None
        self._flat = Flat.of(model.network)
        self._ahead: list[SampledTokens] = []
        keys = request_keys(request.samplings, request.prompts)
        self._numbers = np.stack(
            [
                pack_parameters(len(prompt), request.max_new_tokens, request.stop_ids, sampling, key)
                for prompt, sampling, key in zip(request.prompts, request.samplings, keys, strict=True)
            ]
        )
        greedy = all(sampling.temperature == 0 for sampling in request.samplings)
        self._choice: Choice = "greedy" if greedy else "any"
        self._implementation = implementation
        stop = StopStrings(request.stop)
        self.sequences = [
            OutputSequence(
                index,
                model.tokenizer,
                request.stop_ids,
                stop,
                before=() if request.new_text else prompt.tolist(),
            )
            for index, prompt in enumerate(request.prompts)
        ]
        self._guides = [Guide.of(model, sampling, request.stop_ids) for sampling in request.samplings]
        # The host must then know each token before the next one is chosen.
        self._is_guided = any(self._guides)
        self._shaping = self._guided(Shaping.of(model, request.samplings, request.prompts))
        self.chosen: list[list[int]] = [[] for _ in request.prompts]
        self.seconds = {"prefill": 0.0, "decode": 0.0, "compile": 0.0}

    def deltas(self, steps: int) -> Iterator[Delta]:
        """Yield the new tokens of each sequence after prefill and after each `steps` decode steps.

        If a call returns before its tokens are computed, the next call is issued at once. So the device does
        not wait for the host. Tokens decoded after a stop are discarded. On a mesh every call runs all
        `steps`, even if fewer are needed. With guided sequences every call runs one step.
        """
        steps = 1 if self._is_guided else steps
        with self._timed("prefill"):
            state, results = jax.block_until_ready(self._prefill())
        for result in results:
            yield from self._deliver(result)
        ahead: list[SampledTokens] = []
        while (active := self._find_unfinished()).any():
            with self._timed("decode"):
                while not ahead or (
                    len(ahead) == 1 and self._needs_more_than(steps) and self._may_ask_ahead(ahead[0])
                ):
                    state, result = self._decode(state, active, steps)
                    ahead.append(result)
                result = jax.block_until_ready(ahead.pop(0))
            yield from self._deliver(result)
        self.state, self._ahead = state, ahead

    def settled(self) -> tuple[list[list[int]], DecodeState]:
        """Wait for tokens still being computed; return all tokens of each sequence and the final state.

        Tokens after a stop string are included. Every sequence must have ended.
        """
        assert self.state is not None, "the run has not ended"
        while self._ahead:
            self._record(self._ahead.pop())
        return self.chosen, self.state

    def result(self) -> Generation:
        """Return all completions; every sequence must have ended."""
        assert self.state is not None, "the run has not ended"
        completions = tuple(sequence.completion() for sequence in self.sequences)
        kv_bytes = self.state.cache.bytes()
        return Generation(completions, kv_bytes, self.request.capacity, Timings(**self.seconds))

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began, compiled = time.perf_counter(), compile_seconds()
        yield
        self.seconds[stage] += time.perf_counter() - began
        self.seconds["compile"] += compile_seconds() - compiled

    def _prefill(self) -> tuple[DecodeState, list[SampledTokens]]:
        """Prefill all prompts; each chunk yields the first tokens of the prompts that end in it."""
        request, network = self.request, self.model.network
        lengths = np.array([len(prompt) for prompt in request.prompts], np.int32)
        if self._on_mesh:
            network.check_fits(len(lengths), request.capacity)
            state, result = self._prefill_on_mesh(lengths)
            return state, [result]
        cache, self.cache = self.cache, None  # The steps donate its arrays.
        cached = np.zeros_like(lengths) if cache is None else np.asarray(cache.lengths)
        batch, capacity = len(lengths), request.capacity
        results, longest, start = [], int((lengths - cached).max()), 0
        most = request.prefill_chunk or choose_chunk(self.model, sequences=batch, capacity=capacity)
        widths = list(divide_prompt(longest, most, find_block(self.model)))
        if (
            cache is None
            and len(widths) == 1
            and fits_program(network.layer_caches, batch=batch, capacity=capacity)
        ):
            return self._prefill_new(lengths, min(widths[0], capacity))
        if cache is None:
            cache = network.new_cache(batch=batch, capacity=capacity)
        state = DecodeState.of(cache)._replace(shaping=self._shaping)
        for width in widths:
            width = min(width, cache.capacity)
            begins, remaining = cached + start, lengths - cached - start
            chunks = [p[begin:][:width] for p, begin in zip(request.prompts, begins, strict=True)]
            state, result = prefill(
                self._flat,
                state,
                padded(chunks, width),
                count=np.clip(remaining, 0, width),
                ends=(remaining > 0) & (remaining <= width),
                numbers=self._numbers,
                choice=self._choice,
                implementation=self._implementation,
            )
            results.append(result)
            start += width
        return state, results

    def _prefill_new(self, lengths: np.ndarray, width: int) -> tuple[DecodeState, list[SampledTokens]]:
        """Prefill prompts that fit into one call, together with the creation of their cache."""
        specs, capacity = self.model.network.layer_caches, self.request.capacity
        check_fits_now(specs, batch=len(lengths), capacity=capacity)
        state, result = prefill_new(
            self._flat,
            self._shaping,
            padded(self.request.prompts, width),
            lengths,
            self._numbers,
            specs=specs,
            capacity=capacity,
            choice=self._choice,
            implementation=self._implementation,
        )
        return state, [result]

    def _prefill_on_mesh(self, lengths: np.ndarray) -> tuple[DecodeState, SampledTokens]:
        """Prefill whole prompts, split by token; the cache is then split by head."""
        request, network = self.request, self.model.network
        width = capacity_for(int(lengths.max()), self.model.config.max_positions)
        hidden, cache = network.prefill(
            jnp.asarray(padded(request.prompts, width)),
            jnp.asarray(lengths),
            capacity=request.capacity,
            implementation=self._implementation,
        )
        state, ends = DecodeState.of(cache, network.on_all_devices), np.ones(len(lengths), bool)
        state = state._replace(shaping=self._shaping)
        return first(self._flat, state, hidden, ends, self._numbers, choice=self._choice)

    def _decode(
        self, state: DecodeState, active: np.ndarray, steps: int
    ) -> tuple[DecodeState, SampledTokens]:
        """Start decoding of at most `steps` tokens of the active sequences."""
        state = state._replace(shaping=self._guided(state.shaping))
        fixed = self._on_mesh and steps < self.request.max_new_tokens
        return decode(
            self._flat,
            state,
            active,
            self._numbers,
            None if fixed else np.int32(steps),
            steps=steps if fixed else bucket(steps),
            choice=self._choice,
            implementation=self._implementation,
        )

    def _guided(self, shaping: Shaping | None) -> Shaping | None:
        """Return the arrays of a call with the masks of its next tokens."""
        if shaping is None or not self._is_guided:
            return shaping
        pairs = zip(self.sequences, self._guides, strict=True)
        guides = [None if sequence.finish_reason else guide for sequence, guide in pairs]
        return shaping._replace(mask=jnp.asarray(make_mask(guides, self.model.config.vocab_size)))

    @property
    def _on_mesh(self) -> bool:
        return self.model.network.mesh is not None

    def _find_unfinished(self) -> np.ndarray:
        """Return which sequences have not ended, [B] bool."""
        return np.array([sequence.finish_reason is None for sequence in self.sequences])

    def _needs_more_than(self, steps: int) -> bool:
        """Return whether a sequence may need more than `steps` further tokens."""
        limit = self.request.max_new_tokens - steps
        pairs = zip(self.sequences, self.chosen, strict=True)
        return any(sequence.finish_reason is None and len(chosen) < limit for sequence, chosen in pairs)

    def _may_ask_ahead(self, pending: SampledTokens) -> bool:
        """Return whether to issue the next call before the pending tokens are read.

        On one device that is so while the pending tokens are not ready. On a mesh it is always so: calls do
        not ask the host anything there, and several processes must make the same calls. With guided sequences
        it is never so.
        """
        counts: Any = pending.counts  # JAX's stubs lack `is_ready`.
        return not self._is_guided and (self._on_mesh or not counts.is_ready())

    def _deliver(self, result: SampledTokens) -> Iterator[Delta]:
        """Append new tokens to the sequences that have not ended and yield their deltas.

        Raises:
          NonFiniteError: a sequence goes on, but its last logits are not finite.
          PromptError: a guide allowed no token for the newest one.
        """
        finite = np.asarray(result.new.finite)
        outputs = zip(self.sequences, self._guides, self.chosen, self._record(result), strict=True)
        for sequence, guide, chosen, new in outputs:
            if not new or sequence.finish_reason is not None:
                continue
            broken = not finite[sequence.index, len(new) - 1]
            full = not broken and len(chosen) >= self.request.max_new_tokens
            tokens = new[: len(new) - broken]
            if guide is not None:
                guide.accept(tokens)
            complete = guide is not None and guide.is_complete
            delta = sequence.append(tokens, full=full, complete=complete)
            if delta is not None:
                yield delta
            if broken and sequence.finish_reason is None:
                dtype = self.model.network.dtype.name
                raise NonFiniteError(f"prompts[{sequence.index}]: logits are", dtype)

    def _record(self, result: SampledTokens) -> list[list[int]]:
        """Add new tokens to `chosen` and return those of each sequence."""
        tokens, counts = np.asarray(result.tokens), np.asarray(result.counts)
        new = [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]
        for chosen, more in zip(self.chosen, new, strict=True):
            chosen += more
        return new
