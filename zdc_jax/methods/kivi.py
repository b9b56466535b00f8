"""kivi: keys in integers per channel and values in integers per token, as in KIVI (Liu et al. 2024).

A channel of keys has a scale and a zero point for `group` consecutive tokens, which are quantized when the
last of them arrives. The plan's window, of at least `group` tokens, is KIVI's residual.
"""

from dataclasses import dataclass

from zdc_jax.cache.codes.integers import ChannelIntegers, TokenIntegers
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import IntegerSettings, coded_layers
from zdc_jax.planned_layers import PlannedLayers


@dataclass(frozen=True)
class Settings(IntegerSettings):
    """Settings of the method. A group has tokens of a key channel, or channels of a value."""


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""

    def create_codes(settings: Settings) -> tuple[ChannelIntegers, TokenIntegers]:
        return ChannelIntegers(settings.bits, settings.group), TokenIntegers(settings.bits, settings.group)

    return coded_layers(plan, dtype, create_codes)
