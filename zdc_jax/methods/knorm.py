"""knorm: far tokens whose keys are short are kept (Devoto et al. 2024, a simple L2-norm-based strategy).

Keys are as attention sees them, after the rotary embedding; in a calibrated basis that is no rotation
(`balanced`) their length is another than the model's own. A prompt that is read exactly, a multiple of
`block` long, keeps what kvpress' KnormPress does with sinks=0, window=0, where no basis is folded in.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.cache.evicting import Scoring
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.methods import EvictingSettings, evicting_layers
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Settings(EvictingSettings):
    """None of its own."""


@dataclass(frozen=True, kw_only=True)
class NormScoring(Scoring):
    """-‖k‖ of all coordinates that the projection gives, whatever attention says."""

    observed: int | None = 0

    def score_new(self, k: Float[Array, "B T K H"]) -> Float[Array, "B T K"]:
        return -jnp.linalg.norm(k.astype(jnp.float32), axis=-1)


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's."""
    return evicting_layers(plan, dtype, lambda _: NormScoring())
