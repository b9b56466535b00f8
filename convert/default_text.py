"""Calibration text for users who give none: the documentation that Python ships (`write_default_text`)."""

from pathlib import Path
from pydoc_data.topics import topics

TOPICS_PER_FILE = 8
"""Topics of Python's documentation in one file, which a search or a report then reads whole."""


def write_default_text(folder: Path) -> Path:
    """Write the language reference that `pydoc` shows, about half a million characters, as text files.

    Returns:
      The folder, to be read like a user's texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(topics)
    for start in range(0, len(names), TOPICS_PER_FILE):
        chosen = names[start : start + TOPICS_PER_FILE]
        (folder / f"{start:03}.txt").write_text("\n\n".join(topics[name] for name in chosen))
    return folder
