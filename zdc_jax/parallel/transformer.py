"""A transformer on a mesh.

Prompts come whole, their tokens divided over `sequence`. Then tokens come one by one, with heads divided over
the same devices, on the cache as the prompt has left it.
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
from zdc_jax.cache.classes import ClassLeader, ClassMember
from zdc_jax.cache.coded_far import CodedFar
from zdc_jax.cache.coded_ring import CodedRing
from zdc_jax.cache.kv_cache import KVCache, check_fits, free_bytes
from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.cache.spec import LayerCacheSpec, State
from zdc_jax.config import ModelConfig
from zdc_jax.errors import MeshError
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Embeddings, Transformer, extend_layer
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.contract import duplicate_single_token
from zdc_jax.parallel.attention import ShardedAttention, check_attention, sharded_attention
from zdc_jax.parallel.classes import check_classes, prompt_through_groups
from zdc_jax.parallel.coded import check_codes, coded_attention, coded_state
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
    """A `Transformer` on a mesh: batch over `data`; tokens of a prompt over `sequence`; heads over `model`.

    Every device along `sequence` holds all weights (of its share along `model`) for prompts, or gathers them
    layer by layer, and beside them its share by head for tokens that are decoded, for which `sequence`
    divides heads as `model` does. Prompts may exchange q, k, v and o in fewer bits
    (`zdc_jax.parallel.payload`); the cache then holds the first coordinates of keys and values as they
    arrived, rounded, but `coded` puts those of near tokens there whole. Caches in codes have keys and values
    exchanged as their own codes, and what arrives is the cache (`zdc_jax.parallel.coded`).
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
        """Puts weights, of numpy or on devices, where the mesh needs them.

        Args:
          layers: in order, consumed one at a time.
          weights: how those for prompts lie, see `zdc_jax.parallel.weights`.
          payload: what prompts are exchanged as; `float8` wants layers prepared with it.
          decodes: whether weights for decoded tokens are made; without them there is no `extend`.

        Raises:
          MeshError: heads, feed-forward columns or (`gathered`) the embedding dim cannot be divided over this
            mesh; before a layer is taken.
          ValueError: unknown `weights` or `payload`.
          NotImplementedError: a method whose caches cannot be divided by head after an exchange; `float8`
            with caches in codes.
        """
        check_payload(payload)
        if plan.method != "zdc":
            check_codes(plan, payload, degree(mesh, BY_HEAD))
        for name, count in (("num_heads", config.num_heads), ("ffn_dim", config.ffn_dim)):
            if count % degree(mesh, BY_HEAD):
                raise MeshError(
                    f"{name}={count} cannot be divided over model={mesh.shape[MODEL]} times "
                    f"sequence={mesh.shape[SEQUENCE]} devices"
                )
        if weights not in WEIGHT_PLACEMENTS:
            raise ValueError(f"{weights=} must be one of {WEIGHT_PLACEMENTS}")
        if weights == "gathered" and config.embed_dim % (shares := degree(mesh, GATHERED_OVER)):
            raise MeshError(f"embed_dim={config.embed_dim} cannot be gathered from {shares} equal shares")
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
        """A network that is on one device; raises what the constructor does."""
        given = network.config, network.plan, network.embeddings, network.layers
        return cls(*given, mesh, weights=weights, payload=payload)

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
        """`layer_caches` of the heads that one device holds."""
        shares = degree(self.mesh, BY_HEAD)
        heads = self.config.num_kv_heads * kv_copies(self.config.num_kv_heads, shares) // shares
        return tuple(spec.on_heads(heads) for spec in self.layer_caches)

    def new_cache(
        self, *, batch: int, capacity: int, specs: tuple[LayerCacheSpec, ...] | None = None
    ) -> KVCache:
        """An empty cache, divided as `prefill` divides one.

        specs: of one device's heads, default `device_caches`.

        Raises:
          CacheMemoryError: a device's share does not fit. MeshError: rows cannot be divided over `data`.
        """
        specs = specs or self.device_caches
        check_fits(specs, batch=self._rows(batch), capacity=capacity, free=free_bytes())
        shares = degree(self.mesh, BY_HEAD)

        def make() -> KVCache:
            whole = (spec.on_heads(spec.num_kv_heads * shares) for spec in specs)
            states = tuple(spec.create(batch, capacity) for spec in whole)
            return KVCache(states, jnp.zeros(batch, jnp.int32), specs, capacity)

        where = jax.tree.map(partial(held_sharding, self.mesh), jax.eval_shape(make))
        return jax.jit(make, out_shardings=where)()

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        attention: ShardedAttention = sharded_attention,
        implementation: Implementation | None = None,
    ) -> Float[Array, "B T_padded D"]:
        """Last hidden states of whole sequences, without a cache.

        T need not be a multiple of the devices along `sequence`: prompts are padded on the right to T_padded,
        where causal attention does not look; with token classes so that each device has whole blocks. The
        result is divided as the tokens are; that of padding is unspecified.

        Args:
          attention: of one device's tokens on those of all, a function of a module, for it is hashed.
          implementation: of attention on each device, see `zdc_jax.ops.attention`.

        Raises:
          MeshError: rows or tokens cannot be divided over this mesh; before anything is computed.
          NotImplementedError: the implementation cannot do a call; a payload that rounds or token classes
            with another `attention` than `sharded_attention`, or both together.
          CalibrationError: a `float8` payload, and layers without scales.
        """
        check_attention(attention, self.payload, self.plan)
        end = jnp.full(len(tokens), tokens.shape[1])
        if self.plan.classes is not None:
            return self._through_groups(tokens, end, None, implementation)[0]
        if self.plan.method != "zdc":
            return self._through_layers(tokens, end, None, implementation)[0]
        x = self._embedded(tokens)
        for block, spec in zip(self.prompt_layers, self.layer_caches, strict=True):
            given = spec, self.mesh, attention, implementation, self.weights, self.payload
            x = whole_layer(block, x, *given)
        return x

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        *,
        capacity: int,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B D"], KVCache]:
        """Hidden states of the last of `end` tokens of each prompt, and a cache of `capacity` tokens a row.

        The cache is divided by head over `model` and `sequence`; its KV heads are repeated where those do not
        divide them. Its first coordinates, or codes, are where the exchange has brought them; the trailing
        ones of the last window and the sinks, or their rings, are scattered by head.

        Raises:
          MeshError: T is more than `capacity`. What `hidden` raises.
        """
        if (length := tokens.shape[1]) > capacity:
            raise MeshError(f"{capacity=} must be >= the {length} tokens of the prompts, padding included")
        through = self._through_layers if self.plan.classes is None else self._through_groups
        x, states = through(tokens, end, capacity, implementation)
        return last_token(x, end, self.mesh), KVCache(tuple(states), end, self.layer_caches, capacity)

    def compile_prefill(
        self,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        *,
        capacity: int,
        implementation: Implementation | None = None,
    ) -> None:
        """Compiles what `prefill` runs at these shapes, all kinds of layers at once, in threads.

        `prefill` by itself compiles each kind when it comes to it, which takes seconds a kind. Threads share
        XLA's part of it; tracing and lowering hold Python's lock. Ours.

        Raises:
          NotImplementedError: the plan has token classes. MeshError: rows or tokens cannot be divided over
            this mesh.
        """
        if self.plan.classes is not None:
            raise NotImplementedError("compile_prefill takes no plan with token classes")
        x, aux = self._embedded(tokens), None
        given = capacity, self.mesh, implementation, self.weights, self.payload
        divided = NamedSharding(self.mesh, layout("B S K R"))
        programs: dict[Any, Any] = {}
        for block, spec in zip(self.prompt_layers, self.layer_caches, strict=True):
            program = _prompt_layer.lower(block, x, end, aux, spec, *given)
            programs.setdefault((spec, jax.tree.structure(aux)), program)

            def handed(leaf):
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=divided)

            aux = jax.tree.map(handed, program.out_info[2])
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda program: program.compile(), programs.values()))

    def extend(
        self,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """`Transformer.extend`; heads and F over `model` and `sequence`, and no axis over tokens."""
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        x, aux, states = (
            duplicate_single_token(self.embeddings.embed(tokens, positions)),
            None,
            list(cache.layers),
        )
        for index, (block, spec) in enumerate(zip(self.token_layers, cache.specs, strict=True)):
            x, states[index], aux = _token_layer(
                block, spec, x, states[index], aux, positions, end, cache.table, self.mesh, implementation
            )
        return x[: len(tokens)], replace(cache, layers=tuple(states), lengths=end)

    def _through_layers(
        self,
        tokens: Array,
        end: Array,
        capacity: int | None,
        implementation: Implementation | None,
    ) -> tuple[Array, list[State]]:
        """Last hidden states, and what layers keep for `capacity` tokens a row, None without."""
        x, aux, states = self._embedded(tokens), None, []
        for block, spec in zip(self.prompt_layers, self.layer_caches, strict=True):
            given = spec, capacity, self.mesh, implementation, self.weights, self.payload
            x, state, aux = _prompt_layer(block, x, end, aux, *given)
            states.append(state)
        return x, states

    def _through_groups(
        self,
        tokens: Array,
        end: Array,
        capacity: int | None,
        implementation: Implementation | None,
    ) -> tuple[Array, list[State]]:
        assert self.plan.classes is not None
        check_classes(self.payload)
        x, leaders = self._embedded(tokens), self.plan.classes.leaders
        given = (self.mesh, implementation, self.weights)
        return prompt_through_groups(self.prompt_layers, self.layer_caches, leaders, x, end, capacity, *given)

    def check_fits(self, batch: int, capacity: int) -> None:
        """Raises `CacheMemoryError` where a device's share of such a cache is more than its free memory.

        And `MeshError` where the rows cannot be divided over `data`.
        """
        check_fits(self.device_caches, batch=self._rows(batch), capacity=capacity, free=free_bytes())

    def _rows(self, batch: int) -> int:
        """Of each device, after checking that they can be divided."""
        if batch % (count := self.mesh.shape[DATA]):
            raise MeshError(f"{batch} rows cannot be divided over data={count}: it must be a divisor")
        return batch // count

    def _embedded(self, tokens: Array) -> Array:
        """Embeddings of tokens [B, T], padded, after checking that they can be divided; blocks stay whole."""
        (B, T), U = tokens.shape, self.mesh.shape[SEQUENCE]
        self._rows(B)
        if T < U:
            raise MeshError(f"{T} tokens cannot be divided over sequence={U}: each device needs one")
        unit = U if self.plan.classes is None else U * self.plan.classes.block
        return _embed(self.embeddings, jnp.pad(tokens, ((0, 0), (0, -T % unit))), jnp.int32(T), self.mesh)


@partial(jax.jit, static_argnames="mesh")
def _embed(embeddings: Embeddings, tokens: Array, length: Array, mesh: Mesh) -> Array:
    def local(embeddings: Embeddings, tokens: Array, length: Array) -> Array:
        # Padding takes the last position, so that it stays within the table of learned positions.
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
    """One layer on whole sequences. Jitted, so that layers alike are traced and compiled once."""
    attend = partial(attention, scale=block.attention.scale, spec=spec, implementation=implementation)

    def local(block: Block, x: Array) -> Array:
        block = whole_weights(block, weights)
        # Other attention than `sharded_attention` takes no formats.
        formats = {} if payload == "native" else {"formats": _formats(block, spec, payload)}
        reduce = sum_over(mesh, BY_TOKEN)
        return block(x, positions_of(x), partial(attend, **formats), implementation, reduce=reduce)[0]

    in_specs = (weight_specs(block, BY_TOKEN, weights), layout("B T D"))
    return on_mesh(mesh, local, in_specs, layout("B T D"))(block, x)


def _formats(block: Block, spec: Any, payload: Payload) -> Formats:
    """How far coordinates of one device's heads travel; raises what `Formats.of` does."""
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
    """One layer on whole prompts, its cache with them, and what it hands on. Jitted as `whole_layer` is."""

    def local(block: Block, x: Array, end: Array, aux: Any) -> tuple[Array, State | None, Any]:
        positions, formats = positions_of(x), _formats(block, spec, payload)
        how: Any = {"scale": block.attention.scale, "implementation": implementation, "formats": formats}

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[State | None, Any]]:
            keep: Callable[..., State]
            if isinstance(spec, CodedFar | CodedRing):
                o, far, handed = coded_attention(q, k, v, end, aux, spec=spec, **how)
                keep = partial(coded_state, spec, far)
            else:
                o, exchanged = sharded_attention(q, k, v, spec=spec, **how)
                keep, handed = partial(prompt_state, spec, exchanged, formats=formats), aux
            return o, (None if capacity is None else keep(k, v, positions, end, capacity), handed)

        block = whole_weights(block, weights)
        x, kept = block(x, positions, attend, implementation, reduce=sum_over(mesh, BY_TOKEN))
        return x, *kept

    tokens, heads = layout("B T D"), layout("B K S R")
    handed = layout("B S K R")
    in_specs = (weight_specs(block, BY_TOKEN, weights), tokens, layout("B"), handed)
    return on_mesh(mesh, local, in_specs, (tokens, heads, handed))(block, x, end, aux)


@partial(jax.jit, static_argnames="mesh")
def last_token(x: Float[Array, "B T D"], end: Int[Array, " B"], mesh: Mesh) -> Float[Array, "B D"]:
    """Hidden states of the last of `end` tokens of each row, from the device that holds it."""

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
    """One layer on new tokens, its cache with them, and what it hands on. Jitted as `whole_layer` is."""
    gather = partial(jax.lax.all_gather, axis_name=BY_HEAD, axis=1, tiled=True)

    def local(
        block: Block, x: Array, state: State, aux: Any, positions: Array, end: Array, table: Array | None
    ) -> tuple[Array, State, Any]:
        own = spec.on_heads(block.attention.k.shape[1])
        given = (x, with_new_empties(state), aux, positions, end, implementation)
        x, state, aux = extend_layer(block, own, *given, gather, sum_over(mesh, BY_HEAD), table)
        return x, with_new_empties(state), aux

    held = jax.tree.map(held_layout, state)
    token, rows = layout("B 1 D"), layout("B")
    # Token classes hand on what is of all heads, codes what each KV head has chosen.
    handed = rows if isinstance(spec, ClassLeader | ClassMember) else layout("B S K R")
    in_specs = (weight_specs(block, BY_HEAD), token, held, handed, layout("B 1"), rows, rows)
    given = block, x, state, aux, positions, end, table
    return on_mesh(mesh, local, in_specs, (token, held, handed))(*given)


def held_layout(leaf: Any) -> PartitionSpec:
    """Of an array of a cache: those of four axes and more are divided by head, what says where tokens lie is
    whole."""
    return layout("B K S R" if leaf.ndim >= 4 else "B")


def held_sharding(mesh: Mesh, leaf: Any) -> NamedSharding:
    """Of an array of a cache that lies as `held_layout` says, in the form in which programs give it back.

    In another form of the same JAX would compile anew the program that takes it.
    """
    if not leaf.size:
        return NamedSharding(mesh, PartitionSpec())
    spec: list[Any] = []
    for entry in held_layout(leaf):
        names = (entry,) if isinstance(entry, str) else entry or ()
        divides = tuple(name for name in names if mesh.shape[name] > 1)
        spec.append(divides[0] if len(divides) == 1 else divides or None)
    while spec and spec[-1] is None:
        spec.pop()
    return NamedSharding(mesh, PartitionSpec(*spec))
