"""coded: quantized far tokens, from which a few coordinates choose the tokens to read (ours).

All coordinates that a layer keeps are rotated so that they look Gaussian (Zandieh et al. 2025), and stored as
integers with a scale per token. The first coordinates of keys in the calibrated basis form the index, a plane
with bits of its own, because they carry most of a score. The index also chooses the tokens to read, as in
Loki (Singhania et al. 2024), and it is part of the store, not a copy. The rotations are folded into the
weights (`zdc_jax.fold`), so that they cost nothing at run time.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from zdc_jax.cache.codes.code import Split
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.specs.coded_choosing import CodedChoosing
from zdc_jax.cache.specs.coded_ring import CodedRing
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.hosted_choosing import HostedChoosing
from zdc_jax.cache.specs.near_far import NearFar
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.fields import MOST
from zdc_jax.methods import check_one_of, check_range, far_layers
from zdc_jax.planned_layers import MethodSettings, PlannedLayers, Rotations

BITS = (2, 3, 4, 5, 6, 8)
"""Allowed bits per coordinate."""
MODEL_BITS = 16
"""Value of `bits_near` that keeps the model's dtype."""
BITS_NEAR = (8, MODEL_BITS)
"""Allowed bits per coordinate of sinks and window."""
NEAR_CODE = FittedIntegers(8)
"""Quantization of sinks and window in 8 bits."""
Memory = Literal["device", "host"]
"""Places of keys and values."""
INDEX_STEP = 8
"""Step of index sizes, because levels are packed into bytes."""


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of all layers, or of one layer.

    The defaults store 8 bits and read all tokens, so that a plan without settings loses little. A search
    finds fewer bits for one model.

    Attributes:
      bits_k: bits per coordinate of keys: 2, 3, 4, 5, 6 or 8.
      bits_v: bits per coordinate of values, as for keys.
      bits_index: bits per coordinate of the index, as for keys.
      index: number of first coordinates of keys in the index, a multiple of 8 below the layer's rank.
      read: far tokens that the queries of a KV head read, those of largest probability under the index; a
        multiple of `page`. 0 reads all. With `index=0` and `read` above 0, the layer reads the tokens that
        the last layer with an index chose.
      page: number of consecutive tokens that are chosen together.
      memory: place of keys and values without the index, for layers that choose tokens: "device" or "host".
      bits_near: bits per coordinate of sinks and window: 8 (integers with a scale per token and head), or 16
        (the model's dtype).

    Raises:
      PlanError: a setting has an invalid value.
    """

    prefers_basis = True
    reads_whole_keys = True
    search = "bits"

    bits_k: int = 8
    bits_v: int = 8
    bits_index: int = 8
    index: int = 0
    read: int = 0
    page: int = 1
    memory: Memory = "device"
    bits_near: int = MODEL_BITS

    def __post_init__(self) -> None:
        for name in ("bits_k", "bits_v", "bits_index"):
            check_one_of(name, getattr(self, name), BITS)
        for name, least in (("read", 0), ("index", 0), ("page", 1)):
            check_range(name, getattr(self, name), least, MOST)
        check_one_of("bits_near", self.bits_near, BITS_NEAR)
        check_one_of("memory", self.memory, get_args(Memory))
        if self.index % INDEX_STEP:
            raise PlanError(f"index={self.index} must be a multiple of {INDEX_STEP}")
        if self.memory == "host" and not self.read:
            raise PlanError(
                "memory='host' with read=0: a layer that reads all tokens must stay on the device; "
                "set read above 0 or memory='device'"
            )

    def rotations(self, R: int, Z: int) -> Rotations:
        return tuple(size for size in (self.index, R - self.index) if size), (Z,)


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's.

    Raises:
      PlanError: an index without a calibrated basis, or a layer with `index=0` follows no layer that chooses
        as many tokens.
    """
    if not plan.rotated:
        _check_uncalibrated(plan)
    specs = _mark_leaders(far_layers(plan, dtype, _create_far_spec))
    return tuple(_quantize_near(spec, plan.settings_of(layer)) for layer, spec in enumerate(specs))


def _check_uncalibrated(plan: PlannedLayers) -> None:
    """Raise `PlanError` if a layer has an index, whose coordinates only calibration can order."""
    for layer in range(len(plan.layers)):
        settings = plan.settings_of(layer)
        assert isinstance(settings, Settings)
        if settings.index:
            raise PlanError(
                f"index={settings.index}: the most important coordinates are known only after calibration; "
                "run `zdc calibrate MODEL TEXT`, or set index=0"
            )


def _quantize_near(spec: LayerCacheSpec, settings: MethodSettings) -> LayerCacheSpec:
    """Return `spec` with near tokens stored in `bits_near` bits; a spec without far tokens is a ring."""
    assert isinstance(settings, Settings)
    assert isinstance(spec, PrefixRing | NearFar)
    if settings.bits_near == MODEL_BITS or not (spec.sinks or spec.window):
        return spec
    if isinstance(spec, NearFar):
        return replace(spec, near_code=NEAR_CODE)
    return CodedRing.of(spec, NEAR_CODE)


def _create_far_spec(settings: Settings, **shape: Any) -> LayerCacheSpec:
    bits = settings.bits_index, settings.bits_k, settings.bits_v
    index, keys, values = map(FittedIntegers, bits)
    if not settings.read:
        key_code = Split(settings.index, index, keys) if settings.index else keys
        return CodedStore(**shape, key_code=key_code, value_code=values)
    choosing = HostedChoosing if settings.memory == "host" else CodedChoosing
    return choosing(
        **shape,
        index=settings.index,
        read=settings.read,
        page=settings.page,
        index_code=index,
        key_code=keys,
        value_code=values,
    )


def _mark_leaders(specs: tuple[LayerCacheSpec, ...]) -> tuple[LayerCacheSpec, ...]:
    """Return the specs with `leads` set for layers whose choice other layers reuse."""
    marked, leader = list(specs), None
    for layer, spec in enumerate(specs):
        if not isinstance(spec, CodedChoosing):
            continue
        if spec.index:
            leader = layer
            continue
        leading = None if leader is None else specs[leader]
        if not isinstance(leading, CodedChoosing) or (leading.read, leading.page) != (spec.read, spec.page):
            raise PlanError(
                f"layer {layer}: index=0 with read={spec.read} and page={spec.page} must follow a layer with "
                "an index and the same read and page"
            )
        assert leader is not None
        marked[leader] = replace(leading, leads=True)
    return tuple(marked)
