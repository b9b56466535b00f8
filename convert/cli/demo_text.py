"""Text for `zdc demo` that every installation has: sources of dependencies, and Python's own reference."""

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

PACKAGES = {
    "calibration": ("numpy", "rich", "safetensors", "tyro"),
    "heldout": ("flax", "optax", "jaxtyping"),
}
TEXT_BYTES = 400_000
"""Of Python source copied from each package."""
PASSAGE = 2000
Purpose = str
"""A key of `PACKAGES`."""


Writer = Callable[[Purpose, Path], None]
"""Writes text for a purpose into a folder."""


def write_text(folder: Path, writers: Sequence[Writer]) -> tuple[Path, Path]:
    """Writes text, a folder below for each topic; gives that to calibrate and that to measure on."""
    shutil.rmtree(folder, ignore_errors=True)
    for purpose in PACKAGES:
        for writer in writers:
            writer(purpose, folder / purpose)
    return folder / "calibration", folder / "heldout"


def passage(folder: Path) -> str:
    """`PASSAGE` characters, more than a plan's window, of the first long file, prose if there is any."""
    files = (path for path in folder.rglob("*") if path.is_file())
    texts = (path.read_text() for path in sorted(files, key=lambda path: (path.suffix == ".py", path)))
    text = next(text for text in texts if len(text) > PASSAGE)
    return text[: text.rindex("\n", 0, PASSAGE) + 1]


def _write_sources(purpose: Purpose, folder: Path) -> None:
    """Copies Python files of installed packages, one topic a package."""
    for package in PACKAGES[purpose]:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        size = 0
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) < 2000 or "test" in path.parts[-2]:
                continue
            target = folder / package / f"{size}-{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            size += len(text)
            if size > TEXT_BYTES:
                break


def _write_prose(purpose: Purpose, folder: Path) -> None:
    """Writes every second chapter of Python's reference, about 250 kB."""
    (folder / "reference").mkdir(parents=True)
    for name in sorted(topics)[list(PACKAGES).index(purpose) :: 2]:
        (folder / "reference" / f"{name}.txt").write_text(topics[name])


CODE: tuple[Writer, ...] = (_write_sources,)
PROSE: tuple[Writer, ...] = (_write_prose, _write_sources)
