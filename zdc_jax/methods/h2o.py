"""h2o: far tokens that received most attention from all queries so far are kept (Zhang et al. 2023, H2O).

The paper's heavy hitters, beside recent tokens; ranks below H make it H2O-ZDC. The paper lets one token go
after each, here a block is settled at once. A group of query heads counts by its mean. A prompt that is read
exactly, a multiple of `block` long, keeps what kvpress' ObservedAttentionPress does with mean=true, sinks=0,
window=0.
"""

from dataclasses import dataclass

from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.evicting import Scoring
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.methods import EvictingSettings, evicting_layers
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Settings(EvictingSettings):
    """mean: sums are divided by the number of queries that could see the token; they favour old ones."""

    mean: bool = False


@dataclass(frozen=True, kw_only=True)
class MeanScoring(Scoring):
    """Attention received, by the number of queries from the token on."""

    def finalize(
        self, scores: Float[Array, "B K S"], positions: Int[Array, "B #K S"], length: Int[Array, " B"]
    ) -> Float[Array, "B K S"]:
        return scores / (length[:, None, None] - positions)


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's."""
    return evicting_layers(plan, dtype, lambda settings: MeanScoring() if settings.mean else Scoring())
