"""duo: some KV heads keep far tokens, the others sinks and window (Xiao et al. 2024, arXiv 2410.10819).

The paper finds the heads that retrieve by gates, trained on passages to be remembered;
`zdc_jax.planning.retrieving` measures them instead.
"""

from dataclasses import dataclass

from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.cache.retrieving_heads import RetrievingHeads
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.methods import MethodSettings, layer_shape
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Settings(MethodSettings):
    """heads: of each layer, the KV heads that retrieve, ascending; none in layers of rank 0.

    A layer without any is a ring alone, whatever its ranks.
    """

    heads: tuple[tuple[int, ...], ...] = ()


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's."""
    assert isinstance(plan.settings, Settings)
    heads, count = plan.settings.heads, len(plan.layers)
    if len(heads) != count:
        raise PlanError(f"heads has {len(heads)} lists, it must have one for each of {count} layers")
    return tuple(_layer_cache(plan, index, dtype, heads[index]) for index in range(count))


def _layer_cache(plan: CompressionPlan, index: int, dtype: str, heads: tuple[int, ...]) -> LayerCacheSpec:
    shape = layer_shape(plan, dtype, index)
    if heads:
        if not shape["R"]:
            raise PlanError(f"layer {index}: heads={heads} must be none: the layer has rank 0")
        return RetrievingHeads(**shape, heads=heads)
    if not shape["window"]:
        raise PlanError(f"layer {index}: window=0 must be at least 1 token where no head retrieves")
    return PrefixRing(**shape | {"R": 0, "Z": 0})
