"""coded: far tokens in few bits, of which few coordinates choose those that answer (ours).

What answers are all coordinates that a layer keeps, turned so that they look Gaussian (Zandieh et al. 2025),
in integers with a step for each token. The first coordinates of keys in the calibrated basis, its index, are
a plane with bits of its own: they bear most of a score. They are also what chooses (as in Loki, Singhania et
al. 2024), a part of the store itself, not a copy. The turns are part of the weights (`zdc_jax.fold`), so that
nothing turns at run time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from zdc_jax.cache.coded_choosing import CodedChoosing
from zdc_jax.cache.coded_ring import CodedRing
from zdc_jax.cache.coded_store import CodedStore
from zdc_jax.cache.codes import Split
from zdc_jax.cache.fitted_integers import FittedIntegers
from zdc_jax.cache.hosted_choosing import HostedChoosing
from zdc_jax.cache.near_far import NearFar
from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.fields import MOST
from zdc_jax.methods import MethodSettings, Rotations, check_one_of, check_range, far_layers
from zdc_jax.plan import CompressionPlan

BITS = (2, 3, 4, 5, 6, 8)
WHOLE = 16
BITS_NEAR = (8, WHOLE)
NEAR_CODE = FittedIntegers(8)
Memory = Literal["device", "host"]
INDEX_STEP = 8
"""Levels are packed into bytes."""


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Of all layers, or of one.

    bits_k, bits_v, bits_index: of a coordinate of keys, of values, and of the index of keys: 2, 3, 4, 5, 6 or
    8. index: first coordinates of keys, a multiple of 8 below the layer's rank. read: far tokens that a KV
    head's queries read, a multiple of `page`, those of largest probability by the index; 0: all of them. With
    `read` and no index the layer reads what the layer before it that chose has chosen. page: tokens chosen
    together. memory: where keys and values of a layer that chooses lie, but for the index. bits_near: of a
    coordinate of sinks and window, 8 (integers with a step a token and head) or 16 (as the model has them).

    Raises:
      PlanError: on any other value.
    """

    bits_k: int = 4
    bits_v: int = 4
    bits_index: int = 4
    index: int = 16
    read: int = 256
    page: int = 1
    memory: Memory = "device"
    bits_near: int = WHOLE

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
            raise PlanError("memory='host' with read=0: what is always read belongs on the device")

    def rotations(self, R: int, Z: int) -> Rotations:
        """`MethodSettings.turns`: of the index, of the other coordinates of keys, and of values."""
        return tuple(size for size in (self.index, R - self.index) if size), (Z,)


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's.

    Raises:
      PlanError: a plan that is not rotated; a layer that follows, and none before it that chose as much.
    """
    if not plan.rotated:
        raise PlanError("rotated=False: method 'coded' chooses by coordinates of a basis; it must be True")
    specs = _led(far_layers(plan, dtype, _far))
    return tuple(_near_coded(spec, plan.settings_of(layer)) for layer, spec in enumerate(specs))


def _near_coded(spec: LayerCacheSpec, settings: MethodSettings) -> LayerCacheSpec:
    """With near tokens in as many bits as the settings say; a layer without far tokens is a ring itself."""
    assert isinstance(settings, Settings)
    assert isinstance(spec, PrefixRing | NearFar)
    if settings.bits_near == WHOLE or not (spec.sinks or spec.window):
        return spec
    if isinstance(spec, NearFar):
        return replace(spec, near_code=NEAR_CODE)
    return CodedRing.of(spec, NEAR_CODE)


def _far(settings: Settings) -> Callable[..., LayerCacheSpec]:
    bits = settings.bits_index, settings.bits_k, settings.bits_v
    index, keys, values = (FittedIntegers(each) for each in bits)
    if not settings.read:
        whole = Split(settings.index, index, keys) if settings.index else keys
        return partial(CodedStore, key_code=whole, value_code=values)
    return partial(
        HostedChoosing if settings.memory == "host" else CodedChoosing,
        index=settings.index,
        read=settings.read,
        page=settings.page,
        index_code=index,
        key_code=keys,
        value_code=values,
    )


def _led(specs: tuple[LayerCacheSpec, ...]) -> tuple[LayerCacheSpec, ...]:
    """The same, where layers that others follow hand on what they choose."""
    found, leader = list(specs), None
    for layer, spec in enumerate(specs):
        if not isinstance(spec, CodedChoosing):
            continue
        if spec.index:
            leader = layer
            continue
        chosen = None if leader is None else specs[leader]
        if not isinstance(chosen, CodedChoosing) or (chosen.read, chosen.page) != (spec.read, spec.page):
            raise PlanError(
                f"layer {layer}: index=0 with read={spec.read} and page={spec.page} must follow a layer that "
                "chooses as many"
            )
        assert leader is not None
        found[leader] = replace(chosen, leads=True)
    return tuple(found)
