"""Files that commands write: refused before any work."""

from pathlib import Path


def check_output(path: Path) -> None:
    """Refuses a path that no file can be written to.

    Raises:
      FileNotFoundError: its folder is missing. FileExistsError: it is there and not a regular file.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"cannot write {path}: it exists and is not a file")
