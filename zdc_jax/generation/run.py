"""One call of `generate` or `stream` on its way: prefill, then decode until every row has ended."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.generation.compile_time import compile_seconds
from zdc_jax.generation.request import Request, capacity_for
from zdc_jax.generation.results import Delta, Generation, Timings
from zdc_jax.generation.row_numbers import row_numbers
from zdc_jax.generation.sampling import request_keys
from zdc_jax.generation.steps import Chosen, DecodeState, Flat, bucket, decode, first, padded, read
from zdc_jax.generation.stopping import Row, StopStrings
from zdc_jax.loading import LanguageModel
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.mesh import whole_on
from zdc_jax.parallel.transformer import ShardedTransformer


class Run:
    """The steps of one request, and the rows that their tokens go to.

    cache: one of the request's capacity that holds the first tokens of each prompt, but not all of any; the
    run takes it over. Default an empty one. state: what an ended run leaves, None before. chosen: tokens
    of each row that were looked at; `settled` has all.
    """

    def __init__(
        self,
        model: LanguageModel,
        request: Request,
        implementation: Implementation | None,
        cache: KVCache | None = None,
    ):
        self.model, self.request, self.cache = model, request, cache
        self.flat = Flat.of(model.network)
        self.state: DecodeState | None = None
        self._ahead: list[Chosen] = []
        keys = request_keys(request.samplings, request.prompts)
        given = zip(request.prompts, request.samplings, keys, strict=True)
        self.numbers = np.stack(
            [
                row_numbers(len(prompt), request.max_new_tokens, request.stop_ids, sampling, key)
                for prompt, sampling, key in given
            ]
        )
        greedy = all(sampling.temperature == 0 for sampling in request.samplings)
        self.how: dict[str, Any] = {"choice": "greedy" if greedy else "any", "implementation": implementation}
        stopping = model.tokenizer, request.stop_ids, StopStrings(request.stop)
        self.rows = [Row(index, *stopping) for index in range(len(request.prompts))]
        self.chosen: list[list[int]] = [[] for _ in request.prompts]
        self.seconds = {"prefill": 0.0, "decode": 0.0, "compile": 0.0}
        self.kv_bytes = 0

    def deltas(self, steps: int) -> Iterator[Delta]:
        """What is new in each row after prefill and after each `steps` tokens, until all rows have ended.

        Where a call returns before its tokens are there, the next ones are asked for at once, so that the
        device need not wait for the host. What it makes behind a stop is discarded. On a mesh each piece has
        all its `steps`, also where fewer are wanted.
        """
        with self._timed("prefill"):
            state, made = jax.block_until_ready(self._prefill())
        for chosen in made:
            yield from self._take(chosen)
        ahead: list[Chosen] = []
        while (wanted := self._unfinished()).any():
            with self._timed("decode"):
                while not ahead or (
                    len(ahead) == 1 and self._goes_on(steps) and self._may_ask_ahead(ahead[0])
                ):
                    state, chosen = self._decode(state, wanted, steps)
                    ahead.append(chosen)
                chosen = jax.block_until_ready(ahead.pop(0))
            yield from self._take(chosen)
        self.state, self._ahead = state, ahead

    def settled(self) -> tuple[list[list[int]], DecodeState]:
        """All tokens of each row, and the state that they left, once every row has ended.

        Tokens behind a stop string are among them; for those that are still made it waits.
        """
        assert self.state is not None, "not run to its end"
        while self._ahead:
            self._keep(self._ahead.pop())
        return self.chosen, self.state

    def result(self) -> Generation:
        """All completions, once every row has ended."""
        completions = tuple(row.completion() for row in self.rows)
        return Generation(completions, self.kv_bytes, self.request.capacity, Timings(**self.seconds))

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began, compiled = time.perf_counter(), compile_seconds()
        yield
        self.seconds[stage] += time.perf_counter() - began
        self.seconds["compile"] += compile_seconds() - compiled

    def _prefill(self) -> tuple[DecodeState, list[Chosen]]:
        """Reads all prompts; a piece gives the first tokens of those that end in it."""
        request, network = self.request, self.model.network
        lengths = np.array([len(prompt) for prompt in request.prompts], np.int32)
        if isinstance(network, ShardedTransformer):
            network.check_fits(len(lengths), request.capacity)
            state, chosen = self._prefill_on_mesh(network, lengths)
            self.kv_bytes = state.cache.bytes()
            return state, [chosen]
        cache, self.cache = self.cache, None  # Its arrays go into the steps and are no more.
        if cache is None:
            cache = network.new_cache(batch=len(lengths), capacity=request.capacity)
        self.kv_bytes, held = cache.bytes(), np.asarray(cache.lengths)
        state, made, longest = DecodeState.of(cache), [], int((lengths - held).max())
        for start in range(0, longest, request.prefill_chunk):
            width = min(bucket(longest - start), request.prefill_chunk, cache.capacity)
            left = lengths - held - start
            tokens = padded(
                [p[at:][:width] for p, at in zip(request.prompts, held + start, strict=True)], width
            )
            count, ends = np.clip(left, 0, width), (left > 0) & (left <= width)
            state, chosen = read(self.flat, state, tokens, count, ends, self.numbers, **self.how)
            made.append(chosen)
        return state, made

    def _prefill_on_mesh(
        self, network: ShardedTransformer, lengths: np.ndarray
    ) -> tuple[DecodeState, Chosen]:
        """Whole prompts; their tokens are divided, and then the cache by head."""
        request = self.request
        width = capacity_for(int(lengths.max()), self.model.config.max_positions)
        hidden, cache = network.prefill(
            jnp.asarray(padded(request.prompts, width)),
            jnp.asarray(lengths),
            capacity=request.capacity,
            implementation=self.how["implementation"],
        )
        state, ends = DecodeState.of(cache, whole_on(network.mesh)), np.ones(len(lengths), bool)
        return first(self.flat, state, hidden, ends, self.numbers, choice=self.how["choice"])

    def _decode(self, state: DecodeState, wanted: np.ndarray, steps: int) -> tuple[DecodeState, Chosen]:
        """At most so many more tokens of the rows that are wanted."""
        given = self.flat, state, wanted, self.numbers
        if self._on_mesh and steps < self.request.max_new_tokens:
            return decode(*given, None, steps=steps, **self.how)
        return decode(*given, np.int32(steps), steps=bucket(steps), **self.how)

    @property
    def _on_mesh(self) -> bool:
        return isinstance(self.model.network, ShardedTransformer)

    def _unfinished(self) -> np.ndarray:
        """Rows [B] that have not ended."""
        return np.array([row.finish_reason is None for row in self.rows])

    def _goes_on(self, steps: int) -> bool:
        """Whether more than `steps` tokens may be to come."""
        most = self.request.max_new_tokens - steps
        rows = zip(self.rows, self.chosen, strict=True)
        return any(row.finish_reason is None and len(chosen) < most for row, chosen in rows)

    def _may_ask_ahead(self, asked: Chosen) -> bool:
        """Whether the device is still at these tokens, though the call that asked for them has returned.

        On a mesh it always may: pieces ask the host nothing there, and several processes must make the same
        calls, whoever is faster.
        """
        made: Any = asked.made  # JAX's stubs have no `is_ready`.
        return self._on_mesh or not made.is_ready()

    def _take(self, step: Chosen) -> Iterator[Delta]:
        """Gives the rows that have not ended their new tokens."""
        for row, chosen, new in zip(self.rows, self.chosen, self._keep(step), strict=True):
            if new and row.finish_reason is None:
                delta = row.take(new, full=len(chosen) >= self.request.max_new_tokens)
                if delta is not None:
                    yield delta

    def _keep(self, step: Chosen) -> list[list[int]]:
        """The new tokens of each row, which become part of `chosen`."""
        tokens, made = np.asarray(step.tokens), np.asarray(step.made)
        new = [row[:count].tolist() for row, count in zip(tokens, made, strict=True)]
        for chosen, more in zip(self.chosen, new, strict=True):
            chosen += more
        return new
