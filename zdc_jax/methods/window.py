"""window: the first tokens and the last tokens only (StreamingLLM, Xiao et al. 2024).

Tokens keep their own positions. The paper counts positions within the cache instead, and so continues past
the length that the model was trained for; this library ends there.
"""

from dataclasses import dataclass

from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.methods import far_layers
from zdc_jax.planned_layers import MethodSettings, PlannedLayers


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method: only the plan's sinks and window matter, not its ranks."""


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's.

    Raises:
      PlanError: the plan has no window.
    """
    if not plan.window:
        raise PlanError(
            f"window={plan.window} must be at least 1 token, because method 'window' stores no older tokens"
        )
    return far_layers(plan, dtype, lambda _, **shape: PrefixRing(**shape | {"R": 0, "Z": 0}))
