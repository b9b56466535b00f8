"""Files and folders that are there whole or not at all, and JSON of any kind read from them."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes the place of `path` unless the block raises."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def replace_folder(folder: Path, path: Path, aside: Path) -> None:
    """Renames a finished folder to `path`, in the place of an older one.

    That one waits as `aside`, a free name beside it, and is removed at the end; a failure puts it back.
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
    """The JSON value in a file; raises `OSError`, or `ValueError` for what is no JSON or nests too deep."""
    try:
        return json.loads(path.read_text())
    except RecursionError as error:
        raise ValueError("its JSON is nested too deep") from error
