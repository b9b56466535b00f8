"""gear: GEAR (Kang et al. 2024), few-bit integers, with a low rank and outliers that mend their error.

Integers are KIVI's, with one scale for all `group` tokens of a channel of keys, and one for all channels of a
token of values; heads are coded apart. With ranks below the head dim it is what the ZDC paper calls GEAR-ZDC.
The plan's window holds the newest tokens, at least `group`, until their block is coded. Low rank and outliers
are of each block of `group` tokens, where the authors take whole prompts: they cost more bytes here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from zdc_jax.cache.coded_store import CodedStore
from zdc_jax.cache.residual_codes import MAX_VECTOR_LENGTH, Gear
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.methods import MethodSettings, check_one_of, check_range, far_layers
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Settings(MethodSettings):
    """What is kept of a block of `group` tokens, the same for keys and values.

    bits: of an integer, 2, 3, 4 or 8. group: a multiple of 8, at most 256. rank: columns of the low rank, 0
    for none. outliers: share of coordinates that are outliers, 0 to 0.5; half of them large, half of them
    small, in whole numbers (of 64 channels 2 % are one and one, of 32 none).
    """

    bits: int = 4
    group: int = 64
    rank: int = 2
    outliers: float = 0.02

    def __post_init__(self) -> None:
        check_one_of("bits", self.bits, (2, 3, 4, 8))
        check_one_of("group", self.group, tuple(range(8, MAX_VECTOR_LENGTH + 1, 8)))
        check_range("rank", self.rank, 0, MAX_VECTOR_LENGTH)
        if type(self.outliers) not in (int, float) or not 0 <= self.outliers <= 0.5:
            raise PlanError(f"outliers={self.outliers!r:.80} must be a share from 0 to 0.5")


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's."""

    def far(settings: Settings) -> Callable[..., LayerCacheSpec]:
        code = partial(Gear, settings.bits, settings.group, settings.rank, settings.outliers)
        return partial(CodedStore, key_code=code(by_channel=True), value_code=code(by_channel=False))

    return far_layers(plan, dtype, far)
