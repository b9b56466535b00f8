"""A model of a well-known shape on a mesh, as the other benchmarks of whole models take one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.bench_coded_models import any_codes
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.model.transformer import Embeddings
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.transformer import ShardedTransformer


class OnMesh:
    """Prompts read whole, their tokens divided; then tokens on the cache that they leave, divided by head.

    implementation: of attention; with `cudnn` nothing is decoded.
    """

    def __init__(self, network: ShardedTransformer, implementation: Implementation):
        self.network, self.implementation = network, implementation
        self.leaves, self.tree = jax.tree.flatten(network)
        self._step: Callable[..., Any] = jax.jit(self._decoded, donate_argnums=1)

    def cache(self, batch: int, capacity: int) -> KVCache:
        """Empty."""
        return self.network.new_cache(batch=batch, capacity=capacity)

    def prefill(self, cache: KVCache, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
        """The first token of each row, and a new cache of the capacity of `cache`."""
        end = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
        how: Any = {"capacity": cache.capacity, "implementation": self.implementation}
        last, held = self.network.prefill(tokens, end, **how)
        return _chosen(self.network.embeddings, last), held

    def decode(self, cache: KVCache, token: jax.Array) -> tuple[jax.Array, KVCache]:
        """The next token of each row."""
        return self._step(self.leaves, cache, token)

    def filled(self, cache: KVCache, length: int) -> KVCache:
        """As if `length` tokens were held: random codes, or zeros; time does not depend on numbers."""
        keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(cache))))
        codes = lambda leaf: any_codes(leaf, next(keys)) if leaf.dtype == jnp.uint8 else leaf
        layers = jax.tree.map(codes, cache.layers)
        return replace(cache, layers=layers, lengths=jnp.full_like(cache.lengths, length))

    def _decoded(self, leaves: Any, cache: KVCache, token: jax.Array) -> tuple[jax.Array, KVCache]:
        network = jax.tree.unflatten(self.tree, leaves)
        hidden, cache = network.extend(cache, token, cache.lengths + 1, self.implementation)
        return _chosen(network.embeddings, hidden[:, -1]), cache


@jax.jit
def _chosen(embeddings: Embeddings, last: jax.Array) -> jax.Array:
    """The likeliest token [B, 1] after hidden states [B, D]."""
    return embeddings.unembed(last).argmax(-1).astype(jnp.int32)[:, None]
