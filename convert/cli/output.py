"""Checks of the files that commands write, made before any work."""

import os
from pathlib import Path


def check_output(path: Path, *, overwrite: bool = True) -> None:
    """Refuse a path that no file can be written to, or whose file may not be replaced.

    Raises:
      FileNotFoundError: the folder of the file does not exist.
      FileExistsError: the path exists, and is not a regular file, or may not be overwritten.
      PermissionError: the folder is not writable.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}; create it first")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"cannot write {path}: it exists and is not a file; choose another path")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; pass --overwrite to replace it, or choose another path")
    check_writable(path.parent)


def check_writable(folder: Path) -> None:
    """Raise `PermissionError` if this user may not write into a folder that exists."""
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise PermissionError(f"cannot write into {folder}: you have no permission; choose another folder")
