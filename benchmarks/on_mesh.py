"""A model of a well-known shape on a mesh, as the other benchmarks of whole models take one."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from benchmarks.bench_coded_models import any_codes
from benchmarks.bench_generate import capacity_for
from benchmarks.one_call import InOneCall
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.model.transformer import Embeddings
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.transformer import ShardedTransformer, cache_sharding


class OnMesh:
    """Prompts read whole, their tokens divided; then tokens on the cache that they leave, divided by head.

    implementation: of attention; with `cudnn` nothing is decoded.
    """

    def __init__(self, network: ShardedTransformer, implementation: Implementation):
        self.network, self.implementation = network, implementation
        self.decode = InOneCall(network, implementation)

    def cache(self, batch: int, capacity: int) -> KVCache:
        """Empty."""
        return self.network.new_cache(batch=batch, capacity=capacity)

    def prefill(self, cache: KVCache, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
        """The first token of each row, and a new cache of the capacity of `cache`, which is given up."""
        for leaf in jax.tree.leaves(cache):  # Else both were held, which two H100 cannot for Llama-2-7B.
            leaf.delete()
        end = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
        how: Any = {"capacity": cache.capacity, "implementation": self.implementation}
        last, held = self.network.prefill(tokens, end, **how)
        return _chosen(self.network.embeddings, last), held

    def filled(self, cache: KVCache, length: int) -> KVCache:
        """As if `length` tokens were held: random codes, or zeros; time does not depend on numbers."""
        keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(cache))))

        # One at a time: memory that cannot be had is awaited for 10 s by each that is under way.
        def codes(leaf, where):
            return jax.block_until_ready(_any_codes(leaf, next(keys), where))

        def drawn(leaf, where):
            return codes(leaf, where) if leaf.dtype == jnp.uint8 else leaf

        divided = self._divided(cache)
        layers = jax.tree.map(drawn, cache.layers, divided.layers)
        full = replace(cache, layers=layers, lengths=jnp.full_like(cache.lengths, length))
        return jax.device_put(full, divided)

    def compile(self, prompts: Sequence[int], batches: Mapping[int, Sequence[int]]) -> None:
        """What reads prompts of these lengths, and decodes so many rows of each length: at once, in threads.

        Tracing and lowering are Python's, for which threads wait for each other.
        """
        with ThreadPoolExecutor() as threads:
            jobs = [threads.submit(self._compile_prefill, length) for length in prompts]
            jobs += [threads.submit(self._compile_step, B, S) for S, rows in batches.items() for B in rows]
        for job in jobs:
            job.result()

    def _compile_prefill(self, length: int) -> None:
        tokens, end = jnp.zeros((1, length), jnp.int32), jnp.full(1, length, jnp.int32)
        how: Any = {"capacity": capacity_for(length), "implementation": self.implementation}
        self.network.compile_prefill(tokens, end, **how)

    def _compile_step(self, batch: int, length: int) -> None:
        cache = jax.eval_shape(lambda: self.cache(batch, capacity_for(length)))

        def shaped(leaf, where):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        self.decode.compile(jax.tree.map(shaped, cache, self._divided(cache)))

    def _divided(self, cache: KVCache) -> KVCache:
        """Where each of its arrays lies."""
        return jax.tree.map(partial(cache_sharding, self.network.mesh), cache)


@partial(jax.jit, donate_argnums=0, static_argnames="where")
def _any_codes(codes: jax.Array, key: jax.Array, where: NamedSharding) -> jax.Array:
    """In the place of zeros, and divided as they are."""
    return jax.lax.with_sharding_constraint(any_codes(codes, key), where)


@jax.jit
def _chosen(embeddings: Embeddings, last: jax.Array) -> jax.Array:
    """The likeliest token [B, 1] after hidden states [B, D]."""
    return embeddings.unembed(last).argmax(-1).astype(jnp.int32)[:, None]
