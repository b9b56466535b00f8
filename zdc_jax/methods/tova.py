"""tova: keep the far tokens that the last query attended to, the same in all heads (Oren et al. 2024, TOVA).

The last query is the one that completes a block; the paper evicts one token after each query. If a prompt is
read exactly and its length is a multiple of `block`, the kept tokens are those of TOVAPress in kvpress with
sinks=0, window=1.
"""

from dataclasses import dataclass

from zdc_jax.cache.specs.evicting import Scoring
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import EvictingSettings, evicting_layers
from zdc_jax.planned_layers import PlannedLayers


@dataclass(frozen=True)
class Settings(EvictingSettings):
    """Settings of the method: those of eviction methods.

    The plan's window must be at least 1, because the last query is near to itself.
    """


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    return evicting_layers(plan, dtype, lambda _: Scoring(observed=1, shared=True))
