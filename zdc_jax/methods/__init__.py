"""Methods of compressing a KV cache, one file each: which layer of a plan keeps its tokens how.

A method is a module here. Its name is that of the module, and a plan says it (`CompressionPlan.method`). It
holds `Settings`, a frozen dataclass of what can be chosen (`CompressionPlan.settings`), and a function
`layer_caches(plan, dtype) -> tuple[LayerCacheSpec, ...]`.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from zdc_jax.cache.evicting import Evicting, Scoring
from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.fields import check_fields, check_names

if TYPE_CHECKING:
    from zdc_jax.plan import CompressionPlan


Rotations = tuple[tuple[int, ...], tuple[int, ...]]
"""Blocks of keys, and of values."""


@dataclass(frozen=True)
class MethodSettings:
    """What a plan chooses of a method, beside ranks, sinks and window. Hashable; JSON can say all of it.

    Values that no plan may have raise `PlanError` here; those that do not go with the rest of a plan, in
    `layer_caches`.

    latent_keys: far keys are kept in coordinates of keys before their rotary embedding (`Basis.k_latent`).
    """

    latent_keys: ClassVar[bool] = False

    def rotations(self, R: int, Z: int) -> Rotations:
        """Sizes of the blocks of leading coordinates that `zdc_jax.cache.gaussian_codes.turn` is folded into,
        of keys of R coordinates and of values of Z."""
        return (), ()

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except ValueError as error:
            raise PlanError(str(error)) from error


@dataclass(frozen=True)
class EvictingSettings(MethodSettings):
    """Of methods that keep some far tokens and let the others go (`zdc_jax.cache.evicting`).

    kept: far tokens a KV head, a multiple of 8 above 0. block: positions after which those are chosen anew, a
    power of two from 8 on, as pieces of prompts are.
    """

    kept: int = 1024
    block: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kept <= 0 or self.kept % 8:
            raise PlanError(f"kept={self.kept} must be a multiple of 8 above 0")
        if self.block < 8 or self.block & (self.block - 1):
            raise PlanError(f"block={self.block} must be a power of two from 8 on")


@cache
def names() -> tuple[str, ...]:
    """All methods, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def named(name: str) -> ModuleType:
    """The module of a method; raises `ValueError` for an unknown one, with those that are known."""
    if name not in names():
        raise ValueError(f"method={name!r} must be one of {names()}")
    return importlib.import_module(f"{__name__}.{name}")


def settings_from_json(name: str, value: dict[str, Any]) -> MethodSettings:
    """Settings of a method from JSON; raises `ValueError` for unknown names, `PlanError` for values."""
    check_names(named(name).Settings, value, f"settings of method {name!r}")
    return named(name).Settings(**{key: _hashable(item) for key, item in value.items()})


def evicting_layers(
    plan: "CompressionPlan", dtype: str, scoring: Callable[[Any], Scoring]
) -> tuple[LayerCacheSpec, ...]:
    """How layers keep their tokens where `scoring(settings)` says which far ones stay."""

    def far(settings: EvictingSettings) -> Callable[..., LayerCacheSpec]:
        return partial(Evicting, kept=settings.kept, block=settings.block, scoring=scoring(settings))

    return far_layers(plan, dtype, far)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def check_one_of(name: str, value: Any, allowed: tuple[int | str, ...]) -> None:
    """Raises `PlanError` where a setting is not one of the numbers or words `allowed`."""
    if type(value) not in (int, str) or value not in allowed:
        raise PlanError(f"{name}={value!r:.80} must be one of {allowed}")


def check_range(name: str, value: Any, least: int, most: int) -> None:
    """Raises `PlanError` where a setting is not a whole number `least` … `most`."""
    if type(value) is not int or not least <= value <= most:
        raise PlanError(f"{name}={value!r:.80} must be a whole number from {least} to {most}")


def far_layers(
    plan: "CompressionPlan", dtype: str, far: Callable[[Any], Callable[..., LayerCacheSpec]]
) -> tuple[LayerCacheSpec, ...]:
    """`far(settings)(**layer_shape)` for each layer that keeps far tokens, with its settings.

    Layers without (rank 0, sliding windows) are rings in all methods.
    """

    def one(index: int) -> LayerCacheSpec:
        shape = layer_shape(plan, dtype, index)
        return (far(plan.settings_of(index)) if shape["R"] else PrefixRing)(**shape)

    return tuple(map(one, range(len(plan.layers))))


def layer_shape(plan: "CompressionPlan", dtype: str, index: int) -> dict[str, Any]:
    """num_kv_heads, head_dim, dtype, R, Z, sinks and window of a layer, as caches take them."""
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
