"""One layer of the transformer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from flax import nnx
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig
from zdc_jax.model.attention import Attention
from zdc_jax.model.layers import FeedForward, Norm, Reduce, whole
from zdc_jax.ops.attention import Implementation

Attend = Callable[[Array, Any, Any], Array]
"""(q [B, T, N, R], k [B, T, K, R], v [B, T, K, Z]) → o [B, T, N, Z]."""
Project = Callable[[Array, Array], tuple[Array, Any, Any]]
"""(x [B, T, D], positions [B, T]) → q, k, v; k and v in the form that `Attend` takes."""


class Block(nnx.Module):
    """One layer; norms come before each half (`pre_norm`) or after its residual sum (OPT-350m)."""

    def __init__(self, weights: Mapping[str, Any], config: ModelConfig):
        self.attention_norm = Norm(weights["attention_norm"], config.norm_eps)
        self.attention = Attention(weights["attention"], config)
        self.mlp_norm = Norm(weights["mlp_norm"], config.norm_eps)
        self.mlp = FeedForward(weights["mlp"], config.activation)
        self.pre_norm = config.pre_norm

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        attend: Attend,
        implementation: Implementation | None = None,
        project: Project | None = None,
        reduce: Reduce = whole,
    ) -> Float[Array, "B T D"]:
        with jax.named_scope("attention"):
            q, k, v = self.projected(x, positions, implementation, project)
            x = x + self.attention.output(attend(q, k, v), reduce)
            x = x if self.pre_norm else self.attention_norm(x)
        with jax.named_scope("mlp"):
            x = x + self.mlp(self.mlp_norm(x) if self.pre_norm else x, reduce)
            return x if self.pre_norm else self.mlp_norm(x)

    def projected(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        implementation: Implementation | None = None,
        project: Project | None = None,
    ) -> tuple[Array, Any, Any]:
        """q, k, v as `Attend` takes them."""
        project = project or partial(self.attention.project, implementation=implementation)
        return project(self.attention_norm(x) if self.pre_norm else x, positions)
