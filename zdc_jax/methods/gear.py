"""gear: few-bit integers whose error a low rank and outliers correct, as in GEAR (Kang et al. 2024).

The integers are those of KIVI, with one scale for the `group` tokens of a channel of keys, and one scale for
all channels of a token of values. Heads are quantized separately. With ranks below the head dimension, the
method is what the ZDC paper calls GEAR-ZDC. The plan's window stores the newest tokens, at least `group`,
until their block is quantized. Low rank and outliers belong to each block of `group` tokens. The authors
compute them for whole prompts, which costs fewer bytes.
"""

from dataclasses import dataclass

from zdc_jax.cache.codes.residual import MAX_VECTOR_LENGTH, Gear
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.methods import check_one_of, check_range, coded_layers
from zdc_jax.planned_layers import MethodSettings, PlannedLayers


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method, the same for keys and values.

    Attributes:
      bits: bits of an integer: 2, 3, 4 or 8.
      group: tokens of a block, a multiple of 8 up to 256.
      rank: rank of the correction, 0 for none.
      outliers: share of coordinates that are outliers, 0 to 0.5. Half of them are the largest coordinates and
        half the smallest, rounded to whole numbers: 2 % of 64 channels are one each, of 32 none.
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


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""

    def create_codes(settings: Settings) -> tuple[Gear, Gear]:
        options = settings.bits, settings.group, settings.rank, settings.outliers
        return Gear(*options, by_channel=True), Gear(*options, by_channel=False)

    return coded_layers(plan, dtype, create_codes)
