"""zdc: first coordinates of all tokens (ZDC §4); near tokens at full width (ours)."""

from dataclasses import dataclass
from functools import lru_cache

from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import layer_shape
from zdc_jax.planned_layers import MethodSettings, PlannedLayers

_create_ring = lru_cache(maxsize=1024)(PrefixRing)
"""Constructor of rings; a search counts the bytes of many plans with few distinct layers."""


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method, which has none besides ranks, sinks and window."""

    search = "ranks"


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    return tuple(_create_ring(**layer_shape(plan, dtype, index)) for index in range(len(plan.layers)))
