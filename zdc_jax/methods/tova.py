"""tova: far tokens that the last query attended to, the same in all heads (Oren et al. 2024, TOVA).

The last query is that which completes a block; the paper lets one token go after each. A prompt that is read
exactly, a multiple of `block` long, keeps what kvpress' TOVAPress does with sinks=0, window=1.
"""

from dataclasses import dataclass

from zdc_jax.cache.evicting import Scoring
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.methods import EvictingSettings, evicting_layers
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Settings(EvictingSettings):
    """None of its own. The plan's window is at least 1: the last query is near to itself."""


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's."""
    return evicting_layers(plan, dtype, lambda _: Scoring(observed=1, shared=True))
