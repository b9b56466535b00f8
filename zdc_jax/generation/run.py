"""One call of `generate` or `stream` on its way: prefill, then decode until every row has ended."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.generation.compile_time import compile_seconds
from zdc_jax.generation.request import Request, capacity_for
from zdc_jax.generation.results import Delta, Generation, Timings
from zdc_jax.generation.sampling import SamplingArrays
from zdc_jax.generation.steps import (
    MAX_STOP_TOKENS,
    DecodeState,
    bucket,
    decode,
    prefill,
    prefill_on_mesh,
)
from zdc_jax.generation.stopping import Row, StopStrings
from zdc_jax.loading import LanguageModel
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.transformer import ShardedTransformer


class Run:
    """Compiled steps for one request, and the rows that their tokens go to.

    cache: one of the request's capacity that holds the first tokens of each prompt, see `prefill`; the run
    takes it over. Default an empty one. state: what an ended run leaves, None before.
    """

    def __init__(
        self,
        model: LanguageModel,
        request: Request,
        implementation: Implementation | None,
        cache: KVCache | None = None,
    ):
        self.model, self.request, self.implementation = model, request, implementation
        self.cache = cache
        self.state: DecodeState | None = None
        self.sampling = SamplingArrays.of(request.samplings, request.prompts, model.config.vocab_size)
        padding = [-1] * (MAX_STOP_TOKENS - len(request.stop_ids))  # Equals no token.
        self.stop_tokens = jnp.array([*request.stop_ids, *padding], jnp.int32)
        given = model.tokenizer, request.stop_ids, StopStrings(request.stop)
        self.rows = [Row(index, *given) for index in range(len(request.prompts))]
        self.seconds = {"prefill": 0.0, "decode": 0.0, "compile": 0.0}
        self.kv_bytes = 0

    def deltas(self, steps: int) -> Iterator[Delta]:
        """What is new in each row after prefill and after each `steps` tokens, until all rows have ended."""
        with self._timed("prefill"):
            state = jax.block_until_ready(self._prefill())
        while True:
            yield from self._take(state)
            ended = np.array([row.finish_reason is not None for row in self.rows])
            if ended.all():
                self.state = state
                return
            with self._timed("decode"):
                if self.request.stop:  # The device knows stop tokens only.
                    state = replace(state, done=jax.device_put(ended, state.done.sharding))
                state = jax.block_until_ready(self._decode(state, steps))

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

    def _prefill(self) -> DecodeState:
        request, network = self.request, self.model.network
        rest = self.sampling, self.stop_tokens, bucket(request.max_new_tokens)
        if isinstance(network, ShardedTransformer):
            network.check_fits(len(request.prompts), request.capacity)
            longest = max(len(prompt) for prompt in request.prompts)
            width = capacity_for(longest, self.model.config.max_positions)
            given = request.prompts, width, request.capacity, *rest
            state = prefill_on_mesh(network, *given, implementation=self.implementation)
            self.kv_bytes = state.cache.bytes()
            return state
        cache, self.cache = self.cache, None  # Its arrays go into the steps and are no more.
        if cache is None:
            cache = network.new_cache(batch=len(request.prompts), capacity=request.capacity)
        self.kv_bytes = cache.bytes()
        return prefill(
            network,
            cache,
            request.prompts,
            *rest,
            chunk=request.prefill_chunk,
            implementation=self.implementation,
        )

    def _decode(self, state: DecodeState, steps: int) -> DecodeState:
        limit = jnp.int32(min(self.request.max_new_tokens, int(state.count.max()) + steps))
        given = self.sampling, self.stop_tokens
        return decode(self.model.network, state, limit, *given, implementation=self.implementation)

    def _take(self, state: DecodeState) -> Iterator[Delta]:
        """Gives the rows that have not ended their new tokens."""
        tokens, count = np.asarray(state.tokens), np.asarray(state.count)
        for row in self.rows:
            if row.finish_reason is None:
                new = tokens[row.index, len(row.tokens) : count[row.index]].tolist()
                delta = row.take(new, full=bool(count[row.index] >= self.request.max_new_tokens))
                if delta is not None:
                    yield delta
