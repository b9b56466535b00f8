"""Atomic writes of files and folders, reading of JSON files, and hashes."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends; remove it if the block raises."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def replace_folder(folder: Path, path: Path, aside: Path) -> None:
    """Rename a finished folder to `path`, replacing an existing folder.

    Args:
      folder: the finished folder.
      path: its new name. If the renaming fails, an existing folder keeps this name.
      aside: unused name in the same parent folder, for the old folder until it is deleted.
    """
    if not path.exists():
        folder.rename(path)
        return
    path.rename(aside)
    try:
        folder.rename(path)
    except BaseException:
        aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def load_json(path: Path) -> Any:
    """Return the JSON value in a file.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is not JSON, or its values are nested too deep.
    """
    try:
        return json.loads(path.read_text())
    except RecursionError as error:
        raise ValueError("its JSON is nested too deep") from error


def hash_file(path: Path) -> bytes:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def hash_arrays(arrays: Iterable[tuple[str, Any]]) -> str:
    """Return the sha256 of the names, dtypes, shapes and values of arrays, in hexadecimal digits."""
    total = hashlib.sha256()
    for name, array in arrays:
        total.update(f"{name} {array.dtype} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return total.hexdigest()
