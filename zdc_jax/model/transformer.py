"""Decoder-only transformer with a compressed KV cache, on one device or on a mesh."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache, check_fits_now
from zdc_jax.cache.specs.spec import LayerCacheSpec, State
from zdc_jax.config import ModelConfig
from zdc_jax.errors import MeshError
from zdc_jax.model.block import Block, HalfLayer
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.model.run_layer import (
    extend_layer_alone,
    finish_layer,
    read_layer_exactly,
    run_whole_layer,
    start_layer_alone,
)
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.contract import duplicate_single_token
from zdc_jax.parallel.attention import ShardedAttention, check_attention, sharded_attention
from zdc_jax.parallel.coded import check_caches
from zdc_jax.parallel.exchange import kv_copies
from zdc_jax.parallel.layers import (
    check_weights,
    create_cache,
    embed_prompts,
    last_token,
    prompt_layer,
    token_layer,
)
from zdc_jax.parallel.mesh import BY_HEAD, BY_TOKEN, DATA, SEQUENCE, degree, layout, whole_on
from zdc_jax.parallel.payload import Payload, check_payload
from zdc_jax.parallel.weights import WeightPlacement, placed, replicated
from zdc_jax.plan import CompressionPlan


class Transformer(nnx.Module):
    """Decoder-only transformer: embeddings, layers and head, on one device or on a mesh.

    Layers are separate arrays in an unrolled loop. A scan over stacked layers would copy each layer's weights
    out of the stack before every product, about a quarter of the time of a decoded token.

    A mesh divides the batch over `data`, prompt tokens over `sequence`, and heads over `model`. For prompts,
    every device along `sequence` stores all weights (of its share along `model`), or gathers them layer by
    layer. For decoded tokens it also stores a share by head: `sequence` then divides heads like `model`.

    Prompts may exchange q, k, v and o in fewer bits (`zdc_jax.parallel.payload`). The cache then stores the
    first coordinates of keys and values as they arrived, rounded; `coded` replaces those of near tokens by
    unrounded ones. Quantized caches exchange keys and values in their own codes (`zdc_jax.parallel.coded`).

    Attributes:
      config: architecture of the model.
      plan: compression plan that the weights were prepared for; `full` if unmodified.
      mesh: devices that share the work; None for the default device.
      weights: placement of the weights for prompts on a mesh (`zdc_jax.parallel.weights`).
      payload: format in which a mesh exchanges prompts.
      embeddings: embeddings, final norm and head.
      layers: layers in order; on a mesh, their heads are divided over `model` and `sequence`.
    """

    mesh: Mesh | None = None
    _layers_by_token: nnx.List | None = None

    def __init__(
        self,
        config: ModelConfig,
        plan: CompressionPlan,
        embeddings: Mapping[str, Any] | Embeddings,
        layers: Iterable[Mapping[str, Any] | Block],
        mesh: Mesh | None = None,
        *,
        reproducible: bool = False,
        weights: WeightPlacement = "replicated",
        payload: Payload = "native",
        decodes: bool = True,
    ):
        """Put weights, NumPy arrays or on devices, where they are needed.

        Args:
          config: architecture of the model.
          plan: compression plan of the weights.
          embeddings: embeddings, final norm and head.
          layers: layers in order, consumed one at a time.
          mesh: device mesh; None for the default device.
          reproducible: compute the results for a token with one arithmetic, whatever else a program computes
            (`zdc_jax.model.tiles`). Without a mesh only.
          weights: placement of the weights for prompts on a mesh, see `zdc_jax.parallel.weights`.
          payload: payload of the exchange on a mesh; `float8` needs layers prepared for it.
          decodes: whether a mesh stores weights for `extend`.

        Raises:
          MeshError: heads, feed-forward columns or (with `gathered`) the embedding dimension cannot be
            divided over this mesh. Raised before any layer is consumed.
          ValueError: `weights` or `payload` is unknown.
          NotImplementedError: the method's caches cannot be divided by head after an exchange, or `float8` is
            combined with quantized caches.
        """
        self.config, self.plan, self.mesh = config, plan, mesh
        self.weights, self.payload = weights, payload
        if mesh is not None:
            check_payload(payload)
            check_caches(plan, payload, degree(mesh, BY_HEAD))
            check_weights(config, mesh, weights)
        # On a mesh, host arrays must not pass through the default device.
        put = jax.device_put if mesh is None else _leave
        if not isinstance(embeddings, Embeddings):
            embeddings = Embeddings(jax.tree.map(put, embeddings), config, reproducible=reproducible)

        blocks = (
            layer
            if isinstance(layer, Block)
            else Block(jax.tree.map(put, layer), config, spec, reproducible=reproducible)
            for layer, spec in zip(layers, config.layers, strict=True)
        )
        if mesh is None:
            self.embeddings, self.layers = embeddings, nnx.List(blocks)
            return
        self.embeddings = replicated(embeddings, mesh)
        self._layers_by_token = nnx.List([placed(block, mesh, BY_TOKEN, weights) for block in blocks])
        shared = self._layers_by_token if decodes else []
        self.layers = nnx.List([placed(block, mesh, BY_HEAD) for block in shared])

    def on_mesh(
        self, mesh: Mesh, *, weights: WeightPlacement = "replicated", payload: Payload = "native"
    ) -> "Transformer":
        """Return this network of one device on a mesh; errors are those of the constructor."""
        return Transformer(
            self.config, self.plan, self.embeddings, self.layers, mesh, weights=weights, payload=payload
        )

    @property
    def prompt_layers(self) -> Sequence[Block]:
        """Layers that whole prompts run through; on a mesh their tokens are divided over `sequence`."""
        return self.layers if self._layers_by_token is None else self._layers_by_token

    @property
    def on_all_devices(self) -> NamedSharding | None:
        """Sharding of an array that every device of the mesh stores whole; None without a mesh."""
        return None if self.mesh is None else whole_on(self.mesh)

    def count_devices(self, axis: str) -> int:
        """Return the number of devices along an axis of the mesh; 1 without a mesh."""
        return 1 if self.mesh is None else self.mesh.shape[axis]

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
        """`layer_caches` restricted to the heads of one device."""
        if self.mesh is None:
            return self.layer_caches
        shares = degree(self.mesh, BY_HEAD)
        heads = self.config.num_kv_heads * kv_copies(self.config.num_kv_heads, shares) // shares
        return tuple(spec.on_heads(heads) for spec in self.layer_caches)

    def check_fits(self, batch: int, capacity: int) -> None:
        """Raise if such a cache does not fit.

        Raises:
          CacheMemoryError: a device's share exceeds its free memory.
          MeshError: the batch cannot be divided over `data`.
        """
        check_fits_now(self.device_caches, batch=self._local_batch(batch), capacity=capacity)

    def new_cache(
        self,
        *,
        batch: int,
        capacity: int,
        specs: tuple[LayerCacheSpec, ...] | None = None,
        join: bool = False,
    ) -> KVCache:
        """Create an empty cache for `batch` sequences of up to `capacity` tokens.

        On a mesh it is divided as by `prefill`. `specs` describe one device's heads, default `device_caches`.
        `join` is that of `KVCache.create`; not on a mesh, nor where results are reproducible.

        Raises:
          CacheMemoryError: a device's share does not fit.
          MeshError: the batch cannot be divided over `data`.
        """
        specs = specs or self.device_caches
        if self.mesh is None:
            return KVCache.create(specs, batch=batch, capacity=capacity, join=join and not self.reproducible)
        check_fits_now(specs, batch=self._local_batch(batch), capacity=capacity)
        return create_cache(specs, self.mesh, batch, capacity)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        implementation: Implementation | None = None,
        *,
        attention: ShardedAttention = sharded_attention,
    ) -> Float[Array, "B T_padded D"]:
        """Return the last hidden states of whole sequences, without a cache.

        On one device T_padded is T. On a mesh, T need not be a multiple of the devices along `sequence`.
        Prompts are padded on the right, where causal attention does not look. The result is divided by token
        and unspecified for padding.

        Args:
          tokens: whole sequences of equal length.
          implementation: of attention, see `zdc_jax.ops.attention`.
          attention: attention of one device's tokens to all tokens of a mesh. Use a module-level function: it
            is hashed.

        Raises:
          MeshError: batch or tokens cannot be divided over this mesh. Raised before any computation.
          NotImplementedError: the implementation cannot serve a call, or a rounding payload is combined with
            another `attention` than `sharded_attention`.
          CalibrationError: the payload is `float8` and layers have no scales.
        """
        if self.mesh is not None:
            check_attention(attention, self.payload, self.plan)
            end = jnp.full(len(tokens), tokens.shape[1])
            return self._run_prompts(tokens, end, None, implementation, attention)[0]
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x, aux = self.embeddings.embed(tokens, positions), None
        for block, spec in zip(self.layers, self.layer_caches, strict=True):
            x, aux = run_whole_layer(block, spec, x, positions, aux, implementation)
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
        x, cache = self._run_new_tokens(cache, tokens, end, implementation)
        return x[: len(tokens)], cache

    def extend_last(
        self,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B D"], KVCache]:
        """Return what `extend` does, but only the hidden state of each sequence's last new token.

        The last layer computes only this one after attention, which saves most of a layer (ours). Where a
        sequence has no new token, its hidden state is unspecified.
        """
        count = end - cache.lengths
        half, cache = self.extend_half(cache, tokens, end, implementation, needed_from=end - 1)
        return self.finish_last(half, count), cache

    def extend_half(
        self,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        implementation: Implementation | None = None,
        *,
        needed_from: Int[Array, " B"] | None = None,
    ) -> tuple[HalfLayer, KVCache]:
        """Return what `extend` does, with the last layer left to be finished (`finish`), and the cache.

        A single token may be repeated (`duplicate_single_token`). The result is unspecified before the
        position `needed_from` of each sequence; None means that all tokens are needed.
        """
        if self.mesh is not None:
            x, cache = self.extend(cache, tokens, end, implementation)
            return HalfLayer(x, None), cache
        last = partial(start_layer_alone, needed_from=needed_from)
        return self._run_new_tokens(cache, tokens, end, implementation, last)

    def finish(self, half: HalfLayer) -> Float[Array, "B T D"]:
        """Return the hidden states after the last layer, for the tokens that `half` has."""
        return half.x if half.o is None else finish_layer(self.layers[-1], half)

    def finish_last(self, half: HalfLayer, count: Int[Array, " B"]) -> Float[Array, "B D"]:
        """Return the hidden states of the last of `count` tokens of each sequence."""
        return self.finish(half.take(jnp.clip(count - 1, 0)[:, None]))[: len(count), 0]

    def _run_new_tokens(
        self,
        cache: KVCache,
        tokens: Array,
        end: Array,
        implementation: Implementation | None,
        last: Callable[..., Any] | None = None,
    ) -> tuple[Any, KVCache]:
        """Run all layers on new tokens; return the result of the last one and the extended cache.

        `last` is the program of the last layer, default that of the others. The result of a single token may
        be repeated.
        """
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        x: Any = self.embeddings.embed(tokens, positions)
        aux = None
        if not self.reproducible:
            x = duplicate_single_token(x)
        run: Any = extend_layer_alone if self.mesh is None else partial(token_layer, mesh=self.mesh)
        for index, (block, spec) in enumerate(zip(self.layers, cache.specs, strict=True)):
            if last is not None and index == len(self.layers) - 1:
                run = last
            view = cache.of_layer(index)
            options = {"implementation": implementation, "table": view.table, "first": view.first}
            x, state, aux = run(block, spec, x, view.state, aux, positions, end, **options)
            cache = cache.with_layer(index, state)
        return x, replace(cache, lengths=end)

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        *,
        capacity: int,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B D"], KVCache]:
        """Prefill whole prompts; return the hidden states of their last tokens, and a cache.

        On one device, prompts are one chunk of `extend`. On a mesh, the cache is divided by head over `model`
        and `sequence`; KV heads are repeated if those do not divide them. The exchange has brought its first
        coordinates, or its quantized values. The trailing coordinates of the last window and the sinks, or
        their rings, are scattered by head.

        Args:
          tokens: prompts, padded on the right.
          end: length of each prompt.
          capacity: tokens per sequence of the cache.
          implementation: of attention on each device.

        Raises:
          MeshError: on a mesh, T exceeds `capacity`. Other errors are those of `hidden` and `new_cache`.
        """
        if self.mesh is None:
            cache = self.new_cache(batch=len(tokens), capacity=capacity)
            return self.extend_last(cache, tokens, end, implementation)
        if (length := tokens.shape[1]) > capacity:
            raise MeshError(f"{capacity=}: must be >= {length}, the tokens of the prompts with padding")
        x, states = self._run_prompts(tokens, end, capacity, implementation)
        return last_token(x, end, self.mesh), KVCache(tuple(states), end, self.layer_caches, capacity)

    def compile_prefill(
        self,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        *,
        capacity: int,
        implementation: Implementation | None = None,
    ) -> None:
        """Compile what `prefill` runs at these shapes, all kinds of layers concurrently in threads (ours).

        Otherwise `prefill` compiles each kind on first use, which takes seconds per kind. Threads overlap
        XLA's share of the work; tracing and lowering hold Python's lock.

        Raises:
          NotImplementedError: there is no mesh.
          MeshError: batch or tokens cannot be divided over this mesh.
        """
        if self.mesh is None:
            raise NotImplementedError("compile_prefill: needs a network on a mesh")
        x, aux = self._embed_prompts(tokens), None
        divided = NamedSharding(self.mesh, layout("B S K R"))
        programs: dict[Any, Any] = {}

        def add_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=divided)

        lower_layer = partial(prompt_layer.lower, **self._list_options(capacity, implementation))
        for block, spec in zip(self.prompt_layers, self.layer_caches, strict=True):
            program = lower_layer(block, x, end, aux, spec)
            programs.setdefault((spec, jax.tree.structure(aux)), program)
            aux = jax.tree.map(add_sharding, program.out_info[2])
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda program: program.compile(), programs.values()))

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
          NotImplementedError: the network is on a mesh.
        """
        if self.mesh is not None:
            raise NotImplementedError("read_prompt: runs on one device, not on a mesh; use prefill")
        specs, batch = self.layer_caches, tokens.shape[0]
        check_fits_now(specs, batch=batch, capacity=capacity)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x, states = self.embeddings.embed(tokens, positions), []
        for block, spec in zip(self.layers, specs, strict=True):
            x, state = read_layer_exactly(block, spec, x, positions, end, capacity)
            states.append(state)
        return x, KVCache(tuple(states), end, specs, capacity)

    def _run_prompts(
        self,
        tokens: Array,
        end: Array,
        capacity: int | None,
        implementation: Implementation | None,
        attention: ShardedAttention = sharded_attention,
    ) -> tuple[Array, list[State]]:
        """Return the last hidden states on a mesh and each layer's cache, None without a `capacity`."""
        assert self.mesh is not None
        x, aux, states = self._embed_prompts(tokens), None, []
        run_layer = partial(prompt_layer, **self._list_options(capacity, implementation, attention))
        for block, spec in zip(self.prompt_layers, self.layer_caches, strict=True):
            x, state, aux = run_layer(block, x, end, aux, spec)
            states.append(state)
        return x, states

    def _list_options(
        self,
        capacity: int | None,
        implementation: Implementation | None,
        attention: ShardedAttention = sharded_attention,
    ) -> dict[str, Any]:
        """Return the options of `prompt_layer` that are equal for all layers."""
        return {
            "capacity": capacity,
            "mesh": self.mesh,
            "implementation": implementation,
            "weights": self.weights,
            "payload": self.payload,
            "attention": attention,
        }

    def _local_batch(self, batch: int) -> int:
        """Return the sequences per device, after checking that they can be divided."""
        if batch % (count := self.count_devices(DATA)):
            raise MeshError(
                f"{batch=}: cannot be divided over data={count} devices; must be a multiple of it"
            )
        return batch // count

    def _embed_prompts(self, tokens: Array) -> Array:
        """Pad and embed tokens [B, T], after checking that they can be divided."""
        assert self.mesh is not None
        (B, T), U = tokens.shape, self.count_devices(SEQUENCE)
        self._local_batch(B)
        if T < U:
            raise MeshError(f"{T} tokens: cannot be divided over sequence={U} devices; each needs one")
        padded = jnp.pad(tokens, ((0, 0), (0, -T % U)))
        return embed_prompts(self.embeddings, padded, jnp.int32(T), self.mesh)


def _leave(x: Any) -> Any:
    """Return an array where it is."""
    return x
