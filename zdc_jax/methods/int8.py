"""int8: keys and values in 8-bit integers with a scale per token and head."""

from dataclasses import dataclass
from functools import partial

from zdc_jax.cache.codes.code import Int8
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import far_layers
from zdc_jax.planned_layers import MethodSettings, PlannedLayers


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method, which has none."""


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    return far_layers(plan, dtype, lambda _: partial(CodedStore, key_code=Int8(), value_code=Int8()))
