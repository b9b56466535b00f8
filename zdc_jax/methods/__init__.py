"""Methods of compressing a KV cache, one file each: which layer of a plan keeps its tokens how.

A method is a module here with a function `layer_caches(plan, dtype) -> tuple[LayerCacheSpec, ...]`; its name
is that of the module, and a plan says it (`CompressionPlan.method`).
"""

import importlib
import pkgutil
from functools import cache
from types import ModuleType


@cache
def names() -> tuple[str, ...]:
    """All methods, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def named(name: str) -> ModuleType:
    """The module of a method; raises `ValueError` for an unknown one, with those that are known."""
    if name not in names():
        raise ValueError(f"method={name!r} must be one of {names()}")
    return importlib.import_module(f"{__name__}.{name}")
