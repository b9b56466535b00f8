"""Tokens as `generate` decodes them, of models that benchmarks make."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.generation.row_numbers import row_numbers
from zdc_jax.generation.sampling import Sampling
from zdc_jax.generation.steps import SMALLEST_BUCKET, DecodeState, Flat, Network, decode
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.mesh import whole_on
from zdc_jax.parallel.transformer import ShardedTransformer

MOST = SMALLEST_BUCKET
"""Tokens that a call has room for, as `generate`'s smallest program has."""


class InOneCall:
    """Decodes greedy tokens of all rows, however many in one call."""

    def __init__(self, network: Network, implementation: Implementation):
        self._flat = Flat.of(network)
        self._where = whole_on(network.mesh) if isinstance(network, ShardedTransformer) else None
        self._how: Any = {"steps": MOST, "choice": "greedy", "implementation": implementation}

    def __call__(self, cache: KVCache, token: jax.Array, count: int) -> tuple[jax.Array, KVCache]:
        """The last of `count` more tokens of each row, and the cache; token: int32 [B, 1].

        Raises:
          ValueError: more than `MOST`.
        """
        if count > MOST:
            raise ValueError(f"{count=} must be <= {MOST}")
        ended = jnp.zeros(len(token), bool)
        state = DecodeState(cache, *jax.device_put((token[:, 0], ended), self._where))
        state, _ = decode(*self._asked(state, count), **self._how)
        return state.last[:, None], state.cache

    def compile(self, cache: KVCache) -> None:
        """For a cache of these shapes."""

        def like(dtype):
            return jax.ShapeDtypeStruct(cache.lengths.shape, dtype, sharding=self._where)

        state = DecodeState(cache, like(jnp.int32), like(bool))
        decode.lower(*self._asked(state, 1), **self._how).compile()

    def _asked(self, state: DecodeState, count: int) -> tuple[Any, ...]:
        """What `decode` takes where all rows are wanted, and only the cache's end ends them."""
        batch, room = len(state.last), state.cache.capacity
        numbers = row_numbers(1, room, (), Sampling(), np.zeros(2, np.uint32))
        return self._flat, state, np.ones(batch, bool), np.tile(numbers, (batch, 1)), np.int32(count)
