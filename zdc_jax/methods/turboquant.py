"""turboquant: rotated vectors in the optimal levels for a Gaussian, as in TurboQuant (Zandieh et al. 2025).

Both keys and values use the paper's quantization of least mean square error. vLLM's `turboquant` uses it for
keys, and integers for values. A token is quantized when it arrives.
"""

from dataclasses import dataclass

from zdc_jax.cache.codes.gaussian import TurnedGaussian
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import check_one_of, coded_layers
from zdc_jax.planned_layers import MethodSettings, PlannedLayers


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method.

    Attributes:
      bits_k: bits per coordinate of keys: 2, 3, 4 or 8.
      bits_v: bits per coordinate of values: 2, 3, 4 or 8.
    """

    bits_k: int = 4
    bits_v: int = 4

    def __post_init__(self) -> None:
        check_one_of("bits_k", self.bits_k, (2, 3, 4, 8))
        check_one_of("bits_v", self.bits_v, (2, 3, 4, 8))


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""

    def create_codes(settings: Settings) -> tuple[TurnedGaussian, TurnedGaussian]:
        return TurnedGaussian(settings.bits_k), TurnedGaussian(settings.bits_v)

    return coded_layers(plan, dtype, create_codes)
