"""Methods of KV-cache compression, one file each: they map each layer of a plan to a cache spec.

The name of a method is the name of its module, and `CompressionPlan.method` refers to it. A method module
defines `Settings`, a frozen dataclass of its options (`CompressionPlan.settings`), and a function
`layer_caches(plan, dtype) -> tuple[LayerCacheSpec, ...]`.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from zdc_jax.cache.codes.code import Code
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.evicting import Evicting, Scoring
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.fields import check_names
from zdc_jax.planned_layers import MethodSettings, PlannedLayers, SearchKind


@dataclass(frozen=True)
class EvictingSettings(MethodSettings):
    """Options of methods that keep some far tokens and evict the others (`zdc_jax.cache.specs.evicting`).

    Attributes:
      kept: far tokens that each KV head keeps, a positive multiple of 8.
      block: positions after which the kept tokens are chosen again, a power of two of at least 8.
    """

    kept: int = 1024
    block: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kept <= 0 or self.kept % 8:
            raise PlanError(f"kept={self.kept} must be a positive multiple of 8")
        if self.block < 8 or self.block & (self.block - 1):
            raise PlanError(f"block={self.block} must be a power of two of at least 8")


@dataclass(frozen=True)
class IntegerSettings(MethodSettings):
    """Options of methods that store integers with a scale and a zero point for each group.

    Attributes:
      bits: bits of an integer: 2, 3, 4 or 8.
      group: integers of a group. Where a rank is no multiple of `group`, groups within one token have the
        largest divisor of the rank below `group`.
    """

    bits: int = 4
    group: int = 32

    def __post_init__(self) -> None:
        check_one_of("bits", self.bits, (2, 3, 4, 8))
        check_range("group", self.group, 2, 1024)


@cache
def names() -> tuple[str, ...]:
    """Return the names of all methods in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def named(name: str) -> ModuleType:
    """Return the module of a method; raise `ValueError` with the known names if the method is unknown."""
    if name not in names():
        raise ValueError(f"method={name!r} must be one of {names()}")
    return importlib.import_module(f"{__name__}.{name}")


def get_search_kind(name: str) -> SearchKind | None:
    """Return what a search of plans of a method chooses; None without a search, or for an unknown name."""
    kind: SearchKind | None = named(name).Settings.search if name in names() else None
    return kind


def settings_from_json(name: str, value: dict[str, Any]) -> MethodSettings:
    """Create the settings of a method from JSON.

    Raises:
      ValueError: the method or a name in `value` is unknown.
      PlanError: a setting has an invalid value.
    """
    check_names(named(name).Settings, value, f"settings of method {name!r}")
    return named(name).Settings(**{key: _to_hashable(item) for key, item in value.items()})


def evicting_layers(
    plan: PlannedLayers, dtype: str, scoring: Callable[[Any], Scoring]
) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers for an eviction method with the scores `scoring(settings)`."""

    def create_spec(settings: EvictingSettings, **shape: Any) -> Evicting:
        return Evicting(**shape, kept=settings.kept, block=settings.block, scoring=scoring(settings))

    return far_layers(plan, dtype, create_spec)


def coded_layers(
    plan: PlannedLayers, dtype: str, create_codes: Callable[[Any], tuple[Code, Code]]
) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers for a method that stores all tokens, quantized.

    `create_codes(settings)` returns the quantization of keys and that of values.
    """

    def create_spec(settings: MethodSettings, **shape: Any) -> CodedStore:
        keys, values = create_codes(settings)
        return CodedStore(**shape, key_code=keys, value_code=values)

    return far_layers(plan, dtype, create_spec)


def _to_hashable(value: Any) -> Any:
    """Convert lists, at any depth, to tuples."""
    return tuple(map(_to_hashable, value)) if isinstance(value, list) else value


def check_calibrated(plan: PlannedLayers, method: str, command: str = "zdc calibrate MODEL") -> None:
    """Raise `PlanError` if a plan of a method that needs a calibrated basis has none."""
    if not plan.rotated:
        raise PlanError(
            f"rotated=False: method {method!r} needs a calibrated basis; "
            f"run `{command}` and use a plan with rotated=True"
        )


def check_one_of(name: str, value: Any, allowed: tuple[int | str, ...]) -> None:
    """Raise `PlanError` if a setting is not one of the numbers or words in `allowed`."""
    if type(value) not in (int, str) or value not in allowed:
        raise PlanError(f"{name}={value!r:.80} must be one of {allowed}")


def check_range(name: str, value: Any, least: int, most: int) -> None:
    """Raise `PlanError` if a setting is not an integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise PlanError(f"{name}={value!r:.80} must be an integer from {least} to {most}")


def far_layers(
    plan: PlannedLayers, dtype: str, create_spec: Callable[..., LayerCacheSpec]
) -> tuple[LayerCacheSpec, ...]:
    """Return `create_spec(settings, **shape)` for each layer that stores far tokens.

    `settings` are those of the layer, and `shape` is its `layer_shape`. Layers without far tokens (rank 0 or
    sliding windows) are rings in all methods.
    """
    shapes = [layer_shape(plan, dtype, index) for index in range(len(plan.layers))]
    return tuple(
        create_spec(plan.settings_of(index), **shape) if shape["R"] else PrefixRing(**shape)
        for index, shape in enumerate(shapes)
    )


def layer_shape(plan: PlannedLayers, dtype: str, index: int) -> dict[str, Any]:
    """Return the arguments that all specs share: num_kv_heads, head_dim, dtype, R, Z, sinks and window."""
    ranks, (sinks, window) = plan.layers[index], plan.near(index)
    return {
        "num_kv_heads": plan.num_kv_heads,
        "head_dim": plan.head_dim,
        "dtype": dtype,
        "R": ranks.qk,
        "Z": ranks.v,
        "sinks": sinks,
        "window": window,
    }
