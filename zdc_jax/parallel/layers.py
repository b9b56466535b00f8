"""Programs that run one layer on a mesh, and the layout of caches on it.

Whole prompts have their tokens divided over `sequence`. Decoded tokens have heads divided over the same
devices, on the cache that the prompt has left.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.specs.spec import LayerCacheSpec, State
from zdc_jax.config import ModelConfig
from zdc_jax.errors import MeshError
from zdc_jax.model.block import Block
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.model.run_layer import start_layer
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.parallel.attention import ShardedAttention, sharded_attention
from zdc_jax.parallel.coded import coded_attention, coded_state
from zdc_jax.parallel.mesh import (
    BY_HEAD,
    BY_TOKEN,
    MODEL,
    SEQUENCE,
    degree,
    layout,
    on_mesh,
    positions_of,
    sum_over,
)
from zdc_jax.parallel.payload import Formats, Payload
from zdc_jax.parallel.prompt_cache import prompt_state, with_new_empties
from zdc_jax.parallel.weights import (
    GATHERED_OVER,
    WEIGHT_PLACEMENTS,
    WeightPlacement,
    weight_specs,
    whole_weights,
)


def check_weights(config: ModelConfig, mesh: Mesh, weights: WeightPlacement) -> None:
    """Raise an error if the weights of a model cannot be divided over a mesh.

    Raises:
      MeshError: the mesh cannot divide the heads, the feed-forward columns or, with `gathered`, D.
      ValueError: `weights` is unknown.
    """
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


def create_cache(specs: Sequence[LayerCacheSpec], mesh: Mesh, batch: int, capacity: int) -> KVCache:
    """Create an empty cache divided by head; `specs` describe the heads of one device."""
    shares = degree(mesh, BY_HEAD)

    def create() -> KVCache:
        whole = (spec.on_heads(spec.num_kv_heads * shares) for spec in specs)
        states = tuple(spec.create(batch, capacity) for spec in whole)
        return KVCache(states, jnp.zeros(batch, jnp.int32), tuple(specs), capacity)

    shardings = jax.tree.map(partial(cache_sharding, mesh), jax.eval_shape(create))
    return jax.jit(create, out_shardings=shardings)()


Positions = Callable[[Array], Array]
"""Function like `positions_of`. Use a module-level function: it is hashed."""


@partial(jax.jit, static_argnames=("mesh", "positions"))
def embed_prompts(
    embeddings: Embeddings,
    tokens: Int[Array, "B T"],
    length: Int[Array, ""],
    mesh: Mesh,
    positions: Positions = positions_of,
) -> Float[Array, "B T D"]:
    """Return the embeddings of prompts of `length` tokens with padding, divided by token."""

    def local(embeddings: Embeddings, tokens: Array, length: Array) -> Array:
        # Padding repeats the last position, to stay within the table of learned positions.
        return embeddings.embed(tokens, jnp.minimum(positions(tokens), length - 1))

    in_specs = (PartitionSpec(), layout("B T"), PartitionSpec())
    return on_mesh(mesh, local, in_specs, layout("B T D"))(embeddings, tokens, length)


@partial(
    jax.jit,
    static_argnames=(
        "spec",
        "capacity",
        "mesh",
        "implementation",
        "weights",
        "payload",
        "attention",
        "positions",
    ),
)
def prompt_layer(
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
    attention: ShardedAttention = sharded_attention,
    positions: Positions = positions_of,
) -> tuple[Array, State | None, Any]:
    """Run one layer on whole prompts x [B, T, D]; return its output, cache and auxiliary results.

    Jitted so that equal layers are traced and compiled once. The cache is None without a `capacity`.
    `attention` must be `sharded_attention` where `check_attention` says so.
    """

    def local(block: Block, x: Array, end: Array, aux: Any) -> tuple[Array, State | None, Any]:
        own_positions, formats = positions(x), Formats.of(payload, block.attention, spec.R, spec.Z)
        options: Any = {"scale": block.attention.scale, "implementation": implementation}
        if attention is sharded_attention:
            options |= {"formats": formats}

        def attend(q: Array, k: NewKeys, v: Array) -> tuple[Array, tuple[State | None, Any]]:
            keep: Callable[..., State]
            keys = k.keys
            own_options = options if k.shift is None else options | {"shift": k.shift}
            if spec.exchange == "quantized":
                o, far, next_aux = coded_attention(q, keys, v, end, aux, spec=spec, **own_options)
                keep = partial(coded_state, spec, far)
            else:
                o, exchanged = attention(q, keys, v, spec=spec, **own_options)
                keep, next_aux = partial(prompt_state, spec, exchanged, formats=formats), aux
            return o, (None if capacity is None else keep(keys, v, own_positions, end, capacity), next_aux)

        block = whole_weights(block, weights)
        reduce = sum_over(mesh, BY_TOKEN)
        x, (state, next_aux) = block(x, own_positions, attend, implementation, reduce=reduce)
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
def token_layer(
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
    first: None = None,
) -> tuple[Array, State, Any]:
    """Run one layer on new tokens, divided by head; return what `extend_layer_alone` does.

    Layers on a mesh share no arrays, so that `first` is None.
    """

    def local(
        block: Block, x: Array, state: State, aux: Any, positions: Array, end: Array, table: Array | None
    ) -> tuple[Array, State, Any]:
        own = spec.on_heads(block.attention.k.shape[1])
        half, state, aux = start_layer(
            block,
            own,
            x,
            with_new_empties(state),
            aux,
            positions,
            end,
            implementation,
            table=table,
        )
        return block.finish(half, sum_over(mesh, BY_HEAD)), with_new_empties(state), aux

    state_spec = jax.tree.map(cache_layout, state)
    token, sequences, aux_spec = layout("B 1 D"), layout("B"), layout("B S K R")
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
