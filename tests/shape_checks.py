"""Shape annotations are checked at run time in tests: where a function has one, its calls are checked.

Dataclasses are not: JAX rebuilds those that are trees with leaves of any kind.
"""

from collections.abc import Callable
from typing import Any

from beartype import beartype
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


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, checked by beartype if its annotations name shapes."""
    shaped = any("jaxtyping" in repr(kind) for kind in function.__annotations__.values())
    return beartype(function) if shaped and function.__name__ != "__init__" else function


def install() -> None:
    """For all that is imported afterwards."""
    install_import_hook(PACKAGES, "shape_checks.check")
