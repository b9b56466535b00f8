"""Text for users who give none: the documentation that Python ships."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

TOPICS_PER_FILE = 8
"""Topics of Python's documentation in one file, which a search or a report then reads whole."""
FILE_CHARS = 4096
"""Characters from which a file of docstrings ends. Many files are divided evenly between splits."""
WITHOUT_DOCUMENTATION = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})
"""Folders of Python's library that are passed over."""


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


def write_docstrings(folder: Path) -> Path:
    """Write the docstrings of Python's library, about a million and a half characters, as text files.

    Returns:
      The folder, to be read like a user's texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part, count = list[str](), 0
    for text in (*_list_docstrings(Path(sysconfig.get_path("stdlib"))), None):
        if text is not None:
            part.append(text)
        if part and (text is None or sum(map(len, part)) >= FILE_CHARS):
            (folder / f"{count:04}.txt").write_text("\n\n".join(part), "utf-8")
            part, count = [], count + 1
    return folder


def _list_docstrings(library: Path) -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions, file by file."""
    for path in sorted(library.rglob("*.py")):
        if WITHOUT_DOCUMENTATION.intersection(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):  # Some files are no Python on purpose.
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
        yield from filter(None, map(ast.get_docstring, nodes))
