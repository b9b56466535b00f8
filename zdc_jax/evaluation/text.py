"""Reading text by topic for calibration and evaluation, and cutting it into token windows."""

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zdc_jax.errors import TextError, foreign_errors_as

OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, "": open}
PLAIN_SUFFIXES = (".txt", ".py", ".md", ".rst")
JSON_SUFFIXES = (".jsonl", ".json")
PIECE_CHARS_PER_TOKEN = 16
"""Long documents are sampled in pieces of this many characters per token of a window."""


@dataclass(frozen=True)
class Document:
    """One text and the topic it belongs to."""

    topic: str
    text: str


class Tokenizer(Protocol):
    """What `tokenizers.Tokenizer` and the tokenizers of transformers share."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> Any:
        """Token ids, or an object whose `ids` are."""


def read_documents(
    paths: Iterable[str | Path],
    *,
    field: str = "text",
    topic_field: str | None = None,
    separator: str = "<|endoftext|>",
) -> Iterator[Document]:
    """Documents of files and folders, in the order given; blank ones are left out.

    Args:
      paths: UTF-8 files `.txt`, `.py`, `.md`, `.rst` (documents separated by lines equal to
        `separator`) or `.jsonl`, `.json` (one object a line), any of them with `.xz` or `.gz`
        appended. Folders are searched to any depth in sorted order, except for hidden files, other
        kinds and `.json`, which in folders is mostly metadata.
      field: key of the text in JSON lines.
      topic_field: key of the topic in JSON lines; by default, and for plain text, the topic is the
        name of the folder that holds the file.

    Raises:
      TextError: missing path, unsupported file, unreadable or undecodable content, bad JSON line or
        missing field (naming file and line), or no text in all of the paths.
    """
    roots, found = [Path(path) for path in paths], False
    for path in roots:
        for file in _files(path):
            for document in _read_file(file, field, topic_field, separator):
                if document.text.strip():
                    found = True
                    yield document
    if not found:
        raise TextError(f"no text in {', '.join(map(str, roots)) or 'an empty list of paths'}")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TextError(f"{path} does not exist")
    return sorted(
        file
        for file in path.rglob("*")
        if _suffixes(file)[0] in (*PLAIN_SUFFIXES, ".jsonl")
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def _suffixes(path: Path) -> tuple[str, str]:
    """Kind and compression: `a.txt.xz` → (".txt", ".xz")."""
    if path.suffix in OPENERS:
        return path.with_suffix("").suffix, path.suffix
    return path.suffix, ""


def _read_file(path: Path, field: str, topic_field: str | None, separator: str) -> Iterator[Document]:
    kind = _suffixes(path)[0]
    folder = path.absolute().parent.name
    if kind in PLAIN_SUFFIXES:
        lines: list[str] = []
        for _, line in _lines(path):
            if line.removesuffix("\n") == separator:
                yield Document(folder, "".join(lines).strip("\n"))
                lines = []
            else:
                lines.append(line)
        yield Document(folder, "".join(lines).strip("\n"))
    elif kind in JSON_SUFFIXES:
        for number, line in _lines(path):
            if line.strip():
                yield _json_document(f"{path}:{number}", line, folder, field, topic_field)
    else:
        allowed = ", ".join(PLAIN_SUFFIXES + JSON_SUFFIXES)
        raise TextError(f"{path}: unsupported extension, allowed are {allowed}, each with .xz or .gz too")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file, with line feeds only."""
    number = 0
    try:
        with OPENERS[_suffixes(path)[1]](path, "rb") as file:
            for number, line in enumerate(file, start=1):
                # A byte order mark can only be on the first line.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text.replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise TextError(f"{path}:{number}: not UTF-8: {error}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise TextError(f"cannot read {path} after line {number}: {error}") from error


def _json_document(where: str, line: str, folder: str, field: str, topic_field: str | None) -> Document:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # Also endless numbers, and nesting.
        raise TextError(f"{where}: not a JSON object on one line: {error}") from error
    if not isinstance(value, dict):
        raise TextError(f"{where}: a JSON object is needed, found {type(value).__name__}")
    for name in (field, topic_field):
        if name is not None and not isinstance(value.get(name), str):
            fields = ", ".join(map(repr, value)) or "none"
            raise TextError(f"{where}: no string field {name!r}; fields are {fields}")
    return Document(folder if topic_field is None else value[topic_field], value[field])


def token_windows(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    length: int,
    num_windows: int | None = None,
    seed: int = 0,
    eos_id: int | None = None,
) -> tuple[np.ndarray, list[str]]:
    """Windows of consecutive tokens, none across two topics, and the topic of each.

    Windows come round-robin from the topics, in an order shuffled by the seed, until a topic has no
    whole window left. Without `num_windows` each topic's documents are read whole and in order.
    With it they are shuffled, long ones after being cut at white space into pieces of `length *
    PIECE_CHARS_PER_TOKEN` characters, and only as much is tokenised as the windows need.

    Args:
      length: tokens per window.
      num_windows: at most this many windows; default all.
      eos_id: token put between documents (or pieces); default none.

    Returns:
      int32 [W, length] and W topics. The same arguments give the same windows.

    Raises:
      TextError: not one whole window (naming the tokens found); `length` or `num_windows` below 1.
    """
    for name, value in (("length", length), ("num_windows", num_windows)):
        if value is not None and value < 1:
            raise TextError(f"{name}={value} must be >= 1")
    by_topic: dict[str, list[str]] = {}
    for document in documents:
        by_topic.setdefault(document.topic, []).append(document.text)
    rng = np.random.default_rng(seed)
    topics = sorted(by_topic)
    streams = {}
    for topic in (topics[i] for i in rng.permutation(len(topics))):
        texts = by_topic[topic]
        if num_windows is not None:
            short = [p for text in texts for p in pieces(text, length * PIECE_CHARS_PER_TOKEN)]
            texts = [short[i] for i in rng.permutation(len(short))]
        streams[topic] = _TokenStream(texts, tokenizer, eos_id)
    chosen = _round_robin(streams, length, num_windows)
    if not chosen:
        most = max((len(stream.tokens) for stream in streams.values()), default=0)
        raise TextError(
            f"not one whole window of {length} tokens: the longest of {len(streams)} topics has {most} tokens"
        )
    return np.stack([window for _, window in chosen]), [topic for topic, _ in chosen]


class _TokenStream:
    """The tokens of some texts, produced as they are asked for."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer, eos_id: int | None):
        self.tokens = np.empty(0, np.int32)
        self._texts = iter(texts)
        self._tokenizer = tokenizer
        self._separator = np.array([] if eos_id is None else [eos_id], np.int32)
        self._started = False

    def take(self, length: int) -> np.ndarray | None:
        """The next `length` tokens, or None where fewer are left (they stay in `tokens`)."""
        while len(self.tokens) < length:
            text = next(self._texts, None)
            if text is None:
                return None
            with foreign_errors_as(TextError, f"the tokenizer cannot encode {text!r:.80}"):
                encoded = self._tokenizer.encode(text, add_special_tokens=False)
            new = np.array(getattr(encoded, "ids", encoded), np.int32)
            between = self._separator[: int(self._started)]
            self.tokens = np.concatenate([self.tokens, between, new])
            self._started = True
        window, self.tokens = np.split(self.tokens, [length])
        return window


def _round_robin(
    streams: dict[str, _TokenStream], length: int, num_windows: int | None
) -> list[tuple[str, np.ndarray]]:
    chosen: list[tuple[str, np.ndarray]] = []
    left = list(streams)
    while left:
        for topic in tuple(left):
            if len(chosen) == num_windows:
                return chosen
            window = streams[topic].take(length)
            if window is None:
                left.remove(topic)
            else:
                chosen.append((topic, window))
    return chosen


def pieces(text: str, size: int) -> list[str]:
    """The text cut before the first white space after every `size` characters."""
    white_space = re.compile(r"\s")
    found, start = [], 0
    while gap := white_space.search(text, start + size):
        found.append(text[start : gap.start()])
        start = gap.start()
    return [*found, text[start:]]
