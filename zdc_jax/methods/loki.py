"""loki: read the far tokens that first coordinates of keys choose (Singhania et al. 2024, arXiv 2406.02542).

The paper uses the principal components of keys, which are a basis of kind `keys`. Any ordered basis works.
"""

from dataclasses import dataclass
from typing import Any

from zdc_jax.cache.specs.choosing import LeadingScores
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import check_calibrated, far_layers
from zdc_jax.planned_layers import MethodSettings, PlannedLayers


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method.

    Attributes:
      index: number of first coordinates that choose, at most each layer's rank.
      read: far tokens that the queries of a KV head read.
    """

    index: int = 16
    read: int = 256


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    check_calibrated(plan, "loki")

    def create_spec(settings: Settings, **shape: Any) -> LeadingScores:
        return LeadingScores(**shape, index=settings.index, read=settings.read)

    return far_layers(plan, dtype, create_spec)
