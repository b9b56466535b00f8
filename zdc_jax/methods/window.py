"""window: the first tokens and the last ones, nothing between (StreamingLLM, Xiao et al. 2024).

Tokens keep their own positions, where the paper counts those within the cache: it goes on past what the model
was trained for, this library ends there.
"""

from dataclasses import dataclass

from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.methods import MethodSettings, far_layers
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Settings(MethodSettings):
    """None: the plan's sinks and window say all, its ranks nothing."""


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's.

    Raises:
      PlanError: no window.
    """
    if not plan.window:
        raise PlanError(f"window={plan.window} must be at least 1 token: the method 'window' keeps no others")
    return far_layers(plan, dtype, lambda _: lambda **shape: PrefixRing(**shape | {"R": 0, "Z": 0}))
