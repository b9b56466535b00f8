"""Token embeddings and output head."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig
from zdc_jax.model.layers import Norm, param
from zdc_jax.model.tiles import by_tiles
from zdc_jax.ops.contract import einsum_f32


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
