"""palu: low ranks of keys before the rotary embedding, and of values (Chang et al. 2024, arXiv 2407.21118).

The ranks are those of the plan, with one factor per KV head (M-LRD in the paper). Keys are reconstructed when
they are read; W_O includes the reconstruction of values. The basis must have been calibrated with the
principal components of keys before the rotary embedding (`Basis.k_latent`).
"""

from dataclasses import dataclass
from typing import ClassVar

from zdc_jax.cache.specs.latents import Latents
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import check_calibrated, far_layers
from zdc_jax.planned_layers import MethodSettings, PlannedLayers


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method, which has none besides ranks, sinks and window."""

    latent_keys: ClassVar[bool] = True


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    check_calibrated(plan, "palu")
    return far_layers(plan, dtype, lambda _, **shape: Latents(**shape))
