"""A transformer on a mesh.

Prompts come whole, their tokens divided over `sequence`. Then tokens come one by one, with heads divided over
the same devices, on the cache as the prompt has left it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache import KVCache, LayerCache, check_fits, free_bytes
from zdc_jax.config import ModelConfig
from zdc_jax.errors import MeshError
from zdc_jax.model.block import Block
from zdc_jax.model.layers import Reduce, whole
from zdc_jax.model.transformer import Embeddings, Transformer
from zdc_jax.ops.attention import Implementation, cached_attention
from zdc_jax.parallel.attention import Method, check_method, sharded_attention
from zdc_jax.parallel.exchange import kv_copies
from zdc_jax.parallel.mesh import DATA, MODEL, SEQUENCE, degree, spec
from zdc_jax.parallel.payload import Payload, Scales
from zdc_jax.parallel.prompt_cache import Slots, layer_cache
from zdc_jax.parallel.weights import placed, replicated, weight_specs
from zdc_jax.plan import CompressionPlan, LayerRanks

BY_TOKEN, BY_HEAD = (MODEL,), (MODEL, SEQUENCE)
"""Mesh axes that divide the weights for prompts, whose tokens lie along `sequence`, and for single tokens."""


class ShardedTransformer(nnx.Module):
    """A `Transformer` on a mesh: batch over `data`; tokens of a prompt over `sequence`; heads over `model`.

    Every device along `sequence` holds all weights (of its share along `model`) for prompts, and beside them
    its share by head for tokens that are decoded, for which `sequence` divides heads as `model` does. Layers
    that have scales exchange q, k, v and o of prompts as float8 (`zdc_jax.parallel.payload`); the cache then
    holds the first coordinates of keys and values as they arrived, rounded.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: CompressionPlan,
        embeddings: Embeddings,
        layers: Iterable[Block],
        mesh: Mesh,
        *,
        decodes: bool = True,
    ):
        """Puts weights, of numpy or on devices, where the mesh needs them.

        Args:
          layers: in order, consumed one at a time.
          decodes: whether weights for decoded tokens are made; without them there is no `extend`.

        Raises:
          MeshError: heads or feed-forward columns cannot be divided over this mesh; before a layer is taken.
          NotImplementedError: the plan has token classes.
        """
        for name, count in (("num_heads", config.num_heads), ("ffn_dim", config.ffn_dim)):
            if count % degree(mesh, BY_HEAD):
                raise MeshError(
                    f"{name}={count} cannot be divided over model={mesh.shape[MODEL]} times "
                    f"sequence={mesh.shape[SEQUENCE]} devices"
                )
        if plan.classes is not None:
            raise NotImplementedError("plans with token classes run on one device")
        self.config, self.plan, self.mesh = config, plan, mesh
        self.embeddings = replicated(embeddings, mesh)
        self.prompt_layers = nnx.List([placed(block, mesh, BY_TOKEN) for block in layers])
        shared = self.prompt_layers if decodes else []
        self.token_layers = nnx.List([placed(block, mesh, BY_HEAD) for block in shared])

    @classmethod
    def of(cls, network: Transformer, mesh: Mesh) -> Self:
        """A network that is on one device; raises what the constructor does."""
        return cls(network.config, network.plan, network.embeddings, network.layers, mesh)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights, activations and cache."""
        return self.embeddings.tokens[...].dtype

    @property
    def payload(self) -> Payload:
        """What prompts are exchanged as."""
        return "native" if self.prompt_layers[0].attention.v_scale is None else "float8"

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        method: Method = "ulysses",
        implementation: Implementation | None = None,
    ) -> Float[Array, "B T' D"]:
        """Last hidden states of whole sequences, without a cache.

        T need not be a multiple of the devices along `sequence`: prompts are padded on the right to T', where
        causal attention does not look. The result is divided as the tokens are; that of padding is
        unspecified.

        Args:
          method: how attention gets at tokens of other devices, see `zdc_jax.parallel.attention`.
          implementation: of attention on each device, see `zdc_jax.ops.attention`.

        Raises:
          MeshError: rows or tokens cannot be divided over this mesh; before anything is computed.
          NotImplementedError: the implementation cannot do a call, or the method a float8 payload.
        """
        check_method(method, self.payload)
        x = self._embedded(tokens)
        near = (self.plan.sinks, self.plan.window)
        for block, ranks in zip(self.prompt_layers, self.plan.layers, strict=True):
            x = _whole_layer(block, x, ranks, near, self.mesh, method, implementation)
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
        divide them. Its first coordinates are where the exchange has brought them; the trailing ones of the
        last window and the sinks are scattered by head. Raises what `hidden` does.
        """
        x, layers = self._embedded(tokens), []
        near, slots = (self.plan.sinks, self.plan.window), Slots.of(self.plan, capacity)
        for block, ranks in zip(self.prompt_layers, self.plan.layers, strict=True):
            x, layer = _prompt_layer(block, x, end, ranks, near, slots, self.mesh, implementation)
            layers.append(layer)
        return last_token(x, end, self.mesh), KVCache(tuple(layers), end, slots.sinks, slots.window)

    def extend(
        self,
        cache: KVCache,
        tokens: Int[Array, "B 1"],
        end: Int[Array, " B"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B 1 D"], KVCache]:
        """`Transformer.extend` by one token a row; heads and F over `model` and `sequence`."""
        positions = cache.lengths[:, None]
        x, layers = self.embeddings.embed(tokens, positions), []
        for block, held in zip(self.token_layers, cache.layers, strict=True):
            near = (cache.sinks, cache.window)
            x, layer = _token_layer(block, x, held, positions, end, near, self.mesh, implementation)
            layers.append(layer)
        return x, KVCache(tuple(layers), end, cache.sinks, cache.window)

    def check_fits(self, batch: int, capacity: int) -> None:
        """Raises `CacheMemoryError` where a device's share of such a cache is more than its free memory.

        And `MeshError` where the rows cannot be divided over `data`.
        """
        rows, shares = self._rows(batch), degree(self.mesh, BY_HEAD)
        heads = self.config.num_kv_heads * kv_copies(self.config.num_kv_heads, shares) // shares
        plan = replace(self.plan, num_kv_heads=heads)
        check_fits(plan, batch=rows, capacity=capacity, dtype=self.dtype, free=free_bytes())

    def _rows(self, batch: int) -> int:
        """Of each device, after checking that they can be divided."""
        if batch % (count := self.mesh.shape[DATA]):
            raise MeshError(f"{batch} rows cannot be divided over data={count}: it must be a divisor")
        return batch // count

    def _embedded(self, tokens: Array) -> Array:
        """Embeddings of tokens [B, T], padded, after checking that they can be divided."""
        (B, T), U = tokens.shape, self.mesh.shape[SEQUENCE]
        self._rows(B)
        if T < U:
            raise MeshError(f"{T} tokens cannot be divided over sequence={U}: each device needs one")
        return _embed(self.embeddings, jnp.pad(tokens, ((0, 0), (0, -T % U))), jnp.int32(T), self.mesh)


@partial(jax.jit, static_argnames="mesh")
def _embed(embeddings: Embeddings, tokens: Array, length: Array, mesh: Mesh) -> Array:
    def local(embeddings: Embeddings, tokens: Array, length: Array) -> Array:
        # Padding takes the last position, so that it stays within the table of learned positions.
        return embeddings.embed(tokens, jnp.minimum(_positions(tokens), length - 1))

    in_specs = (PartitionSpec(), spec("B T"), PartitionSpec())
    return _on(mesh, local, in_specs, spec("B T D"))(embeddings, tokens, length)


@partial(jax.jit, static_argnames=("ranks", "near", "mesh", "method", "implementation"))
def _whole_layer(
    block: Block,
    x: Array,
    ranks: LayerRanks,
    near: tuple[int, int],
    mesh: Mesh,
    method: Method,
    implementation: Implementation | None,
) -> Array:
    """One layer on whole sequences. Jitted, so that layers alike are traced and compiled once."""
    attend = partial(
        sharded_attention,
        scale=block.attention.config.head_dim**-0.5,
        ranks=ranks,
        sinks=near[0],
        window=near[1],
        method=method,
        implementation=implementation,
        scales=Scales.of(block.attention, ranks),
    )

    def local(block: Block, x: Array) -> Array:
        return block(x, _positions(x), attend, implementation, reduce=_sum_over(mesh, BY_TOKEN))

    return _on(mesh, local, (weight_specs(block, BY_TOKEN), spec("B T D")), spec("B T D"))(block, x)


@partial(jax.jit, static_argnames=("ranks", "near", "slots", "mesh", "implementation"))
def _prompt_layer(
    block: Block,
    x: Array,
    end: Array,
    ranks: LayerRanks,
    near: tuple[int, int],
    slots: Slots,
    mesh: Mesh,
    implementation: Implementation | None,
) -> tuple[Array, LayerCache]:
    """One layer on whole prompts, and its cache with them. Jitted as `_whole_layer` is."""

    def local(block: Block, x: Array, end: Array) -> tuple[Array, LayerCache]:
        positions, exchanged, layer = _positions(x), None, None

        def keep(k: Array, v: Array) -> None:
            nonlocal exchanged
            exchanged = k, v

        def attend(q: Array, k: Array, v: Array) -> Array:
            nonlocal layer
            o = sharded_attention(
                q,
                k,
                v,
                scale=block.attention.config.head_dim**-0.5,
                ranks=ranks,
                sinks=near[0],
                window=near[1],
                method="ulysses",
                implementation=implementation,
                keep=keep,
                scales=Scales.of(block.attention, ranks),
            )
            layer = layer_cache(k, v, exchanged, positions, end, ranks, slots)
            return o

        x = block(x, positions, attend, implementation, reduce=_sum_over(mesh, BY_TOKEN))
        assert layer is not None
        return x, layer

    in_specs = (weight_specs(block, BY_TOKEN), spec("B T D"), spec("B"))
    return _on(mesh, local, in_specs, (spec("B T D"), spec("B K S R")))(block, x, end)


@partial(jax.jit, static_argnames="mesh")
def last_token(x: Float[Array, "B T D"], end: Int[Array, " B"], mesh: Mesh) -> Float[Array, "B D"]:
    """Hidden states of the last of `end` tokens of each row, from the device that holds it."""

    def local(x: Array, end: Array) -> Array:
        here = _positions(x) == end[:, None] - 1
        return jax.lax.psum(jnp.where(here[..., None], x, 0).sum(1), SEQUENCE)

    return _on(mesh, local, (spec("B T D"), spec("B")), spec("B D"))(x, end)


@partial(jax.jit, static_argnames=("near", "mesh", "implementation"))
def _token_layer(
    block: Block,
    x: Array,
    cache: LayerCache,
    positions: Array,
    end: Array,
    near: tuple[int, int],
    mesh: Mesh,
    implementation: Implementation | None,
) -> tuple[Array, LayerCache]:
    """One layer on one token a row, and its cache with it. Jitted as `_whole_layer` is."""

    def local(
        block: Block, x: Array, cache: LayerCache, positions: Array, end: Array
    ) -> tuple[Array, LayerCache]:
        cache = longer = _with_new_empties(cache)

        def attend(q: Array, k: Array, v: Array) -> Array:
            nonlocal longer
            longer, o, _ = cached_attention(
                q,
                k,
                v,
                cache,
                positions,
                end,
                scale=block.attention.config.head_dim**-0.5,
                sinks=near[0],
                window=near[1],
                implementation=implementation,
            )
            return o

        x = block(x, positions, attend, implementation, reduce=_sum_over(mesh, BY_HEAD))
        return x, _with_new_empties(longer)

    token, held = spec("B 1 D"), spec("B K S R")
    in_specs = (weight_specs(block, BY_HEAD), token, held, spec("B 1"), spec("B"))
    return _on(mesh, local, in_specs, (token, held))(block, x, cache, positions, end)


def _with_new_empties(cache: LayerCache) -> LayerCache:
    """Makes empty arrays (rank 0 or H) anew: XLA for CPUs crashes on such arguments of a divided program."""
    return jax.tree.map(lambda x: x if x.size else jnp.zeros_like(x), cache)


def _positions(x: Array) -> Array:
    """Of this device's tokens, for x [B, t, ...]."""
    B, t = x.shape[:2]
    return jnp.broadcast_to(jax.lax.axis_index(SEQUENCE) * t + jnp.arange(t), (B, t))


def _sum_over(mesh: Mesh, among: tuple[str, ...]) -> Reduce:
    """Over the devices that share each product of a layer."""
    return whole if degree(mesh, among) == 1 else partial(jax.lax.psum, axis_name=among)


def _on(mesh: Mesh, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`local` on each device's share of the arguments."""
    # Replication is not checked: kernels do not say along which axes their results vary.
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
