"""Files that commands write: refused before any work, and never left half written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


def check_output(path: Path) -> None:
    """Refuses a path that no file can be written to.

    Raises:
      FileNotFoundError: its folder is missing. FileExistsError: it is there and not a regular file.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"cannot write {path}: it exists and is not a file")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes the place of `path` unless the block raises."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
