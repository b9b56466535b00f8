"""oscar_free: rotated integers without calibration, as in OScaR (Su et al. 2026, arXiv 2605.19660).

OScaR (Omni-Scaled Canalized Rotation) is not OSCAR, the method `oscar`. Keys and values are rotated by a
Hadamard matrix. Keys are divided by their length and quantized per channel, `group` tokens at a time; values
are quantized per token. The paper keeps 128 recent tokens in 16 bits and no sinks (`window=128`).

Differences from the paper: a key has a length of 16 bits per KV head, where the paper has one for all heads;
signs are random in the Hadamard matrix; and scales and zero points are those of `kivi`. Tokens of the window
also have slots in the store.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from zdc_jax.cache.codes.integers import ScaledChannelIntegers, TokenIntegers
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import check_one_of, check_range, far_layers
from zdc_jax.planned_layers import MethodSettings, PlannedLayers, Rotations


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method.

    Attributes:
      bits: bits of an integer: 2, 3, 4 or 8.
      group: tokens of a key channel, or channels of a value, that share a scale and a zero point, as in
        `kivi`.
    """

    bits: int = 2
    group: int = 32

    def __post_init__(self) -> None:
        check_one_of("bits", self.bits, (2, 3, 4, 8))
        check_range("group", self.group, 2, 1024)

    def rotations(self, R: int, Z: int) -> Rotations:
        return (R,), (Z,)


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    return far_layers(plan, dtype, _create_far_spec)


def _create_far_spec(settings: Settings) -> Callable[..., LayerCacheSpec]:
    keys, values = (code(settings.bits, settings.group) for code in (ScaledChannelIntegers, TokenIntegers))
    return partial(CodedStore, key_code=keys, value_code=values)
