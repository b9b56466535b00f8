"""Models that lack one part of the method each (ZDC §6.5), for `bench_ablation`."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from convert.calibration.groups import ImportanceMethod, layer_and_importance
from zdc_jax.axes import Array
from zdc_jax.basis import Basis
from zdc_jax.cache.classes import ClassBlocks, class_order
from zdc_jax.config import ModelConfig
from zdc_jax.fold import cast
from zdc_jax.model.attention import Attention
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.plan import CompressionPlan, LayerRanks

Importance = ImportanceMethod | Literal["random"]
"""How tokens are ranked; `random` is what any of them has to beat."""


class OnlineAttention(Attention):
    """/ZO: unmodified projections, then q, k and v brought into the basis and cut by products of their own,
    and the heads' outputs brought back before the unmodified W_O.

    maps: q_map, k_map [K, H, R], v_map [K, H, Z], o_map [K, Z, H], as in `Basis`.
    """

    def __init__(
        self, weights: Mapping[str, Array], config: ModelConfig, layer: int, maps: Mapping[str, Array]
    ):
        super().__init__(weights, config, config.layers[layer])
        self.q_map, self.k_map = nnx.Param(maps["q_map"]), nnx.Param(maps["k_map"])
        self.v_map, self.o_map = nnx.Param(maps["v_map"]), nnx.Param(maps["o_map"])

    def project(
        self, x: Array, positions: Array, implementation: Implementation | None = None
    ) -> tuple[Array, Array, Array]:
        q, k, v = Attention.project(self, x, positions, implementation)
        return by_head(q, self.q_map[...]), by_head(k, self.k_map[...]), by_head(v, self.v_map[...])

    def output(self, o: Array) -> Array:
        return Attention.output(self, by_head(o, self.o_map[...]))


class RestoringAttention(OnlineAttention):
    """/ZO as in the paper's Fig. 10a: keys and values are compressed for the cache alone, and come back to
    their full width before attention."""

    def project(
        self, x: Array, positions: Array, implementation: Implementation | None = None
    ) -> tuple[Array, Array, Array]:
        q, k, v = Attention.project(self, x, positions, implementation)
        k, v = by_head(k, self.k_map[...]), by_head(v, self.v_map[...])
        return q, by_head(k, self.q_map[...].swapaxes(1, 2)), by_head(v, self.o_map[...])

    def output(self, o: Array) -> Array:
        return Attention.output(self, o)


def by_head(x: Float[Array, "B T N H"], maps: Float[Array, "K H C"]) -> Float[Array, "B T N C"]:
    """Every head's rows times the matrix of its KV head."""
    B, T, N, H = x.shape
    grouped = x.reshape(B, T, maps.shape[0], -1, H)
    return jnp.einsum("BTKGH,KHC->BTKGC", grouped, maps).reshape(B, T, N, -1)


def online_network(
    dense: Transformer,
    weights: list[dict[str, Any]],
    plan: CompressionPlan,
    basis: Basis,
    kind: type[OnlineAttention],
) -> Transformer:
    """The unmodified model `dense`, whose layers are `weights`, with a plan without window applied online."""
    dtype, config = dense.dtype, dense.config
    network = nnx.clone(dense)
    network.plan = plan
    for index, (block, ranks) in enumerate(zip(network.layers, plan.layers, strict=True)):
        maps = {
            "q_map": basis.q_map[index, :, :, : ranks.qk],
            "k_map": basis.k_map[index, :, :, : ranks.qk],
            "v_map": basis.v_map[index, :, :, : ranks.v],
            "o_map": basis.o_map[index, :, : ranks.v],
        }
        attention = jax.tree.map(jnp.asarray, cast(weights[index]["attention"], dtype))
        block.attention = kind(attention, config, index, jax.tree.map(jnp.asarray, cast(maps, dtype)))
    return network


class MaskedClasses(Transformer):
    """/LT: token classes, without a window, from any measure of importance.

    The product classifies by softmax denominators alone. Here all tokens are stored at the width of the
    important ones and the coordinates that the others would lack are zero, which is the same arithmetic:
    with `denominator` perplexity is the product's within rounding. Nothing is saved.
    """

    def __init__(self, network: Transformer, importance: Importance):
        """Shares the arrays of a model of the product with a class plan."""
        self.config, self.plan = network.config, network.plan
        self.embeddings, self.layers = network.embeddings, network.layers
        self.importance = importance

    def hidden(
        self, tokens: Int[Array, "B T"], implementation: Implementation | None = None
    ) -> Float[Array, "B T D"]:
        """Last hidden states."""
        classes = self.plan.classes
        assert classes is not None
        x = self.embeddings.embed(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
        for group, leader in enumerate(classes.leaders):
            method = "denominator" if self.importance == "random" else self.importance
            x, importance = layer_and_importance(self.layers[leader], x, method)
            if self.importance == "random":
                importance = jax.random.uniform(jax.random.key(leader), importance.shape)
            important = important_tokens(importance, classes.blocks(group))
            for member in classes.members(group, len(self.layers)):
                x = _masked_layer(self.layers[member], x, important, self.plan.layers[member])
        return x


@partial(jax.jit, static_argnames="blocks")
def important_tokens(importance: Float[Array, "B T"], blocks: ClassBlocks) -> Bool[Array, "B T"]:
    """Which tokens the product would put into the important segment."""
    first, _ = class_order(importance, jnp.ones(importance.shape, bool), blocks)
    rows = jnp.arange(len(importance))[:, None]
    return jnp.zeros(importance.shape, bool).at[rows, first].set(True)


@partial(jax.jit, static_argnames="less")
def _masked_layer(block: Block, x: Array, important: Array, less: LayerRanks) -> Array:
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])

    def kept(values: Array, rank: int) -> Array:
        return jnp.where(important[:, :, None, None] | (np.arange(values.shape[-1]) < rank), values, 0)

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return block.attention.attend(q, kept(k, less.qk), kept(v, less.v))

    return block(x, positions, attend)[0]
