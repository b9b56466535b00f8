"""Shape annotations are checked at run time in tests: where a function has one, its calls are checked.

Dataclasses are not: JAX rebuilds those that are trees with leaves of any kind.
"""

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
"""Where arrays of JAX go through; a check costs too much in the loops of planning."""


jaxtyped = jaxtyping.jaxtyped


def shaped(function: Any) -> bool:
    """Whether its annotations name shapes."""
    if isinstance(function, type) or getattr(function, "__name__", "") == "__init__":
        return False
    return any("jaxtyping" in repr(kind) for kind in getattr(function, "__annotations__", {}).values())


def jaxtyped_where_shaped(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """Stands for `jaxtyped`, which would wrap all functions: a tenth of the suite's time."""
    return lambda function: jaxtyped(function, typechecker=typechecker) if shaped(function) else function


def install() -> None:
    """For all that is imported afterwards."""
    jaxtyping.jaxtyped = jaxtyped_where_shaped
    install_import_hook(PACKAGES, "beartype.beartype")
