"""Transformer on a mesh.

Whole prompts have their tokens divided over `sequence`. Decoded tokens have heads divided over the same
devices, on the cache that the prompt has left.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache, check_fits, free_bytes
from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.cache.spec import LayerCacheSpec, State
from zdc_jax.config import ModelConfig
from zdc_jax.errors import MeshError
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Embeddings, Transformer, extend_layer
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.contract import duplicate_single_token
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.parallel.attention import (
    ShardedAttention,
    check_attention,
    sharded_attention,
)
from zdc_jax.parallel.classes import check_classes, run_groups
from zdc_jax.parallel.coded import check_caches, coded_attention, coded_state
from zdc_jax.parallel.exchange import kv_copies
from zdc_jax.parallel.mesh import (
    BY_HEAD,
    BY_TOKEN,
    DATA,
    MODEL,
    SEQUENCE,
    degree,
    layout,
    on_mesh,
    positions_of,
    sum_over,
)
from zdc_jax.parallel.payload import Formats, Payload, check_payload
from zdc_jax.parallel.prompt_cache import prompt_state, with_new_empties
from zdc_jax.parallel.weights import (
    GATHERED_OVER,
    WEIGHT_PLACEMENTS,
    WeightPlacement,
    placed,
    replicated,
    weight_specs,
    whole_weights,
)
from zdc_jax.plan import CompressionPlan


class ShardedTransformer(nnx.Module):
    """`Transformer` on a mesh: batch over `data`, prompt tokens over `sequence`, heads over `model`.

    For prompts, every device along `sequence` stores all weights (of its share along `model`), or gathers
    them layer by layer. For decoded tokens it also stores a share by head: `sequence` then divides heads like
    `model`.

    Prompts may exchange q, k, v and o in fewer bits (`zdc_jax.parallel.payload`). The cache then stores the
    first coordinates of keys and values as they arrived, rounded; `coded` replaces those of near tokens by
    unrounded ones. Quantized caches exchange keys and values in their own codes (`zdc_jax.parallel.coded`).
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: CompressionPlan,
        embeddings: Embeddings,
        layers: Iterable[Block],
        mesh: Mesh,
        *,
        weights: WeightPlacement = "replicated",
        payload: Payload = "native",
        decodes: bool = True,
    ):
        """Put weights, NumPy arrays or on devices, where the mesh needs them.

        Args:
          config: architecture of the model.
          plan: compression plan of the weights.
          embeddings: embeddings, final norm and head.
          layers: layers in order, consumed one at a time.
          mesh: device mesh.
          weights: placement of prefill weights, see `zdc_jax.parallel.weights`.
          payload: payload of the exchange; `float8` needs layers prepared for it.
          decodes: whether to create decode weights; without them `extend` is not available.

        Raises:
          MeshError: heads, feed-forward columns or (with `gathered`) the embedding dimension cannot be
            divided over this mesh. Raised before any layer is consumed.
          ValueError: `weights` or `payload` is unknown.
          NotImplementedError: the method's caches cannot be divided by head after an exchange, or `float8` is
            combined with quantized caches.
        """
        check_payload(payload)
        check_caches(plan, payload, degree(mesh, BY_HEAD))
        for name, count in (("num_heads", config.num_heads), ("ffn_dim", config.ffn_dim)):
            if count % degree(mesh, BY_HEAD):
                raise MeshError(
                    f"{name}={count}: cannot be divided over model={mesh.shape[MODEL]} times "
                    f"sequence={mesh.shape[SEQUENCE]} devices; their product must divide it"
                )
        if weights not in WEIGHT_PLACEMENTS:
            raise ValueError(f"{weights=}: must be one of {WEIGHT_PLACEMENTS}")
        if weights == "gathered" and config.embed_dim % (shares := degree(mesh, GATHERED_OVER)):
            raise MeshError(
                f"weights='gathered': embed_dim={config.embed_dim} cannot be divided into {shares} equal "
                "shares, one for each device along data and sequence; use 'replicated' or another mesh"
            )
        self.config, self.plan, self.mesh = config, plan, mesh
        self.weights, self.payload = weights, payload
        self.embeddings = replicated(embeddings, mesh)
        self.prompt_layers = nnx.List([placed(block, mesh, BY_TOKEN, weights) for block in layers])
        shared = self.prompt_layers if decodes else []
        self.token_layers = nnx.List([placed(block, mesh, BY_HEAD) for block in shared])

    @classmethod
    def of(
        cls,
        network: Transformer,
        mesh: Mesh,
        *,
        weights: WeightPlacement = "replicated",
        payload: Payload = "native",
    ) -> Self:
        """Create from a network on one device; errors are those of the constructor."""
        return cls(
            network.config,
            network.plan,
            network.embeddings,
            network.layers,
            mesh,
            weights=weights,
            payload=payload,
        )

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
        shares = degree(self.mesh, BY_HEAD)
        heads = self.config.num_kv_heads * kv_copies(self.config.num_kv_heads, shares) // shares
        return tuple(spec.on_heads(heads) for spec in self.layer_caches)

    def new_cache(
        self, *, batch: int, capacity: int, specs: tuple[LayerCacheSpec, ...] | None = None
    ) -> KVCache:
        """Create an empty cache, divided as in `prefill`.

        `specs` describes one device's heads, default `device_caches`.

        Raises:
          CacheMemoryError: a device's share does not fit.
          MeshError: the batch cannot be divided over `data`.
        """
        specs = specs or self.device_caches
        check_fits(specs, batch=self._local_batch(batch), capacity=capacity, free=free_bytes())
        shares = degree(self.mesh, BY_HEAD)

        def make() -> KVCache:
            whole = (spec.on_heads(spec.num_kv_heads * shares) for spec in specs)
            states = tuple(spec.create(batch, capacity) for spec in whole)
            return KVCache(states, jnp.zeros(batch, jnp.int32), specs, capacity)

        shardings = jax.tree.map(partial(cache_sharding, self.mesh), jax.eval_shape(make))
        return jax.jit(make, out_shardings=shardings)()

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        attention: ShardedAttention = sharded_attention,
        implementation: Implementation | None = None,
    ) -> Float[Array, "B T_padded D"]:
        """Return the last hidden states of whole sequences, without a cache.

        T need not be a multiple of the devices along `sequence`. Prompts are padded on the right to T_padded,
        where causal attention does not look; with token classes each device gets whole blocks. The result is
        divided by token and unspecified for padding.

        Args:
          tokens: whole sequences of equal length.
          attention: attention of one device's tokens to all tokens. Use a module-level function: it is
            hashed.
          implementation: of attention on each device, see `zdc_jax.ops.attention`.

        Raises:
          MeshError: batch or tokens cannot be divided over this mesh. Raised before any computation.
          NotImplementedError: the implementation cannot serve a call. Or a rounding payload or token classes
            are combined with another `attention` than `sharded_attention`, or with one another.
          CalibrationError: the payload is `float8` and layers have no scales.
        """
        check_attention(attention, self.payload, self.plan)
        end = jnp.full(len(tokens), tokens.shape[1])
        if self.plan.classes is not None:
            return self._run_groups(tokens, end, None, implementation)[0]
        if self.plan.exchanges_quantized:
            return self._run_layers(tokens, end, None, implementation)[0]
        x = self._embed_prompts(tokens)
        for block, spec in zip(self.prompt_layers, self.layer_caches, strict=True):
            x = whole_layer(block, x, spec, self.mesh, attention, implementation, self.weights, self.payload)
        return x

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        *,
        capacity: int,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B D"], KVCache]:
        """Prefill whole prompts; return the hidden states of their last tokens, and a cache.

        The cache is divided by head over `model` and `sequence`; KV heads are repeated if those do not divide
        them. The exchange has brought its first coordinates, or its quantized values. The trailing
        coordinates of the last window and the sinks, or their rings, are scattered by head.

        Args:
          tokens: prompts, padded on the right.
          end: length of each prompt.
          capacity: tokens per sequence of the cache.
          implementation: of attention on each device.

        Raises:
          MeshError: T exceeds `capacity`. Other errors are those of `hidden`.
        """
        if (length := tokens.shape[1]) > capacity:
            raise MeshError(f"{capacity=}: must be >= {length}, the tokens of the prompts with padding")
        run = self._run_layers if self.plan.classes is None else self._run_groups
        x, states = run(tokens, end, capacity, implementation)
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
          NotImplementedError: the plan has token classes.
          MeshError: batch or tokens cannot be divided over this mesh.
        """
        if self.plan.classes is not None:
            raise NotImplementedError("compile_prefill: does not support plans with token classes")
        x, aux = self._embed_prompts(tokens), None
        divided = NamedSharding(self.mesh, layout("B S K R"))
        programs: dict[Any, Any] = {}

        def add_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=divided)

        for block, spec in zip(self.prompt_layers, self.layer_caches, strict=True):
            program = _prompt_layer.lower(
                block, x, end, aux, spec, capacity, self.mesh, implementation, self.weights, self.payload
            )
            programs.setdefault((spec, jax.tree.structure(aux)), program)
            aux = jax.tree.map(add_sharding, program.out_info[2])
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda program: program.compile(), programs.values()))

    def extend(
        self,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Extend as `Transformer.extend`; heads and F are divided over `model` and `sequence`."""
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        x, aux = duplicate_single_token(self.embeddings.embed(tokens, positions)), None
        states = list(cache.layers)
        for index, (block, spec) in enumerate(zip(self.token_layers, cache.specs, strict=True)):
            x, states[index], aux = _token_layer(
                block, spec, x, states[index], aux, positions, end, cache.table, self.mesh, implementation
            )
        return x[: len(tokens)], replace(cache, layers=tuple(states), lengths=end)

    def _run_layers(
        self,
        tokens: Array,
        end: Array,
        capacity: int | None,
        implementation: Implementation | None,
    ) -> tuple[Array, list[State]]:
        """Return the last hidden states and each layer's cache, None without a `capacity`."""
        x, aux, states = self._embed_prompts(tokens), None, []
        for block, spec in zip(self.prompt_layers, self.layer_caches, strict=True):
            x, state, aux = _prompt_layer(
                block, x, end, aux, spec, capacity, self.mesh, implementation, self.weights, self.payload
            )
            states.append(state)
        return x, states

    def _run_groups(
        self,
        tokens: Array,
        end: Array,
        capacity: int | None,
        implementation: Implementation | None,
    ) -> tuple[Array, list[State]]:
        assert self.plan.classes is not None
        check_classes(self.payload)
        x, leaders = self._embed_prompts(tokens), self.plan.classes.leaders
        return run_groups(
            self.prompt_layers,
            self.layer_caches,
            leaders,
            x,
            end,
            capacity,
            mesh=self.mesh,
            implementation=implementation,
            weights=self.weights,
        )

    def check_fits(self, batch: int, capacity: int) -> None:
        """Raise if such a cache does not fit.

        Raises:
          CacheMemoryError: a device's share exceeds its free memory.
          MeshError: the batch cannot be divided over `data`.
        """
        check_fits(self.device_caches, batch=self._local_batch(batch), capacity=capacity, free=free_bytes())

    def _local_batch(self, batch: int) -> int:
        """Return the sequences per device, after checking that they can be divided."""
        if batch % (count := self.mesh.shape[DATA]):
            raise MeshError(
                f"{batch=}: cannot be divided over data={count} devices; must be a multiple of it"
            )
        return batch // count

    def _embed_prompts(self, tokens: Array) -> Array:
        """Pad and embed tokens [B, T], after checking that they can be divided; blocks stay whole."""
        (B, T), U = tokens.shape, self.mesh.shape[SEQUENCE]
        self._local_batch(B)
        if T < U:
            raise MeshError(f"{T} tokens: cannot be divided over sequence={U} devices; each needs one")
        unit = U if self.plan.classes is None else U * self.plan.classes.block
        return _embed(self.embeddings, jnp.pad(tokens, ((0, 0), (0, -T % unit))), jnp.int32(T), self.mesh)


@partial(jax.jit, static_argnames="mesh")
def _embed(embeddings: Embeddings, tokens: Array, length: Array, mesh: Mesh) -> Array:
    def local(embeddings: Embeddings, tokens: Array, length: Array) -> Array:
        # Padding repeats the last position, to stay within the table of learned positions.
        return embeddings.embed(tokens, jnp.minimum(positions_of(tokens), length - 1))

    in_specs = (PartitionSpec(), layout("B T"), PartitionSpec())
    return on_mesh(mesh, local, in_specs, layout("B T D"))(embeddings, tokens, length)


@partial(jax.jit, static_argnames=("spec", "mesh", "attention", "implementation", "weights", "payload"))
def whole_layer(
    block: Block,
    x: Array,
    spec: PrefixRing,
    mesh: Mesh,
    attention: ShardedAttention,
    implementation: Implementation | None,
    weights: WeightPlacement,
    payload: Payload,
) -> Array:
    """Run one layer on whole sequences. Jitted so that equal layers are traced and compiled once."""
    options: Any = {"scale": block.attention.scale, "spec": spec, "implementation": implementation}

    def local(block: Block, x: Array) -> Array:
        block = whole_weights(block, weights)
        # Only `sharded_attention` accepts formats.
        formats = {} if payload == "native" else {"formats": _get_formats(block, spec, payload)}

        def attend(q: Array, k: NewKeys, v: Array) -> tuple[Array, Any]:
            shift = {} if k.shift is None else {"shift": k.shift}  # Only `sharded_attention` accepts it.
            return attention(q, k.keys, v, **options, **formats, **shift)

        reduce = sum_over(mesh, BY_TOKEN)
        return block(x, positions_of(x), attend, implementation, reduce=reduce)[0]

    in_specs = (weight_specs(block, BY_TOKEN, weights), layout("B T D"))
    return on_mesh(mesh, local, in_specs, layout("B T D"))(block, x)


def _get_formats(block: Block, spec: Any, payload: Payload) -> Formats:
    """Return the exchange formats of one device's heads; errors are those of `Formats.of`."""
    return Formats.of(payload, block.attention, spec.R, spec.Z)


@partial(jax.jit, static_argnames=("spec", "capacity", "mesh", "implementation", "weights", "payload"))
def _prompt_layer(
    block: Block,
    x: Array,
    end: Array,
    aux: Any,
    spec: Any,
    capacity: int | None,
    mesh: Mesh,
    implementation: Implementation | None,
    weights: WeightPlacement,
    payload: Payload,
) -> tuple[Array, State | None, Any]:
    """Run one layer on whole prompts; return its output, cache and auxiliary results."""

    def local(block: Block, x: Array, end: Array, aux: Any) -> tuple[Array, State | None, Any]:
        positions, formats = positions_of(x), _get_formats(block, spec, payload)
        options: Any = {"scale": block.attention.scale, "implementation": implementation, "formats": formats}

        def attend(q: Array, k: NewKeys, v: Array) -> tuple[Array, tuple[State | None, Any]]:
            keep: Callable[..., State]
            keys = k.keys
            if spec.exchange == "quantized":
                o, far, next_aux = coded_attention(q, keys, v, end, aux, spec=spec, shift=k.shift, **options)
                keep = partial(coded_state, spec, far)
            else:
                o, exchanged = sharded_attention(q, keys, v, spec=spec, shift=k.shift, **options)
                keep, next_aux = partial(prompt_state, spec, exchanged, formats=formats), aux
            return o, (None if capacity is None else keep(keys, v, positions, end, capacity), next_aux)

        block = whole_weights(block, weights)
        x, (state, next_aux) = block(x, positions, attend, implementation, reduce=sum_over(mesh, BY_TOKEN))
        return x, state, next_aux

    tokens, heads = layout("B T D"), layout("B K S R")
    aux_spec = layout("B S K R")
    in_specs = (weight_specs(block, BY_TOKEN, weights), tokens, layout("B"), aux_spec)
    return on_mesh(mesh, local, in_specs, (tokens, heads, aux_spec))(block, x, end, aux)


@partial(jax.jit, static_argnames="mesh")
def last_token(x: Float[Array, "B T D"], end: Int[Array, " B"], mesh: Mesh) -> Float[Array, "B D"]:
    """Return the hidden state of each sequence's last token, from the device that holds it."""

    def local(x: Array, end: Array) -> Array:
        here = positions_of(x) == end[:, None] - 1
        return jax.lax.psum(jnp.where(here[..., None], x, 0).sum(1), SEQUENCE)

    return on_mesh(mesh, local, (layout("B T D"), layout("B")), layout("B D"))(x, end)


@partial(jax.jit, static_argnames=("spec", "mesh", "implementation"))
def _token_layer(
    block: Block,
    spec: LayerCacheSpec,
    x: Array,
    state: State,
    aux: Any,
    positions: Array,
    end: Array,
    table: Array | None,
    mesh: Mesh,
    implementation: Implementation | None,
) -> tuple[Array, State, Any]:
    """Run one layer on new tokens; return its output, extended cache and auxiliary results."""
    gather = partial(jax.lax.all_gather, axis_name=BY_HEAD, axis=1, tiled=True)

    def local(
        block: Block, x: Array, state: State, aux: Any, positions: Array, end: Array, table: Array | None
    ) -> tuple[Array, State, Any]:
        own = spec.on_heads(block.attention.k.shape[1])
        x, state, aux = extend_layer(
            block,
            own,
            x,
            with_new_empties(state),
            aux,
            positions,
            end,
            implementation,
            all_heads=gather,
            reduce=sum_over(mesh, BY_HEAD),
            table=table,
        )
        return x, with_new_empties(state), aux

    state_spec = jax.tree.map(cache_layout, state)
    token, sequences = layout("B 1 D"), layout("B")
    # Token classes hand on results for all heads; quantized caches hand on the selection of each KV head.
    aux_spec = sequences if spec.exchange == "classes" else layout("B S K R")
    in_specs = (
        weight_specs(block, BY_HEAD),
        token,
        state_spec,
        aux_spec,
        layout("B 1"),
        sequences,
        sequences,
    )
    return on_mesh(mesh, local, in_specs, (token, state_spec, aux_spec))(
        block, x, state, aux, positions, end, table
    )


def cache_layout(leaf: Any) -> PartitionSpec:
    """Return the partition of a cache's array.

    Arrays of four and more axes are divided by head; arrays that say where tokens lie are not.
    """
    return layout("B K S R" if leaf.ndim >= 4 else "B")


def cache_sharding(mesh: Mesh, leaf: Any) -> NamedSharding:
    """Return the sharding of a cache's array in the form that compiled programs return.

    Another form of the same sharding would make JAX recompile the program that accepts the cache.
    """
    if not leaf.size:
        return NamedSharding(mesh, PartitionSpec())
    spec: list[Any] = []
    for entry in cache_layout(leaf):
        names = (entry,) if isinstance(entry, str) else entry or ()
        divides = tuple(name for name in names if mesh.shape[name] > 1)
        spec.append(divides[0] if len(divides) == 1 else divides or None)
    while spec and spec[-1] is None:
        spec.pop()
    return NamedSharding(mesh, PartitionSpec(*spec))
