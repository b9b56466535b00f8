"""Launches that are lowered once for all programs which contain them (ours).

JAX lowers a Pallas kernel anew in every program, which takes up to seconds of Python. A server compiles some
thirty programs, and each kind of layer of a plan has kernels of its own.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.tree_util import PyTreeDef

PLATFORM = "cuda"
CUSTOM_CALLS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton")
"""Custom calls of Pallas kernels. Only other versions of JAX might not read them."""


def lower_once[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile a function with `jax.jit`, but lower it for GPUs once for its shapes and static arguments.

    Programs get copies of what was lowered. On a mesh, in the interpreter and without a GPU it is a plain
    `jax.jit`: a copy knows nothing of a mesh, and of no other platform.

    Args:
      static: names of the static arguments; all others are trees of arrays.
    """

    def decorate(launch: Callable[P, R]) -> Callable[P, R]:
        jitted, signature = jax.jit(launch, static_argnames=static), inspect.signature(launch)

        @functools.wraps(launch)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if not takes_copies() or kwargs.get("interpret"):
                return jitted(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            options = tuple((name, given.pop(name)) for name in static if name in given)
            leaves, tree = jax.tree.flatten(given)
            leaves = list(map(jnp.asarray, leaves))
            shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
            return _lower(jitted, tree, shapes, options).call(*leaves)

        run.clear_cache = jitted.clear_cache  # type: ignore[attr-defined]
        return run

    return decorate


def takes_copies() -> bool:
    """Return whether programs that are traced now can contain copies."""
    return jax.default_backend() == "gpu" and jax.sharding.get_abstract_mesh().empty


@functools.cache
def _lower(
    jitted: Callable[..., Any],
    tree: PyTreeDef,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    options: tuple[tuple[str, Any], ...],
) -> export.Exported:
    """Lower a function for arrays of these shapes, which `tree` arranges."""

    def call(*leaves: Any) -> Any:
        return jitted(**jax.tree.unflatten(tree, leaves), **dict(options))

    unchecked = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
    return export.export(jax.jit(call), platforms=[PLATFORM], disabled_checks=unchecked)(*shapes)
