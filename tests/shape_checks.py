"""Run-time checks of shape annotations in tests, for functions that have them.

Each test checks the first calls of a function. Layers repeat the others, and checking all calls would take a
seventh of the suite's time. Dataclasses are not checked, because JAX rebuilds tree dataclasses with leaves of
any kind.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jaxtyping
from jaxtyping import install_import_hook

PACKAGES = (
    "kernels_pallas",
    "zdc_jax.cache",
    "zdc_jax.generation",
    "zdc_jax.model",
    "zdc_jax.ops",
    "zdc_jax.parallel",
    "zdc_jax.evaluation",
    "convert.calibration",
)
"""Packages whose JAX arrays are checked. Checks would cost too much in the loops of planning."""


CHECKED_CALLS = 2
"""Calls of each function that a test checks."""
calls: Counter[Callable[..., Any]] = Counter()
"""Calls of the running test so far, up to `CHECKED_CALLS`."""
jaxtyped = jaxtyping.jaxtyped


def shaped(function: Any) -> bool:
    """Return whether the annotations of a function name shapes."""
    if isinstance(function, type) or getattr(function, "__name__", "") == "__init__":
        return False
    return any("jaxtyping" in repr(kind) for kind in getattr(function, "__annotations__", {}).values())


def jaxtyped_where_shaped(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """Replace `jaxtyped`, which would wrap all functions at a tenth of the suite's time."""
    return lambda function: check_first_calls(function, typechecker) if shaped(function) else function


def check_first_calls(function: Callable[..., Any], typechecker: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with checks of its first calls in each test."""
    checked = jaxtyped(function, typechecker=typechecker)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if calls[function] >= CHECKED_CALLS:
            return function(*args, **kwargs)
        calls[function] += 1
        return checked(*args, **kwargs)

    return call


def install() -> None:
    """Check all packages that are imported afterwards."""
    jaxtyping.jaxtyped = jaxtyped_where_shaped
    install_import_hook(PACKAGES, "beartype.beartype")
