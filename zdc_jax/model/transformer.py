"""The decoder-only transformer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache, check_fits, free_bytes
from zdc_jax.cache.spec import Call, LayerCacheSpec, State, own_heads
from zdc_jax.config import ModelConfig
from zdc_jax.model.block import Block, of_each
from zdc_jax.model.layers import Norm, Reduce, param, unreduced
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.contract import einsum_f32, in_two_rows
from zdc_jax.ops.rotary import UnturnedKeys
from zdc_jax.plan import CompressionPlan


class Embeddings(nnx.Module):
    """What is at both ends: embeddings of tokens (and learned positions), final norm and head."""

    def __init__(self, weights: Mapping[str, Any], config: ModelConfig):
        self.tokens = nnx.Param(weights["tokens"])
        self.positions = param(weights, "positions")
        self.project_in = param(weights, "project_in")
        self.project_out = param(weights, "project_out")
        self.final_norm = Norm(weights["final_norm"], config) if config.final_norm else None
        self.lm_head = param(weights, "lm_head")
        self.position_offset = config.position_offset or 0
        self.scale, self.logit_divisor = config.embed_scale, config.logit_divisor

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token (and learned position) embeddings."""
        x = self.tokens[...][tokens]
        if self.scale != 1:
            x *= jnp.asarray(self.scale, x.dtype)
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
        logits = einsum_f32("...D,VD->...V", x, head)
        return logits if self.logit_divisor == 1 else logits / self.logit_divisor


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
        blocks = zip(layers, config.layers, strict=True)
        self.layers = nnx.List(
            [Block(jax.tree.map(jnp.asarray, layer), config, spec) for layer, spec in blocks]
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights, activations and cache."""
        return self.embeddings.tokens[...].dtype

    @property
    def layer_caches(self) -> tuple[LayerCacheSpec, ...]:
        """How each layer keeps its tokens under this plan."""
        return self.plan.layer_caches(self.dtype.name)

    @property
    def device_caches(self) -> tuple[LayerCacheSpec, ...]:
        """`layer_caches` of the heads that one device holds: here all."""
        return self.layer_caches

    def new_cache(
        self, *, batch: int, capacity: int, specs: tuple[LayerCacheSpec, ...] | None = None
    ) -> KVCache:
        """An empty cache for `batch` rows of up to `capacity` tokens; raises as `KVCache.create` does.

        specs: default `layer_caches`.
        """
        return KVCache.create(specs or self.layer_caches, batch=batch, capacity=capacity)

    def hidden(
        self, tokens: Int[Array, "B T"], implementation: Implementation | None = None
    ) -> Float[Array, "B T D"]:
        """Last hidden states of whole sequences, without a cache."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x, aux = self.embeddings.embed(tokens, positions), None
        for block, spec in zip(self.layers, self.layer_caches, strict=True):
            x, aux = _whole_layer(block, spec, x, positions, aux, implementation)
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
          tokens: padded on the right; token i of row b stands at position `cache.lengths[b] + i`. Rows may
            begin anywhere; where a method asks for pieces that begin at multiples of its `alignment`, others
            give NaN.
          end: tokens each row holds afterwards, at most the capacity; positions from `end[b]` on are padding
            and are not stored.

        Returns:
          hidden states (those of padding are unspecified) and the longer cache.
        """
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        x, aux = in_two_rows(self.embeddings.embed(tokens, positions)), None
        states = list(cache.layers)
        for index, (block, spec) in enumerate(zip(self.layers, cache.specs, strict=True)):
            given = x, states[index], aux, positions, end, implementation
            x, states[index], aux = _extended_layer(block, spec, *given, table=cache.table)
        return x[: len(tokens)], replace(cache, layers=tuple(states), lengths=end)

    def read_prompt(
        self,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        *,
        capacity: int,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Reads whole prompts exactly, and only then compresses: what is left is a cache like any other.

        Within the prompt tokens see one another as the checkpoint means it, with all coordinates that the
        projections give (a plan without sinks and window cuts those). `extend` lets prompts see themselves
        through the cache instead.

        Args:
          tokens: padded on the right. end: tokens of each row.
          capacity: tokens that each row of the cache has room for.

        Returns:
          hidden states (those of padding are unspecified) and the cache.

        Raises:
          CacheMemoryError: the cache does not fit.
        """
        specs, batch = self.layer_caches, tokens.shape[0]
        check_fits(specs, batch=batch, capacity=capacity, free=free_bytes())
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x, states = self.embeddings.embed(tokens, positions), []
        for block, spec in zip(self.layers, specs, strict=True):
            x, state = _prompt_layer(block, spec, x, positions, end, capacity)
            states.append(state)
        return x, KVCache(tuple(states), end, specs, capacity)


@partial(jax.jit, static_argnames=("spec", "capacity"))
def _prompt_layer(
    block: Block, spec: LayerCacheSpec, x: Array, positions: Array, end: Array, capacity: int
) -> tuple[Array, State]:
    """One layer on whole prompts that see themselves exactly, and what its cache keeps of them."""
    call = Call(block.attention.scale)

    def attend(q: Array, k: Any, v: Array) -> tuple[Array, State]:
        if isinstance(k, UnturnedKeys):
            q, k = k.rotated(q, None)
        o, lse = block.attention.attend(q, k, v)
        return o, spec.keep_prompt(q, k, v, lse, positions, end, capacity, call)

    return block(x, positions, attend, project=partial(spec.project, aux=None))


@partial(jax.jit, static_argnames=("spec", "implementation"))
def _whole_layer(
    block: Block,
    spec: LayerCacheSpec,
    x: Array,
    positions: Array,
    aux: Any,
    implementation: Implementation | None,
) -> tuple[Array, Any]:
    """One layer on whole sequences. Jitted, so that layers alike are traced and compiled once."""
    call = Call(block.attention.scale, implementation)

    def attend(q: Array, k: Any, v: Any) -> tuple[Array, Any]:
        done = spec.attend_whole(q, k, v, positions, aux, call)
        return done.o, done.aux

    return block(x, positions, attend, implementation, partial(spec.project, aux=aux))


def extend_layer(
    block: Block,
    spec: LayerCacheSpec,
    x: Array,
    state: State,
    aux: Any,
    positions: Array,
    end: Array,
    implementation: Implementation | None,
    all_heads: Callable[[Array], Array] = own_heads,
    reduce: Reduce = unreduced,
    table: Array | None = None,
) -> tuple[Array, State, Any]:
    """One layer on new tokens x [B, T, D], its cache with them, and what it hands on.

    x may be `in_two_rows`: weights see both, attention and the cache the first.
    See `LayerCacheSpec.attend`; all_heads and table: as in `Call`; reduce: as `Block` takes it.
    """
    call = Call(block.attention.scale, implementation, all_heads, table)
    own, rows = positions, len(end)

    def attend(q: Array, k: Any, v: Array) -> tuple[Array, tuple[State, Any]]:
        q, k, v = of_each(lambda given: given[:rows], q, k, v)
        done = spec.attend(state, q, k, v, own, end, aux, call)
        o = jnp.broadcast_to(done.o, (len(x), *done.o.shape[1:]))
        return o, (done.state, done.aux)

    positions = jnp.broadcast_to(own, (len(x), own.shape[1]))
    x, (state, aux) = block(x, positions, attend, implementation, partial(spec.project, aux=aux), reduce)
    return x, state, aux


_extended_layer = jax.jit(extend_layer, static_argnames=("spec", "implementation"))
