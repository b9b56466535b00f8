"""One transformer layer, and the types of its attention and projection functions."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.config import LayerSpec, ModelConfig
from zdc_jax.model.attention import Attention
from zdc_jax.model.layers import FeedForward, Norm, Reduce, skip_reduction
from zdc_jax.model.tiles import by_tiles, split_tokens
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.contract import duplicate_single_token
from zdc_jax.ops.new_keys import NewKeys

Attend = Callable[[Array, NewKeys, Any], tuple[Array, Any]]
"""Attention of a layer: (q [B, T, N, R], k, v [B, T, K, Z]) → o [B, T, N, Z], extra results."""
Project = Callable[[Attention, Array, Array, Implementation | None], tuple[Array, NewKeys, Any]]
"""Projection of a layer: (attention, x [B, T, D], positions [B, T], implementation) → q, k, v."""


class HalfLayer(NamedTuple):
    """Layer that is computed up to the outputs of its heads.

    Attributes:
      x: input of the layer; its output if `o` is None.
      o: outputs of the heads; None if the layer is finished, as on a mesh.
    """

    x: Float[Array, "B T D"]
    o: Float[Array, "B T N Z"] | None

    def take(self, at: Int[Array, "B t"]) -> "HalfLayer":
        """Return some tokens of each sequence; a single one may be repeated (`duplicate_single_token`)."""

        def take(each: Array) -> Array:
            index = at.reshape(*at.shape, *(1,) * (each.ndim - 2))
            return duplicate_single_token(jnp.take_along_axis(each[: len(at)], index, axis=1))

        return jax.tree.map(take, self)


def map_tokens(change: Callable[[Array], Array], q: Array, k: NewKeys, v: Any) -> tuple[Array, NewKeys, Any]:
    """Apply `change` to every per-token array of q, k and v, as a `Project` returns them."""
    return change(q), k.each(change), jax.tree.map(change, v)


class Block(nnx.Module):
    """Transformer layer: attention and feed-forward, each added to its input, with the norms of `spec`."""

    def __init__(
        self,
        weights: Mapping[str, Any],
        config: ModelConfig,
        spec: LayerSpec,
        *,
        reproducible: bool = False,
    ):
        """Create the layer; `reproducible` as in `Transformer`."""

        def norm(name):
            return Norm(weights[name], config)

        sandwich = spec.norms == "sandwich"
        self.attention_norm, self.mlp_norm = norm("attention_norm"), norm("mlp_norm")
        self.attention_output_norm = norm("attention_output_norm") if sandwich else None
        self.mlp_output_norm = norm("mlp_output_norm") if sandwich else None
        self.attention = Attention(weights["attention"], config, spec)
        self.mlp = FeedForward(weights["mlp"], config.activation)
        self.norms, self.residual_scale = spec.norms, config.residual_scale
        self.reproducible = reproducible

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        attend: Attend,
        implementation: Implementation | None = None,
        project: Project = Attention.project,
        reduce: Reduce = skip_reduction,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Return the layer's output and the auxiliary results of `attend`."""
        half, aux = self.start(x, positions, attend, implementation, project)
        return self.finish(half, reduce), aux

    def start(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        attend: Attend,
        implementation: Implementation | None = None,
        project: Project = Attention.project,
    ) -> tuple[HalfLayer, Any]:
        """Return the layer as far as its heads have attended, and the auxiliary results of `attend`."""
        with jax.named_scope("attention"):
            q, k, v = self.projected(x, positions, implementation, project)
            o, aux = attend(q, k, v)
        return HalfLayer(x, o), aux

    def finish(self, half: HalfLayer, reduce: Reduce = skip_reduction) -> Float[Array, "B T D"]:
        """Return the output of a layer after `start`, for the tokens that `half` has."""
        if half.o is None:
            return half.x
        finish = partial(self._finish, reduce=reduce)
        return by_tiles(finish, half.x, half.o) if self.reproducible else finish(half.x, half.o)

    def _finish(self, x: Float[Array, "B T D"], o: Float[Array, "B T N Z"], reduce: Reduce) -> Array:
        """Return the layer's output from its input and the outputs of the heads."""
        with jax.named_scope("attention"):
            y = self.attention.output(o, reduce)
            x = self._sum(x, y, self.attention_norm, self.attention_output_norm)
        with jax.named_scope("mlp"):
            y = self.mlp(self._input(x, self.mlp_norm), reduce)
            return self._sum(x, y, self.mlp_norm, self.mlp_output_norm)

    def projected(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        implementation: Implementation | None = None,
        project: Project = Attention.project,
    ) -> tuple[Array, NewKeys, Any]:
        """Return q, k and v in the form that `attend` expects."""

        def compute(x: Array, positions: Array) -> tuple[Array, NewKeys, Any]:
            return project(self.attention, self._input(x, self.attention_norm), positions, implementation)

        if not self.reproducible:
            return compute(x, positions)
        # What is no array of tokens, such as a basis, comes from one token.
        _, rebuild = split_tokens(*compute(x[:, :1], positions[:, :1]))
        return rebuild(by_tiles(lambda *tile: split_tokens(*compute(*tile))[0], x, positions))

    def _input(self, x: Array, norm: Norm) -> Array:
        return x if self.norms == "post" else norm(x)

    def _sum(self, x: Array, y: Array, norm: Norm, output_norm: Norm | None) -> Array:
        if output_norm is not None:
            y = output_norm(y)
        if self.residual_scale != 1:
            y = (y.astype(jnp.float32) * self.residual_scale).astype(y.dtype)
        return norm(x + y) if self.norms == "post" else x + y
