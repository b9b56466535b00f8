"""loki: far tokens chosen by the first coordinates of their keys (Singhania et al. 2024, arXiv 2406.02542).

In the paper coordinates are the principal components of keys: that is a basis of kind `keys`. Any ordered
basis will do.
"""

from dataclasses import dataclass
from functools import partial

from zdc_jax.cache.choosing import LeadingScores
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.methods import MethodSettings, far_layers
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Settings(MethodSettings):
    """index: first coordinates that choose, up to each layer's rank; read: far tokens read a KV head."""

    index: int = 16
    read: int = 256


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's."""
    if not plan.rotated:
        raise PlanError(
            "rotated=False: method 'loki' chooses by the first coordinates of a basis; it must be True"
        )
    return far_layers(plan, dtype, lambda own: partial(LeadingScores, index=own.index, read=own.read))
