"""kivi: KIVI (Liu et al. 2024), keys in integers per channel, values in integers per token.

A channel of keys has a scale and a zero point for `group` consecutive tokens, which are coded when the last
of them is there. The plan's window, of at least `group` tokens, is KIVI's residual.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from zdc_jax.cache.coded_store import CodedStore
from zdc_jax.cache.integer_codes import ChannelIntegers, TokenIntegers
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.methods import MethodSettings, check_one_of, check_range, far_layers
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Settings(MethodSettings):
    """bits: of an integer, 2, 3, 4 or 8. group: tokens, or channels, that share a scale and a zero point.

    Where a rank is no multiple of `group`, values take the largest divisor of it below `group`.
    """

    bits: int = 4
    group: int = 32

    def __post_init__(self) -> None:
        check_one_of("bits", self.bits, (2, 3, 4, 8))
        check_range("group", self.group, 2, 1024)


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's."""

    def far(settings: Settings) -> Callable[..., LayerCacheSpec]:
        keys, values = (code(settings.bits, settings.group) for code in (ChannelIntegers, TokenIntegers))
        return partial(CodedStore, key_code=keys, value_code=values)

    return far_layers(plan, dtype, far)
