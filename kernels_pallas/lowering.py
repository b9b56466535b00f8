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
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.tree_util import PyTreeDef

from kernels_pallas import stored
from kernels_pallas.lowering_processes import Request, processes

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


type Shapes = tuple[jax.ShapeDtypeStruct, ...]
type Options = tuple[tuple[str, Any], ...]


class Launch:
    """A launch for some shapes and static arguments, which programs contain before it is lowered.

    Args:
      jitted: the launch as a function that `jax.jit` returned.
      tree: how arrays are arranged in its keyword arguments.
      shapes: shapes and dtypes of these arrays.
      options: names and values of its static arguments.

    Attributes:
      avals: shapes and dtypes of the arrays that it returns.
      results: as in `Lowered`.
    """

    def __init__(self, jitted: Callable[..., Any], tree: PyTreeDef, shapes: Shapes, options: Options):
        self._jitted, self._arguments, self._lock = jitted, (tree, shapes, options), threading.Lock()
        self._file = _find_file(f"{jitted.__module__}.{jitted.__qualname__} {tree} {shapes} {options}")
        self._lowered = _deserialize(stored.load(self._file)) if self._file else None
        self._reply: Future[Any] | None = None
        if self._lowered:
            self.avals, self.results = self._lowered.exported.out_avals, self._lowered.results
        else:
            call, results = _flatten(jitted, tree, options)
            found = jax.eval_shape(call, *shapes)
            self.avals = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in found)
            self.results = results[0]
            self._reply = _submit(jitted, self._arguments)

    @property
    def lowered(self) -> Lowered:
        """The lowered launch. If no other process could lower it, this one does."""
        with self._lock:
            if self._lowered is None:
                reply = self._reply and processes.take(self._reply)
                self._lowered = _deserialize(reply) or lower(
                    self._jitted, *self._arguments, platform=PLATFORM
                )
                if self._file is not None:
                    with suppress(ImportError):  # JAX serializes with the package `flatbuffers`.
                        stored.store(self._file, serialize(self._lowered))
            return self._lowered


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
            made = _make(jitted, tree, shapes, options)
            found = launch_p.bind(*leaves, launch=made)
            return jax.tree.map(found.__getitem__, made.results)

        run.jitted = jitted  # type: ignore[attr-defined]
        return run

    return decorate


def takes_copies() -> bool:
    """Return whether programs that are traced now can contain copies."""
    return jax.default_backend() == "gpu" and jax.sharding.get_abstract_mesh().empty


def _make(jitted: Callable[..., Any], tree: PyTreeDef, shapes: Shapes, options: Options) -> Launch:
    """Return the only `Launch` for some arguments."""
    key = jitted, tree, shapes, options
    with _lock:
        if key not in _launches:
            _launches[key] = Launch(*key)
        return _launches[key]


_launches: dict[Any, Launch] = {}
_lock = threading.RLock()
"""Held by a thread that makes a launch. A launch may contain others."""


def _call(*leaves: Any, launch: Launch) -> Any:
    """Call a lowered launch."""
    return launch.lowered.exported.call(*leaves)


launch_p = Primitive("zdc_launch")
"""A launch in a program. JAX traces programs without waiting until their launches are lowered."""
launch_p.multiple_results = True
launch_p.def_abstract_eval(lambda *leaves, launch: launch.avals)
launch_p.def_impl(_call)
mlir.register_lowering(launch_p, mlir.lower_fun(_call, multiple_results=True))


def _submit(jitted: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any] | None:
    """Let another process lower a launch; return None if there is none."""
    if not processes.most:
        return None
    device = jax.local_devices()[0]
    request = Request(
        device_kind=device.device_kind,
        cores=getattr(device, "core_count", 1),
        platform=PLATFORM,
        module=jitted.__module__,
        name=jitted.__qualname__,
        arguments=arguments,
    )
    return processes.submit(request)


def lower(
    jitted: Callable[..., Any], tree: PyTreeDef, shapes: Shapes, options: Options, *, platform: str
) -> Lowered:
    """Lower a launch for a platform of JAX; the other arguments are those of `Launch`."""
    call, results = _flatten(jitted, tree, options)
    unchecked = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
    exported = export.export(jax.jit(call), platforms=[platform], disabled_checks=unchecked)(*shapes)
    return Lowered(exported, results[0])


def _flatten(
    jitted: Callable[..., Any], tree: PyTreeDef, options: Options
) -> tuple[Callable[..., list[Any]], list[Any]]:
    """Return a launch as a function of arrays, and a list that gets `Lowered.results` from each call."""
    results: list[Any] = []

    def call(*leaves: Any) -> list[Any]:
        found, tree_found = jax.tree.flatten(jitted(**jax.tree.unflatten(tree, leaves), **dict(options)))
        results.append(jax.tree.unflatten(tree_found, range(len(found))))
        return found

    return call, results


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
