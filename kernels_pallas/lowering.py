"""Launches that are lowered once, and kept on disk, for all programs which contain them (ours).

JAX lowers a Pallas kernel again in every program, which takes up to seconds of Python. A server compiles some
thirty programs, and each kind of layer of a plan has kernels of its own. JAX's cache of compiled programs
does not help: it needs the lowered program to find the compiled one.
"""

import functools
import hashlib
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.tree_util import PyTreeDef

from kernels_pallas import lowering_processes, stored
from kernels_pallas.lowering_processes import Request

PLATFORM = "cuda"
CUSTOM_CALLS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton")
"""Custom calls of Pallas kernels. Only other versions of JAX might not read them."""
FOLDER = "zdc-kernels"
"""Name of the folder of lowered launches."""


class Lowered(NamedTuple):
    """A lowered launch.

    Attributes:
      exported: function from arrays to a list of arrays.
      results: what the launch returns, with the index of each array in place of the array.
    """

    exported: export.Exported
    results: Any


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
            lowered = _lower_once(jitted, tree, shapes, options)
            found = lowered.exported.call(*leaves)
            return jax.tree.map(found.__getitem__, lowered.results)

        run.jitted = jitted  # type: ignore[attr-defined]
        return run

    return decorate


def takes_copies() -> bool:
    """Return whether programs that are traced now can contain copies."""
    return jax.default_backend() == "gpu" and jax.sharding.get_abstract_mesh().empty


def forget() -> None:
    """Forget all launches that this process lowered or loaded."""
    _lowered.clear()


def _lower_once(jitted: Callable[..., Any], *arguments: Any) -> Lowered:
    """Return a launch that is lowered for some arguments. One thread makes it, others wait."""
    with _lock:
        key = jitted, *arguments
        is_first = key not in _lowered
        future = _lowered.setdefault(key, Future())
    if is_first:
        try:
            future.set_result(_find(jitted, *arguments))
        except BaseException as error:
            _lowered.pop(key, None)
            future.set_exception(error)
    return future.result()


_lowered: dict[Any, Future[Lowered]] = {}
_lock = threading.Lock()


def _find(jitted: Callable[..., Any], *arguments: Any) -> Lowered:
    """Load a launch, or lower and store it."""
    described = " ".join(map(str, arguments))
    file = _find_file(f"{jitted.__module__}.{jitted.__qualname__} {described}")
    if file is not None and (found := _deserialize(stored.load(file))):
        return found
    lowered = _ask(jitted, *arguments) or lower(jitted, *arguments, platform=PLATFORM)
    if file is not None:
        with suppress(ImportError):  # JAX serializes with the package `flatbuffers`.
            stored.store(file, serialize(lowered))
    return lowered


def _ask(jitted: Callable[..., Any], *arguments: Any) -> Lowered | None:
    """Let another process lower a launch; return None if there is none, or if it cannot do that."""
    if lowering_processes.current is None:
        return None
    device = jax.local_devices()[0]
    for_device = device.device_kind, getattr(device, "core_count", 1), PLATFORM
    request = Request(*for_device, jitted.__module__, jitted.__qualname__, arguments)
    return _deserialize(lowering_processes.current.ask(request))


def lower(
    jitted: Callable[..., Any],
    tree: PyTreeDef,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    options: tuple[tuple[str, Any], ...],
    *,
    platform: str,
) -> Lowered:
    """Lower a launch.

    Args:
      jitted: the launch as a function that `jax.jit` returned.
      tree: how arrays are arranged in its keyword arguments.
      shapes: shapes and dtypes of these arrays.
      options: names and values of its static arguments.
      platform: JAX's platform to lower for.
    """
    results = []

    def call(*leaves: Any) -> list[Any]:
        found, tree_found = jax.tree.flatten(jitted(**jax.tree.unflatten(tree, leaves), **dict(options)))
        results.append(jax.tree.unflatten(tree_found, range(len(found))))
        return found

    unchecked = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
    exported = export.export(jax.jit(call), platforms=[platform], disabled_checks=unchecked)(*shapes)
    return Lowered(exported, results[0])


def serialize(lowered: Lowered) -> tuple[bytes, Any]:
    """Return a launch as values that can be pickled.

    Raises:
      ImportError: the package `flatbuffers` is missing.
    """
    return bytes(lowered.exported.serialize()), lowered.results


def _deserialize(value: Any | None) -> Lowered | None:
    """Return what was serialized; None if there is none, or none that can be read."""
    if value is None:
        return None
    try:
        serialized, results = value
        return Lowered(export.deserialize(bytearray(serialized)), results)
    except Exception:  # A damaged file may raise anything, and is written again.
        return None


def _find_file(name: str) -> Path | None:
    """Return the file of a launch, or None if the process keeps none.

    Machines with other GPUs may share the folder.
    """
    folder = stored.find_folder(FOLDER, Path(__file__).parent)
    key = f"{jax.devices()[0].device_kind} {name}"
    return folder and folder / hashlib.sha256(key.encode()).hexdigest()
