"""Text for users who give none: the documentation that Python ships."""

import ast
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from pydoc_data.topics import topics

TOPICS_PER_FILE = 8
"""Topics of Python's documentation in one file, which a search or a report then reads whole."""
FILE_CHARS = 4096
"""Characters from which a file of docstrings ends. Many files are divided evenly between splits."""
LEFT_OUT = frozenset(
    {
        *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"),
        *("encodings", "pydoc_data"),  # Tables, and the language reference again.
    }
)
"""Folders of Python's library that are passed over."""
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
"""Part of a program that can have a docstring."""


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


def write_library(folder: Path) -> list[Path]:
    """Write the docstrings and the code of Python's library, about eight million characters, as text files.

    Returns:
      A folder of docstrings, and one of code without them, to be read like a user's texts.
    """
    docstrings, code = folder / "docstrings", folder / "code"
    for each in (docstrings, code):
        each.mkdir(parents=True, exist_ok=True)
    part = list[str]()
    for index, (text, tree) in enumerate(_read_library()):
        nodes = [node for node in ast.walk(tree) if isinstance(node, Documented) and ast.get_docstring(node)]
        part += filter(None, map(ast.get_docstring, nodes))
        if sum(map(len, part)) >= FILE_CHARS:
            (docstrings / f"{index:04}.txt").write_text("\n\n".join(part), "utf-8")
            part = []
        (code / f"{index:04}.txt").write_text(_cut_docstrings(text, nodes), "utf-8")
    return [docstrings, code]


def _read_library() -> Iterator[tuple[str, ast.Module]]:
    """Yield the text and the syntax tree of each module."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(library).parts):
            with suppress(OSError, SyntaxError, ValueError):  # Some files are no Python on purpose.
                text = path.read_text("utf-8")
                yield text, ast.parse(text)


def _cut_docstrings(text: str, nodes: Iterable[Documented]) -> str:
    """Return a module's text without the docstrings of these nodes."""
    cut = set[int]()
    for docstring in (node.body[0] for node in nodes):
        cut.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return "\n".join(line for number, line in enumerate(text.split("\n"), start=1) if number not in cut)
