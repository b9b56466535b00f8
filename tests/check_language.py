"""Check the language of docstrings, comments, messages and docs.

    python tests/check_language.py              # what `make lint` runs
    python tests/check_language.py PATH ...     # list every finding in these files or folders

The rules are listed in CONTRIBUTING.md.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WORDS = 30
"""Longest sentence in docs and docstrings, in words."""

FORBIDDEN_OPENINGS = re.compile(
    r"(Of|As|What|Which|How|That|Who|Whose|Where|From|And|But|Nor|It|They|Also)\b"
)
BARE_REFERENCE = re.compile(r"`[\w.]+`[.;:]")

VERBS = frozenset(Path(__file__).with_name("imperative_verbs.txt").read_text().split())
"""First words that the docstring of a function may have."""

BANNED = re.compile(
    r"\b(beside|behind|foretells?|foretold|reckon(s|ed|ing)?|sheets?|pieces?|anew|errs?|nobody|somebody|whoever"
    r"|so many|so much|a word for it|told from|hangs? on|of use to|goes on alike|go on alike|in the place of"
    r"|of now|come again|gives? back|given back|at home in|their like|its like)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Finding:
    """One place that breaks a rule."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text[:100]}"


def list_files() -> list[str]:
    """List the Python and Markdown files that git tracks, relative to the root."""
    command = ["git", "ls-files", "*.py", "*.md"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def check_file(path: str) -> list[Finding]:
    """Return every finding in one file."""
    text = (ROOT / path).read_text()
    if path == "tests/check_language.py":
        return []
    return list(check_python(path, text) if path.endswith(".py") else check_markdown(path, text))


def check_python(path: str, text: str) -> Iterator[Finding]:
    """Yield findings in docstrings, comments and messages."""
    tree = ast.parse(text)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        for place, doc, is_function in find_docstrings(node):
            docstrings.add(id(place))
            yield from check_docstring(path, place.lineno, doc, is_function)
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        if is_text and id(node) not in docstrings:
            yield from check_phrases(path, node.lineno, node.value)
    with (ROOT / path).open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield from check_phrases(path, token.start[0], token.string)


def find_docstrings(node: ast.AST) -> Iterator[tuple[ast.Constant, str, bool]]:
    """Yield docstrings of a definition and of attributes in its body, and whether each is a function's."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    previous: ast.stmt | None = None
    for index, statement in enumerate(body):
        value = statement.value if isinstance(statement, ast.Expr) else None
        own = index == 0 and isinstance(node, owners)
        documents = own or isinstance(previous, ast.Assign | ast.AnnAssign)
        if documents and isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value, value.value, own and _is_action(node)
        previous = statement


def _is_action(node: ast.AST) -> bool:
    """Return whether a node is a function other than a property."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any("property" in ast.unparse(each) for each in node.decorator_list)


def check_docstring(path: str, line: int, doc: str, is_function: bool) -> Iterator[Finding]:
    """Yield findings in one docstring."""
    first = doc.strip().split("\n")[0]
    word = re.match(r"[A-Za-z-]*", first)
    if FORBIDDEN_OPENINGS.match(first) or BARE_REFERENCE.match(first):
        yield Finding(path, line, "opening", first)
    elif is_function and (word is None or word[0] not in VERBS):
        yield Finding(path, line, "opening of a function is no verb", first)
    yield from check_phrases(path, line, doc)
    for sentence in split_sentences(doc):
        if len(sentence.split()) > MOST_WORDS:
            yield Finding(path, line, f"sentence over {MOST_WORDS} words", sentence)


def check_phrases(path: str, line: int, text: str) -> Iterator[Finding]:
    """Yield a finding for each banned phrase."""
    for match in BANNED.finditer(text):
        yield Finding(path, line, f"phrase {match[0]!r}", " ".join(text.split()))


def split_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of prose; blank lines, `name:` entries and list items begin new ones."""
    blocks: list[list[str]] = [[]]
    for line in text.split("\n"):
        stripped = line.strip()
        begins = re.match(r"([-*|>#]|\d+\.) ?|[\w`*, ]{1,40}:( |$)", stripped)
        if not stripped or begins:
            blocks.append([])
        if stripped and not stripped.startswith("|"):
            blocks[-1].append(stripped)
    for block in blocks:
        yield from re.split(r"(?<=[.!?:;])[)\"'*]*\s+", " ".join(block))


def check_markdown(path: str, text: str) -> Iterator[Finding]:
    """Yield findings in prose; code and tables are left out."""
    fenced, lines = False, list[str]()
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        code = fenced or fence or line.startswith("    ") or line.lstrip().startswith("|")
        lines.append("" if code or line.startswith("#") else re.sub(r"`[^`]*`|\]\([^)]*\)", "`code`", line))
        fenced ^= fence
    for number, line in enumerate(lines, 1):
        yield from check_phrases(path, number, line)
    for sentence in split_sentences("\n".join(lines)):
        if len(sentence.split()) > MOST_WORDS:
            start = " ".join(sentence.split()[:4])
            number = next((i for i, line in enumerate(lines, 1) if start[:20] in line), 1)
            yield Finding(path, number, f"sentence over {MOST_WORDS} words", sentence)


def main(arguments: list[str]) -> int:
    """Print findings and return the exit status."""
    paths = [argument.rstrip("/") for argument in arguments]
    files = list_files()
    if paths:
        files = [file for file in files if any(file == path or file.startswith(f"{path}/") for path in paths)]
    findings = [finding for file in files for finding in check_file(file)]
    print("".join(f"{finding}\n" for finding in findings), end="")
    if paths:
        print(f"{len(findings)} findings in {len(files)} files")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
