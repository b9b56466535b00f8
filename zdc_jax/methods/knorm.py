"""knorm: keep the far tokens with the shortest keys, by L2 norm (Devoto et al. 2024).

Norms are those of keys in attention, after the rotary embedding. A calibrated basis that is not a rotation
(`balanced`) changes them. The method matches KnormPress in kvpress with sinks=0, window=0. This holds if a
prompt is read exactly, its length is a multiple of `block`, and no basis is folded in.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.cache.specs.evicting import Scoring
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import EvictingSettings, evicting_layers
from zdc_jax.planned_layers import PlannedLayers


@dataclass(frozen=True)
class Settings(EvictingSettings):
    """Settings of the method: those of eviction methods."""


@dataclass(frozen=True, kw_only=True)
class NormScoring(Scoring):
    """Scores -‖k‖ over all coordinates that the projection returns, independent of attention."""

    observed: int | None = 0

    def score_new(self, k: Float[Array, "B T K H"]) -> Float[Array, "B T K"]:
        return -jnp.linalg.norm(k.astype(jnp.float32), axis=-1)


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    return evicting_layers(plan, dtype, lambda _: NormScoring())
