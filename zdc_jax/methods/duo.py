"""duo: far tokens in some KV heads, sinks and window in the others (Xiao et al. 2024, arXiv 2410.10819).

The paper finds the retrieving heads with gates, trained on passages to be remembered.
`zdc_jax.planning.retrieving` measures the heads instead.
"""

from dataclasses import dataclass

from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.specs.retrieving_heads import RetrievingHeads
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.methods import layer_shape
from zdc_jax.planned_layers import MethodSettings, PlannedLayers


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method.

    Attributes:
      heads: KV heads that retrieve in each layer, ascending; empty for layers of rank 0. A layer without such
        heads is a ring, whatever its ranks.
    """

    heads: tuple[tuple[int, ...], ...] = ()


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    assert isinstance(plan.settings, Settings)
    heads, count = plan.settings.heads, len(plan.layers)
    if len(heads) != count:
        raise PlanError(f"heads has {len(heads)} lists; it must have one for each of the {count} layers")
    return tuple(_create_spec(plan, index, dtype, heads[index]) for index in range(count))


def _create_spec(plan: PlannedLayers, index: int, dtype: str, heads: tuple[int, ...]) -> LayerCacheSpec:
    shape = layer_shape(plan, dtype, index)
    if heads:
        if not shape["R"]:
            raise PlanError(f"layer {index}: heads={heads} must be empty, because the layer has rank 0")
        return RetrievingHeads(**shape, heads=heads)
    if not shape["window"]:
        raise PlanError(f"layer {index}: window=0 must be at least 1 token, because no head retrieves")
    return PrefixRing(**shape | {"R": 0, "Z": 0})
