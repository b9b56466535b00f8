"""Models with random weights on a mesh, and a side that reads and decodes with them."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.model.models import InOneCall, capacity_for, random_codes
from benchmarks.random_weights import random_tree
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.config import ModelConfig
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.model.params import embedding_shapes, layer_shapes
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.layers import cache_sharding
from zdc_jax.parallel.payload import Payload, scale_for
from zdc_jax.parallel.weights import WeightPlacement
from zdc_jax.plan import CompressionPlan


class Model:
    """Random weights with a random basis after the rotary embedding, equal on every device.

    Each device makes its own weights, so nothing comes from the host. The networks of the methods share these
    arrays where dtype and layout agree, so no device stores them twice. A plan may cover only the first
    layers. Layers get a basis only if the plan has a window.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        on_each = partial(
            jax.shard_map, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
        layer, ends = jax.jit(on_each(self._layer)), jax.jit(on_each(self._ends))
        self.embeddings = ends(np.int32(0))
        self.layers = [layer(np.int32(1 + index)) for index in range(config.num_layers)]
        jax.block_until_ready(self.layers)

    def on_mesh(
        self,
        plan: CompressionPlan,
        weights: WeightPlacement = "replicated",
        payload: Payload = "native",
        *,
        decodes: bool = False,
    ) -> Transformer:
        """Return a network for prompts, and for single tokens if it `decodes`.

        Gathered weights and weights for decoding are stored in addition to the replicated ones.
        """
        scales = random_scales(self.config) if payload == "float8" else {}
        scaled = ({**layer, "attention": layer["attention"] | scales} for layer in self._of(plan))
        options: Any = {"weights": weights, "payload": payload, "decodes": decodes}
        return Transformer(self._cut(plan), plan, self.embeddings, scaled, self.mesh, **options)

    def on_each(self, plan: CompressionPlan) -> Transformer:
        """Return a network of arrays that every device stores, to be placed on single devices."""
        return Transformer(self._cut(plan), plan, self.embeddings, self._of(plan))

    def on_first(self, plan: CompressionPlan, dtype: str) -> Transformer:
        """Return a network on this process's first device, converted to `dtype`."""

        def local(tree):
            return jax.tree.map(lambda x: x.addressable_data(0).astype(dtype), tree)

        config = replace(self._cut(plan), dtype=dtype)
        return Transformer(config, plan, local(self.embeddings), map(local, self._of(plan)))

    def _cut(self, plan: CompressionPlan) -> ModelConfig:
        """Return the model with as many layers as the plan has."""
        return replace(self.config, layers=self.config.layers[: len(plan.layers)])

    def _ends(self, seed: jax.Array) -> Any:
        return random_tree(embedding_shapes(self.config), self.config, jax.random.key(seed))

    def _layer(self, seed: jax.Array) -> Any:
        config, key = self.config, jax.random.key(seed)
        weights = random_tree(layer_shapes(config, 0), config, key)
        shape = (config.num_kv_heads, config.head_dim, config.head_dim)
        basis = jnp.linalg.qr(jax.random.normal(key, shape))[0].astype(jnp.float16)
        weights["attention"] |= {"q_rotation": basis, "k_rotation": basis}
        return weights

    def _of(self, plan: CompressionPlan) -> Iterator[Any]:
        for layer, _ in zip(self.layers, plan.layers, strict=False):
            attention = layer["attention"]
            if not any(plan.near(0)):
                attention = {name: x for name, x in attention.items() if "rotation" not in name}
            yield {**layer, "attention": attention}


def random_scales(config: ModelConfig) -> dict[str, jax.Array]:
    """Return scales of a float8 payload for random weights.

    Inputs are normalized to a mean square of 1, weights are N(0, 0.02²), and the basis is orthogonal. So all
    coordinates have the same mean square.
    """
    rms = np.full((config.num_kv_heads, config.head_dim), 0.02 * config.embed_dim**0.5)
    scale = jnp.asarray(scale_for(rms), config.dtype)
    return {"q_scale": scale, "k_scale": scale, "v_scale": scale}


class OnMesh:
    """Side that reads whole prompts divided by token, and decodes with the cache divided by head.

    Attributes:
      implementation: implementation of attention; `cudnn` decodes nothing.
    """

    def __init__(self, network: Transformer, implementation: Implementation):
        self.network, self.implementation = network, implementation
        self.decode = InOneCall(network, implementation)

    def cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache."""
        return self.network.new_cache(batch=batch, capacity=capacity)

    def prefill(self, cache: KVCache, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
        """Return the first token of each sequence and a new cache; the given `cache` is deleted."""
        for leaf in jax.tree.leaves(cache):  # Memory may not hold both caches.
            leaf.delete()
        end = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
        how: Any = {"capacity": cache.capacity, "implementation": self.implementation}
        last, filled = self.network.prefill(tokens, end, **how)
        return _chosen(self.network.embeddings, last), filled

    def filled(self, cache: KVCache, length: int) -> KVCache:
        """Return the cache as if it stored `length` tokens: random quantized values, or zeros."""
        keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(cache))))

        # One at a time: each pending array waits 10 s for memory that is not there.
        def codes(leaf, where):
            return jax.block_until_ready(_random_codes(leaf, next(keys), where))

        def drawn(leaf, where):
            return codes(leaf, where) if leaf.dtype == jnp.uint8 else leaf

        divided = self._divided(cache)
        layers = jax.tree.map(drawn, cache.layers, divided.layers)
        full = replace(cache, layers=layers, lengths=jnp.full_like(cache.lengths, length))
        return jax.device_put(full, divided)

    def compile(self, prompts: Sequence[int], batches: Mapping[int, Sequence[int]]) -> None:
        """Compile, in threads, the programs for prompts of these lengths and for batches at each length.

        Tracing and lowering hold Python's lock, so only compilation is parallel.
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
        """Return the sharding of each array of the cache."""
        return jax.tree.map(partial(cache_sharding, self.network.mesh), cache)


@partial(jax.jit, donate_argnums=0, static_argnames="where")
def _random_codes(codes: jax.Array, key: jax.Array, where: NamedSharding) -> jax.Array:
    """Replace zeros by random codes of the same layout."""
    return jax.lax.with_sharding_constraint(random_codes(codes, key), where)


@jax.jit
def _chosen(embeddings: Embeddings, last: jax.Array) -> jax.Array:
    """Return the likeliest token [B, 1] after hidden states [B, D]."""
    return embeddings.unembed(last).argmax(-1).astype(jnp.int32)[:, None]
