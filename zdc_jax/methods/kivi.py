"""kivi: keys in integers per channel and values in integers per token, as in KIVI (Liu et al. 2024).

A channel of keys has a scale and a zero point for `group` consecutive tokens, which are quantized when the
last of them arrives. The plan's window, of at least `group` tokens, is KIVI's residual.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from zdc_jax.cache.codes.integers import ChannelIntegers, TokenIntegers
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import check_one_of, check_range, far_layers
from zdc_jax.planned_layers import MethodSettings, PlannedLayers


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method.

    Attributes:
      bits: bits of an integer: 2, 3, 4 or 8.
      group: tokens of a key channel, or channels of a value, that share a scale and a zero point. Where a
        rank is no multiple of `group`, values use the largest divisor of the rank below `group`.
    """

    bits: int = 4
    group: int = 32

    def __post_init__(self) -> None:
        check_one_of("bits", self.bits, (2, 3, 4, 8))
        check_range("group", self.group, 2, 1024)


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    return far_layers(plan, dtype, _create_far_spec)


def _create_far_spec(settings: Settings) -> Callable[..., LayerCacheSpec]:
    keys, values = (code(settings.bits, settings.group) for code in (ChannelIntegers, TokenIntegers))
    return partial(CodedStore, key_code=keys, value_code=values)
