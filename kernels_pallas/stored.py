"""Values on disk that one version of some sources made, so that later processes need not make them again.

They lie below JAX's folder of compiled programs. Who writes there runs code in this process.
"""

import functools
import hashlib
import os
import pickle
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax
import jaxlib


def find_folder(name: str, *sources: Path) -> Path | None:
    """Return the folder of values of this version of `sources`, or None if the process keeps none.

    A process keeps none without JAX's folder of compiled programs, or if that is a remote store.

    Args:
      name: name of the kind of values. Folders of other versions have the same parent.
      sources: folders of Python files.
    """
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or "://" in folder:
        return None
    return Path(folder) / name / _hash_sources(sources)


@functools.cache
def _hash_sources(folders: tuple[Path, ...]) -> str:
    """Return a hash of source files, of their tables, and of the versions of JAX."""
    found = hashlib.sha256(f"{jax.__version__} {jaxlib.__version__}".encode())
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".json")):
            found.update(path.read_bytes())
    return found.hexdigest()


_lock = threading.Lock()
"""Held by a thread that creates folders, so that it deletes nothing which others have just stored."""


def load(file: Path) -> Any | None:
    """Return a stored value; None if there is none, or none that can be read."""
    try:
        value = pickle.loads(file.read_bytes())
    except Exception:  # A damaged file may raise anything, and is written again.
        return None
    with suppress(OSError):  # The folder may be read-only.
        os.utime(file)  # `trim` deletes the least recently used ones.
    return value


def store(file: Path, value: Any) -> None:
    """Store a value as a whole file, and delete those of other versions. Nothing is stored on a full disk."""
    partial = file.with_name(f".{uuid4().hex}")
    try:
        with _lock:
            if not file.parent.exists():
                shutil.rmtree(file.parent.parent, ignore_errors=True)
                file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.write_bytes(pickle.dumps(value))
        partial.replace(file)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def trim(folder: Path, most_bytes: int) -> None:
    """Delete the least recently used values until the others have at most `most_bytes` bytes."""
    with suppress(OSError):  # Another process may delete files, too.
        files = [(path.stat(), path) for path in folder.iterdir()]
        total = sum(stat.st_size for stat, _ in files)
        for stat, path in sorted(files, key=lambda file: file[0].st_mtime):
            if total <= most_bytes:
                break
            path.unlink(missing_ok=True)
            total -= stat.st_size
