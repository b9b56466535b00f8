"""Decoder-only transformer with a compressed KV cache."""

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
from zdc_jax.model.block import Block, map_tokens
from zdc_jax.model.layers import Norm, Reduce, param, skip_reduction
from zdc_jax.model.tiles import attend_one_by_one, by_tiles
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.contract import duplicate_single_token, einsum_f32
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.plan import CompressionPlan


class Embeddings(nnx.Module):
    """Token embeddings (and learned positions), final norm and output head."""

    def __init__(self, weights: Mapping[str, Any], config: ModelConfig, *, reproducible: bool = False):
        """Create them; `reproducible` as in `Transformer`."""
        self.reproducible = reproducible
        self.tokens = nnx.Param(weights["tokens"])
        self.positions = param(weights, "positions")
        self.project_in = param(weights, "project_in")
        self.project_out = param(weights, "project_out")
        self.final_norm = Norm(weights["final_norm"], config) if config.final_norm else None
        self.lm_head = param(weights, "lm_head")
        self.position_offset = config.position_offset or 0
        self.scale, self.logit_divisor = config.embed_scale, config.logit_divisor

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return embeddings of tokens, with learned positions where the model has them."""
        x = self.tokens[...][tokens]
        if self.scale != 1:
            x *= jnp.asarray(self.scale, x.dtype)
        if self.project_in is not None:
            matrix = self.project_in[...]
            x = by_tiles(lambda x: x @ matrix, x) if self.reproducible else x @ matrix
        if self.positions is not None:
            x = x + self.positions[...][positions + self.position_offset]
        return x

    def unembed(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Return float32 logits."""
        if not self.reproducible:
            return self._compute_logits(x)
        return by_tiles(self._compute_logits, x.reshape(1, -1, x.shape[-1])).reshape(*x.shape[:-1], -1)

    def _compute_logits(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.project_out is not None:
            x = x @ self.project_out[...]
        head = self.tokens[...] if self.lm_head is None else self.lm_head[...]
        logits = einsum_f32("...D,VD->...V", x, head)
        return logits if self.logit_divisor == 1 else logits / self.logit_divisor


class Transformer(nnx.Module):
    """Decoder-only transformer: embeddings, layers and head.

    Layers are separate arrays in an unrolled loop. A scan over stacked layers would copy each layer's weights
    out of the stack before every product, about a quarter of the time of a decoded token.

    Attributes:
      config: architecture of the model.
      plan: compression plan that the weights were prepared for; `full` if unmodified.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: CompressionPlan,
        embeddings: Mapping[str, Any],
        layers: Iterable[Mapping[str, Any]],
        *,
        reproducible: bool = False,
    ):
        """Put weights on the default device; `layers` are consumed in order, one at a time.

        With `reproducible`, the results for a token are those of one arithmetic, whatever else a program
        computes (`zdc_jax.model.tiles`).
        """
        self.config, self.plan = config, plan
        self.embeddings = Embeddings(jax.tree.map(jnp.asarray, embeddings), config, reproducible=reproducible)
        blocks = zip(layers, config.layers, strict=True)
        self.layers = nnx.List(
            [
                Block(jax.tree.map(jnp.asarray, layer), config, spec, reproducible=reproducible)
                for layer, spec in blocks
            ]
        )

    @property
    def reproducible(self) -> bool:
        """Whether the results for a token do not depend on what else a program computes."""
        return self.embeddings.reproducible

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights, activations and cache."""
        return self.embeddings.tokens[...].dtype

    @property
    def layer_caches(self) -> tuple[LayerCacheSpec, ...]:
        """Cache of each layer under the plan."""
        return self.plan.layer_caches(self.dtype.name)

    @property
    def device_caches(self) -> tuple[LayerCacheSpec, ...]:
        """`layer_caches` restricted to the heads of one device; here all heads."""
        return self.layer_caches

    def new_cache(
        self, *, batch: int, capacity: int, specs: tuple[LayerCacheSpec, ...] | None = None
    ) -> KVCache:
        """Create an empty cache for `batch` sequences of up to `capacity` tokens.

        `specs` defaults to `layer_caches`. Errors are those of `KVCache.create`.
        """
        return KVCache.create(specs or self.layer_caches, batch=batch, capacity=capacity)

    def hidden(
        self, tokens: Int[Array, "B T"], implementation: Implementation | None = None
    ) -> Float[Array, "B T D"]:
        """Return the last hidden states of whole sequences, without a cache."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x, aux = self.embeddings.embed(tokens, positions), None
        for block, spec in zip(self.layers, self.layer_caches, strict=True):
            x, aux = _whole_layer(block, spec, x, positions, aux, implementation)
        return x

    def __call__(
        self, tokens: Int[Array, "B T"], implementation: Implementation | None = None
    ) -> Float[Array, "B T V"]:
        """Return float32 logits of whole sequences, without a cache."""
        return self.embeddings.unembed(self.hidden(tokens, implementation))

    def extend(
        self,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Append tokens to the cache: prefill, chunked prefill or decode.

        Args:
          cache: cache of each sequence.
          tokens: padded on the right; token i of sequence b has position `cache.lengths[b] + i`. Sequences
            may begin anywhere. Where a method needs chunks that begin at multiples of its `alignment`, other
            beginnings produce NaN.
          end: length of each sequence afterwards, at most the capacity. Positions from `end[b]` on are
            padding and are not stored.
          implementation: of attention; None chooses.

        Returns:
          Hidden states (unspecified for padding), and the extended cache.
        """
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        x, aux = self.embeddings.embed(tokens, positions), None
        if not self.reproducible:
            x = duplicate_single_token(x)
        states = list(cache.layers)
        for index, (block, spec) in enumerate(zip(self.layers, cache.specs, strict=True)):
            x, states[index], aux = _extend_layer(
                block, spec, x, states[index], aux, positions, end, implementation, table=cache.table
            )
        return x[: len(tokens)], replace(cache, layers=tuple(states), lengths=end)

    def read_prompt(
        self,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        *,
        capacity: int,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Prefill whole prompts with exact attention, then compress them into a new cache.

        Prompt tokens attend to one another as the checkpoint defines it, with all coordinates of the
        projections. A plan without sinks and window cuts those coordinates in the weights. `extend`, in
        contrast, attends to prompts through the compressed cache.

        Args:
          tokens: prompts, padded on the right.
          end: length of each prompt.
          capacity: tokens that the cache can hold for each sequence.

        Returns:
          Hidden states (unspecified for padding), and the cache.

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
    """Run one layer on whole prompts with exact attention; return its output and its compressed cache."""
    call = Call(block.attention.scale)

    def attend(q: Array, k: NewKeys, v: Array) -> tuple[Array, State]:
        q, k = k.rotate(q, None)
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
    """Run one layer on whole sequences. Jitted so that equal layers are traced and compiled once."""
    call = Call(block.attention.scale, implementation)

    def attend(q: Array, k: NewKeys, v: Any) -> tuple[Array, Any]:
        attended = spec.attend_whole(q, k, v, positions, aux, call)
        return attended.o, attended.aux

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
    reduce: Reduce = skip_reduction,
    table: Array | None = None,
) -> tuple[Array, State, Any]:
    """Run one layer on new tokens x [B, T, D]; return its output, extended cache and auxiliary results.

    See `LayerCacheSpec.attend` for the arguments, `Call` for `all_heads` and `table`, and `Block` for
    `reduce`. `x` may come from `duplicate_single_token`: the weights then see two copies, attention and cache
    the first.
    """
    call = Call(block.attention.scale, implementation, all_heads, table)
    batch = len(end)

    def attend(q: Array, k: NewKeys, v: Array) -> tuple[Array, tuple[State, Any]]:
        if block.reproducible:
            rows, ends = (
                jnp.broadcast_to(each[:, None], positions.shape) for each in (jnp.arange(batch), end)
            )
            attended = attend_one_by_one(spec, state, q, k, v, rows, positions, ends, aux, call)
            return attended.o, (attended.state, attended.aux)
        q, k, v = map_tokens(lambda array: array[:batch], q, k, v)
        attended = spec.attend(state, q, k, v, positions, end, aux, call)
        o = jnp.broadcast_to(attended.o, (len(x), *attended.o.shape[1:]))
        return o, (attended.state, attended.aux)

    wide = jnp.broadcast_to(positions, (len(x), positions.shape[1]))
    x, (state, aux) = block(x, wide, attend, implementation, partial(spec.project, aux=aux), reduce)
    return x, state, aux


_extend_layer = jax.jit(extend_layer, static_argnames=("spec", "implementation"))
