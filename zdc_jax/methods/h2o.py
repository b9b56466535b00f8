"""h2o: keep the far tokens that received most attention from all queries so far (Zhang et al. 2023, H2O).

The heavy hitters of the paper, together with recent tokens; with ranks below H, the method is H2O-ZDC. The
paper evicts one token per step; here the tokens of a block are evicted at once. The attention of a group of
query heads is averaged. If a prompt is read exactly and its length is a multiple of `block`, the kept tokens
are those of ObservedAttentionPress in kvpress with mean=true, sinks=0, window=0.
"""

from dataclasses import dataclass

from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.specs.evicting import Scoring
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import EvictingSettings, evicting_layers
from zdc_jax.planned_layers import PlannedLayers


@dataclass(frozen=True)
class Settings(EvictingSettings):
    """Settings of the method.

    Attributes:
      mean: whether sums are divided by the number of queries that could read the token, since sums favor old
        tokens.
    """

    mean: bool = False


@dataclass(frozen=True, kw_only=True)
class MeanScoring(Scoring):
    """Attention received, divided by the number of queries from the token on."""

    def finalize(
        self, scores: Float[Array, "B K S"], positions: Int[Array, "B #K S"], length: Int[Array, " B"]
    ) -> Float[Array, "B K S"]:
        return scores / (length[:, None, None] - positions)


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    return evicting_layers(plan, dtype, lambda settings: MeanScoring() if settings.mean else Scoring())
