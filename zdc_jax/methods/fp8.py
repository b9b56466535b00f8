"""fp8: keys and values in float8 e4m3 without scales or calibration, which vLLM calls `fp8`."""

from dataclasses import dataclass

from zdc_jax.cache.codes.code import Float8
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import coded_layers
from zdc_jax.planned_layers import MethodSettings, PlannedLayers


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method, which has none."""


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    return coded_layers(plan, dtype, lambda _: (Float8(), Float8()))
