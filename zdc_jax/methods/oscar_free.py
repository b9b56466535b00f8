"""oscar_free: rotated integers without calibration, as in OScaR (Su et al. 2026, arXiv 2605.19660).

OScaR (Omni-Scaled Canalized Rotation) is not OSCAR, the method `oscar`. Keys and values are rotated by a
Hadamard matrix. Keys are divided by their length and quantized per channel, `group` tokens at a time; values
are quantized per token. The paper keeps 128 recent tokens in 16 bits and no sinks (`window=128`).

Differences from the paper: a key has a length of 16 bits per KV head, where the paper has one for all heads;
signs are random in the Hadamard matrix; and scales and zero points are those of `kivi`. Tokens of the window
also have slots in the store.
"""

from dataclasses import dataclass

from zdc_jax.cache.codes.integers import ScaledChannelIntegers, TokenIntegers
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import IntegerSettings, coded_layers
from zdc_jax.planned_layers import PlannedLayers, Rotations


@dataclass(frozen=True)
class Settings(IntegerSettings):
    """Settings of the method. A group has tokens of a key channel, or channels of a value."""

    bits: int = 2

    def rotations(self, R: int, Z: int) -> Rotations:
        return (R,), (Z,)


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""

    def create_codes(settings: Settings) -> tuple[ScaledChannelIntegers, TokenIntegers]:
        return ScaledChannelIntegers(settings.bits, settings.group), TokenIntegers(
            settings.bits, settings.group
        )

    return coded_layers(plan, dtype, create_codes)
