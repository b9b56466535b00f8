"""The decoder-only transformer of both families."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.classes import GroupState
from zdc_jax.cache.prefix_ring import ClassLayerCache, KVCache, LayerCache, cached_attention
from zdc_jax.config import ModelConfig
from zdc_jax.model.block import Block
from zdc_jax.model.classes import Arrangement, class_layer, extend_groups
from zdc_jax.model.layers import Norm, param
from zdc_jax.ops.attention import Implementation, self_attention
from zdc_jax.ops.contract import einsum_f32
from zdc_jax.plan import CompressionPlan, LayerRanks, TokenClasses


class Embeddings(nnx.Module):
    """What is at both ends: embeddings of tokens (and learned positions), final norm and head."""

    def __init__(self, weights: Mapping[str, Any], config: ModelConfig):
        self.tokens = nnx.Param(weights["tokens"])
        self.positions = param(weights, "positions")
        self.project_in = param(weights, "project_in")
        self.project_out = param(weights, "project_out")
        self.final_norm = Norm(weights["final_norm"], config.norm_eps) if config.final_norm else None
        self.lm_head = param(weights, "lm_head")
        self.position_offset = config.position_offset

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token (and learned position) embeddings."""
        x = self.tokens[...][tokens]
        if self.project_in is not None:
            x = x @ self.project_in[...]
        if self.positions is not None:
            x = x + self.positions[...][positions + self.position_offset]
        return x

    def unembed(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Float32 logits."""
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.project_out is not None:
            x = x @ self.project_out[...]
        head = self.tokens[...] if self.lm_head is None else self.lm_head[...]
        return einsum_f32("...D,VD->...V", x, head)


class Transformer(nnx.Module):
    """Embeddings, layers and head; `plan` is that of the arrays (`full` if unmodified).

    Layers are separate arrays and unrolled: a scan over stacked ones copies each layer's weights out of the
    stack before every product, 6 of the 21 to 28 ms of a decoded token (7B, batch 16 at 8K, H200).
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: CompressionPlan,
        embeddings: Mapping[str, Any],
        layers: Iterable[Mapping[str, Any]],
    ):
        """Puts `embeddings` and `layers` (in order, consumed one at a time) on the default device."""
        self.config, self.plan = config, plan
        self.embeddings = Embeddings(jax.tree.map(jnp.asarray, embeddings), config)
        self.layers = nnx.List([Block(jax.tree.map(jnp.asarray, layer), config) for layer in layers])

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights, activations and cache."""
        return self.embeddings.tokens[...].dtype

    def hidden(
        self, tokens: Int[Array, "B T"], implementation: Implementation | None = None
    ) -> Float[Array, "B T D"]:
        """Last hidden states of whole sequences, without a cache."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.embeddings.embed(tokens, positions)
        if self.plan.classes is not None:
            B, T = tokens.shape
            cache = KVCache.create(self.plan, batch=B, capacity=-(-T // 8) * 8, dtype=self.dtype)
            return self.extend(cache, tokens, jnp.full(B, T, jnp.int32), implementation)[0]
        near = (self.plan.sinks, self.plan.window) if self.plan.keeps_full_width else (0, 0)
        for block, ranks in zip(self.layers, self.plan.layers, strict=True):
            x = _whole_layer(block, x, positions, ranks, near, implementation)
        return x

    def __call__(
        self, tokens: Int[Array, "B T"], implementation: Implementation | None = None
    ) -> Float[Array, "B T V"]:
        """Float32 logits of whole sequences, without a cache."""
        return self.embeddings.unembed(self.hidden(tokens, implementation))

    def extend(
        self,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Appends tokens after what the cache holds; serves prefill, chunked prefill and decode.

        Args:
          tokens: padded on the right; token i of row b stands at position `cache.lengths[b] + i`. With T > 1
            all lengths must be equal, and lengths + T, padding included, within the capacity.
          end: tokens each row holds afterwards; positions from `end[b]` on are padding and are not stored.

        Returns:
          hidden states (those of padding are unspecified) and the longer cache.
        """
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        x = self.embeddings.embed(tokens, positions)
        if self.plan.classes is not None:
            return self._extend_groups(self.plan.classes, cache, x, positions, end, implementation)
        near, layers = (cache.sinks, cache.window), list(cache.layers)
        for index, block in enumerate(self.layers):
            layer = cache.layers[index]
            assert isinstance(layer, LayerCache)
            x, layers[index], _ = _extended_layer(block, x, layer, positions, end, near, implementation)
        return x, replace(cache, layers=tuple(layers), lengths=end)

    def _extend_groups(
        self,
        classes: TokenClasses,
        cache: KVCache,
        x: Array,
        positions: Array,
        end: Array,
        implementation: Implementation | None,
    ) -> tuple[Array, KVCache]:
        near = (cache.sinks, cache.window)

        def lead(index: int, x: Array, held: LayerCache) -> tuple[Array, LayerCache, Array]:
            return _extended_layer(self.layers[index], x, held, positions, end, near, implementation)

        def follow(
            index: int,
            x: Array,
            held: ClassLayerCache,
            group: GroupState,
            arrangement: Arrangement,
            first: int,
        ) -> tuple[Array, ClassLayerCache]:
            less, block = self.plan.layers[index], self.layers[index]
            given = (positions, end, first, less, near, implementation)
            return class_layer(block, x, held, group, arrangement, *given)

        return extend_groups(classes, cache, x, positions, end, lead, follow)


@partial(jax.jit, static_argnames=("ranks", "near", "implementation"))
def _whole_layer(
    block: Block,
    x: Array,
    positions: Array,
    ranks: LayerRanks,
    near: tuple[int, int],
    implementation: Implementation | None,
) -> Array:
    """One layer on whole sequences. Jitted, so that layers alike are traced and compiled once."""
    sinks, window = near

    def attend(q: Array, k: Array, v: Array) -> Array:
        o, _ = self_attention(
            q,
            k,
            v,
            scale=block.attention.config.head_dim**-0.5,
            qk_rank=ranks.qk,
            v_rank=ranks.v,
            sinks=sinks,
            window=window,
            implementation=implementation,
        )
        return o

    return block(x, positions, attend, implementation)


@partial(jax.jit, static_argnames=("near", "implementation"))
def _extended_layer(
    block: Block,
    x: Array,
    cache: LayerCache,
    positions: Array,
    end: Array,
    near: tuple[int, int],
    implementation: Implementation | None,
) -> tuple[Array, LayerCache, Array]:
    """One layer on new tokens, its cache with them, and its log-sum-exp. Jitted as `_whole_layer` is."""
    (sinks, window), longer, seen = near, cache, jnp.zeros(())

    def attend(q: Array, k: Array, v: Array) -> Array:
        nonlocal longer, seen
        longer, o, seen = cached_attention(
            q,
            k,
            v,
            cache,
            positions,
            end,
            scale=block.attention.config.head_dim**-0.5,
            sinks=sinks,
            window=window,
            implementation=implementation,
        )
        return o

    x = block(x, positions, attend, implementation)
    return x, longer, seen
