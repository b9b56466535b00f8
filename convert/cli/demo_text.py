"""Text for `zdc demo` that every installation has: sources of dependencies, and Python's own reference."""

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

PACKAGES = {
    "calibration": ("numpy", "rich", "safetensors", "tyro"),
    "heldout": ("flax", "optax", "jaxtyping"),
}
"""Packages whose sources are copied, by purpose. Text of one purpose is never used for the other."""
SOURCE_CHARACTERS = 400_000
"""Characters of Python source from each package."""
SHORTEST_FILE = 2000
"""Characters of the shortest source file that is copied."""


@dataclass(frozen=True)
class DemoText:
    """Folders of text to calibrate on and of other text to measure on; each has one folder per topic."""

    calibration: Path
    heldout: Path

    def read_prose(self) -> str:
        """Return the held-out half of Python's reference."""
        return "\n\n".join(path.read_text() for path in sorted((self.heldout / "reference").glob("*.txt")))


def write_text(folder: Path) -> DemoText:
    """Write text to calibrate on and text to measure on; replace the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for purpose in PACKAGES:
        write_prose(purpose, folder / purpose)
        write_sources(purpose, folder / purpose)
    return DemoText(folder / "calibration", folder / "heldout")


def write_sources(purpose: str, folder: Path) -> None:
    """Copy Python files of installed packages; each package is a topic."""
    for package in PACKAGES[purpose]:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        size = 0
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) < SHORTEST_FILE or "test" in path.parts[-2]:
                continue
            target = folder / package / f"{size}-{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            size += len(text)
            if size > SOURCE_CHARACTERS:
                break


def write_prose(purpose: str, folder: Path) -> None:
    """Write every second chapter of Python's reference, about 250 kB."""
    (folder / "reference").mkdir(parents=True)
    for name in sorted(topics)[list(PACKAGES).index(purpose) :: 2]:
        (folder / "reference" / f"{name}.txt").write_text(topics[name])
