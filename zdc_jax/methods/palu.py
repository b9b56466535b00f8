"""palu: low ranks of keys before their rotary embedding, and of values (Chang et al. 2024, arXiv 2407.21118).

Ranks are those of the plan, one factor a KV head (the paper's M-LRD). Keys are reconstructed when they are
read; the way back of values is in W_O. The basis must have been calibrated with the principal components of
keys before the rotary embedding (`Basis.k_latent`).
"""

from dataclasses import dataclass
from typing import ClassVar

from zdc_jax.cache.latents import Latents
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.methods import MethodSettings, far_layers
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Settings(MethodSettings):
    """None: ranks, sinks and window say all."""

    latent_keys: ClassVar[bool] = True


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's."""
    if not plan.rotated:
        raise PlanError("rotated=False: method 'palu' keeps latents of a basis; it must be True")
    return far_layers(plan, dtype, lambda _: Latents)
