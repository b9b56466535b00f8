"""Compiled programs of an engine on disk, which a later process finds without tracing them (ours).

JAX's cache of compiled programs needs the lowered program to find the compiled one. Tracing takes seconds for
a program of many layers, and an engine has some forty. Here the name of a file tells everything that a
program depends on: sources, versions and settings of JAX, the device, the function, and its arguments.

A list names the programs of each start, so that the next such start loads them while it reads the weights.
"""

import hashlib
import io
import os
import pickle
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

import kernels_pallas
from kernels_pallas import stored
from zdc_jax.engine.uncompiled import Program

FOLDER = "zdc-programs"
"""Name of the folder of programs."""
MOST_BYTES = 4 * 2**30
"""Largest size of all programs. The least recently used ones are deleted first."""
THREADS = 4
"""Programs that are loaded at once while other threads read weights."""
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
    leaves, tree = jax.tree.leaves(program.arguments), _find_structure(program)
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


class EarlierPrograms:
    """Programs of an earlier start, which threads load from now on.

    Args:
      start: description of the start, such as its flags. The next start of the same description loads what
        this one used. A wrong description costs time, but no other program is taken.
    """

    def __init__(self, start: str):
        folder = stored.find_folder(FOLDER, *SOURCES)
        self._list = None if folder is None else folder / f"list-{hashlib.sha256(start.encode()).hexdigest()}"
        names = None if self._list is None else stored.load(self._list)
        threads = ThreadPoolExecutor(THREADS)
        self._begun: dict[Path, Future[Compiled | None]] = {}
        if folder is not None and isinstance(names, list):
            self._begun = {folder / name: threads.submit(_load_file, folder / name) for name in names}
        threads.shutdown(wait=False)  # It takes no more work.

    def take(self, file: Path, program: Program) -> Compiled | None:
        """Return a program of this file; None if it was not listed or cannot be read."""
        if (future := self._begun.pop(file, None)) is None or (compiled := future.result()) is None:
            return None
        fits = compiled.in_tree == _find_structure(program) and _find_device(program) == jax.devices()[0]
        return compiled if fits else None

    def replace(self, files: Iterable[Path | None]) -> None:
        """Drop the programs that were not taken, and list those of this start for the next one."""
        self._begun.clear()
        if self._list is not None:
            stored.store(self._list, [file.name for file in files if file is not None])


def load(file: Path | None, program: Program, earlier: EarlierPrograms | None = None) -> Compiled | None:
    """Return a stored program; None if there is none, or none that can be read."""
    if file is None:
        return None
    if earlier is not None and (compiled := earlier.take(file, program)) is not None:
        return compiled
    return _load_file(file, _find_device(program))


def _load_file(file: Path, device: jax.Device | None = None) -> Compiled | None:
    """Return the program in a file for a device, by default the first one."""
    if (value := stored.load(file)) is None:
        return None
    try:
        serialized, arguments, results = value
        return serialize_executable.deserialize_and_load(
            serialized, arguments, results, execution_devices=[device or jax.devices()[0]]
        )
    except Exception:  # Damaged values may raise anything, and are written again.
        return None


def store(file: Path | None, compiled: Compiled) -> None:
    """Store a compiled program, if its device allows that."""
    if file is None:
        return
    try:
        stored.store(file, serialize_executable.serialize(compiled))
    except Exception:  # The device's part of JAX may raise anything.
        return


def trim() -> None:
    """Delete programs that were not used for long, if all of them are too large."""
    if (folder := stored.find_folder(FOLDER, *SOURCES)) is not None:
        stored.trim(folder, MOST_BYTES)


class _Pickler(pickle.Pickler):
    """Pickler that writes devices as numbers."""

    def persistent_id(self, obj: Any) -> int | None:
        return obj.id if isinstance(obj, jax.Device) else None


def _dump(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
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


def _find_structure(program: Program) -> Any:
    """Return the structure of the arguments, as compiled programs have it."""
    return jax.tree.structure((program.arguments, {}))


def _find_device(program: Program) -> jax.Device:
    """Return the device of a program's arrays."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(program.arguments))
    return next((device for found in shardings if found for device in found.device_set), jax.devices()[0])
