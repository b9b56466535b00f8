"""oscar: 2-bit integers in coordinates that attention chooses, as in OSCAR (Zhou et al. 2026, 2605.17757).

Keys are rotated by the eigenvectors of their queries' second moments, and values by those of the second
moments of values weighted by their scores. A Hadamard matrix then mixes the coordinates. Both rotations are
a basis of kind `oscar` (`zdc calibrate MODEL TEXT --qk oscar --vo oscar`), which is folded into the weights;
any calibrated basis works. The paper keeps 64 first and 256 recent tokens in 16 bits: `sinks=64`,
`window=256` in the plan. A token is quantized when it leaves the window.

Differences from the paper: each KV head has rotations of its own, as in the later versions of the authors'
code; and scales and minima are rounded to bfloat16 so that the levels enclose the clipped coordinates.
"""

from dataclasses import dataclass
from typing import Any

from zdc_jax.cache.codes.integers import ClippedIntegers
from zdc_jax.cache.specs.late_store import LateStore
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.methods import IntegerSettings, check_calibrated, far_layers
from zdc_jax.planned_layers import PlannedLayers, Rotations


@dataclass(frozen=True)
class Settings(IntegerSettings):
    """Settings of the method. A group has coordinates of one token and head.

    Attributes:
      clip_k: share of the coordinates of a key that are not clipped, above 0 and at most 1.
      clip_v: share of the coordinates of a value, as for keys.
    """

    bits: int = 2
    group: int = 128
    clip_k: float = 0.96
    clip_v: float = 0.92

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_k", "clip_v"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= 1:
                raise PlanError(f"{name}={value!r:.80} must be a share above 0, at most 1")

    def rotations(self, R: int, Z: int) -> Rotations:
        return (R,), (Z,)


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's.

    Raises:
      PlanError: the plan has no calibrated basis.
    """
    check_calibrated(plan, "oscar", "zdc calibrate MODEL TEXT --qk oscar --vo oscar")

    def create_spec(settings: Settings, **shape: Any) -> LateStore:
        keys, values = (
            ClippedIntegers(settings.bits, settings.group, clip)
            for clip in (settings.clip_k, settings.clip_v)
        )
        return LateStore(**shape, key_code=keys, value_code=values)

    return far_layers(plan, dtype, create_spec)
