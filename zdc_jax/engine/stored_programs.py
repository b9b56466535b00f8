"""Compiled programs of an engine on disk, which a later process finds without tracing them (ours).

JAX's cache of compiled programs needs the lowered program to find the compiled one. Tracing takes seconds for
a program of many layers, and an engine has some forty. Here the name of a file tells everything that a
program depends on: sources, versions and settings of JAX, the device, the function, and its arguments.
"""

import copyreg
import hashlib
import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled

import kernels_pallas
from kernels_pallas import stored
from zdc_jax.engine.uncompiled import Program

FOLDER = "zdc-programs"
"""Name of the folder of programs."""
MOST_BYTES = 4 * 2**30
"""Largest size of all programs. The least recently used ones are deleted first."""
SOURCES = Path(__file__).parents[1], Path(str(kernels_pallas.__file__)).parent
"""Folders of the sources that programs are traced from."""


def find_file(program: Program) -> Path | None:
    """Return the file of a program.

    Returns:
      None if the process keeps no programs, or if the program runs on several devices. It is also None if a
      part of the description cannot be stored, such as a function without a name.
    """
    if (folder := stored.find_folder(FOLDER, *SOURCES)) is None:
        return None
    leaves, tree = jax.tree.flatten((program.arguments, {}))
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    if any(sharding and len(sharding.device_set) > 1 for sharding in shardings):
        return None
    shapes = [
        (leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False), getattr(leaf, "committed", True))
        for leaf in leaves
    ]
    described = (program.function, program.options, tree, shapes, list(map(str, shardings)))
    try:
        names = _dump(described), _dump(_describe_process())
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
        return None
    return folder / hashlib.sha256(b"".join(names)).hexdigest()


@contextmanager
def compile_anew() -> Iterator[None]:
    """Keep JAX's own cache from finding programs in this context.

    What it finds cannot always be stored: on a CPU it lacks its functions, and fails when it runs.
    """
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks only once whether the cache is on.
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def load(file: Path | None, program: Program) -> Compiled | None:
    """Return a stored program; None if there is none, or none that can be read."""
    if file is None or (value := stored.load(file)) is None:
        return None
    try:
        serialized, results = value
        arguments = jax.tree.structure((program.arguments, {}))
        return serialize_executable.deserialize_and_load(
            serialized, arguments, results, execution_devices=[_find_device(program)]
        )
    except Exception:  # Damaged values may raise anything, and are written again.
        return None


def store(file: Path | None, compiled: Compiled) -> None:
    """Store a compiled program, if its device allows that."""
    if file is None:
        return
    try:
        serialized, _, results = serialize_executable.serialize(compiled)
        stored.store(file, (serialized, results))
    except Exception:  # The device's part of JAX may raise anything.
        return


def trim() -> None:
    """Delete programs that were not used for long, if all of them are too large."""
    if (folder := stored.find_folder(FOLDER, *SOURCES)) is not None:
        stored.trim(folder, MOST_BYTES)


def _dump(value: Any) -> bytes:
    """Return a pickled value, with devices as numbers."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    # A `persistent_id` would be called for each of a hundred thousand objects.
    pickler.dispatch_table = copyreg.dispatch_table | {jax.Device: lambda device: (int, (device.id,))}
    pickler.dump(value)
    return file.getvalue()


def _describe_process() -> Any:
    """Return what all programs of this process depend on."""
    devices, flags = jax.local_devices(), os.environ.get("XLA_FLAGS")
    settings = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    versions = devices[0].client.platform_version, [device.device_kind for device in devices]
    return versions, _read_cpu_features(), flags, sorted(settings.items())


@cache
def _read_cpu_features() -> str:
    """Return the instructions that the host has, where Linux tells: machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _find_device(program: Program) -> jax.Device:
    """Return the device of a program's arrays."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(program.arguments))
    return next((device for found in shardings if found for device in found.device_set), jax.devices()[0])
