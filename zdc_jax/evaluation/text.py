"""Reading of documents from files, and cutting them into token windows, for calibration and evaluation."""

import gzip
import json
import lzma
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zdc_jax.errors import TextError, describe_error, foreign_errors_as

OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, "": open}
PLAIN_SUFFIXES = (".txt", ".py", ".md", ".rst")
JSON_SUFFIXES = (".jsonl", ".json")
SEPARATOR = "<|endoftext|>"
"""Line that separates documents in plain text."""
PASSAGE_CHARS_PER_TOKEN = 16
"""Length of the passages that documents are sampled in, in characters per token of a window."""


@dataclass(frozen=True)
class Document:
    """Text and its topic."""

    topic: str
    text: str


class Tokenizer(Protocol):
    """Common interface of `tokenizers.Tokenizer` and the tokenizers of transformers."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> Any:
        """Return the token ids, or an object with the attribute `ids`."""


def read_documents(paths: Iterable[str | Path]) -> Iterator[Document]:
    """Yield the documents in files and folders, in order, without blank ones.

    The topic of a document is the name of the folder that contains its file.

    Args:
      paths: UTF-8 files or folders. Files `.txt`, `.py`, `.md` and `.rst` contain documents separated by
        lines equal to `SEPARATOR`. Files `.jsonl` and `.json` contain one JSON object per line, whose text
        is the field `text`. All of them
        can also have the suffix `.xz` or `.gz`. Folders are searched recursively in sorted order. Hidden
        files, other types, and `.json` files in folders (mostly metadata) are skipped.

    Raises:
      TextError: a path is missing; a file is unsupported, unreadable or not UTF-8; a JSON line is invalid or
        lacks a field; no path contains text.
    """
    roots, is_empty = [Path(path) for path in paths], True
    for path in roots:
        for file in _list_files(path):
            for document in _read_file(file):
                if document.text.strip():
                    is_empty = False
                    yield document
    if is_empty:
        raise TextError(f"no text in {', '.join(map(str, roots)) or 'an empty list of paths'}")


def _list_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TextError(
            f"text={str(path)!r}: no such file or folder; give a text file or a folder of text files"
        )
    return sorted(
        file
        for file in path.rglob("*")
        if _split_suffixes(file)[0] in (*PLAIN_SUFFIXES, ".jsonl")
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def _split_suffixes(path: Path) -> tuple[str, str]:
    """Return the suffixes of the file type and of the compression: `a.txt.xz` → (".txt", ".xz")."""
    if path.suffix in OPENERS:
        return path.with_suffix("").suffix, path.suffix
    return path.suffix, ""


def _read_file(path: Path) -> Iterator[Document]:
    kind = _split_suffixes(path)[0]
    folder = path.absolute().parent.name
    if kind in PLAIN_SUFFIXES:
        lines: list[str] = []
        for _, line in _read_lines(path):
            if line.removesuffix("\n") == SEPARATOR:
                yield Document(folder, "".join(lines).strip("\n"))
                lines = []
            else:
                lines.append(line)
        yield Document(folder, "".join(lines).strip("\n"))
    elif kind in JSON_SUFFIXES:
        for number, line in _read_lines(path):
            if line.strip():
                yield _parse_json_line(f"{path}:{number}", line, folder)
    else:
        allowed = ", ".join(PLAIN_SUFFIXES + JSON_SUFFIXES)
        raise TextError(f"{path}: unsupported extension; allowed are {allowed}, also followed by .xz or .gz")


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a UTF-8 file. Line ends are converted to line feeds."""
    number = 0
    try:
        with OPENERS[_split_suffixes(path)[1]](path, "rb") as file:
            for number, line in enumerate(file, start=1):
                # Only the first line can begin with a byte order mark.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text.replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise TextError(f"{path}:{number}: not UTF-8: {error}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise TextError(f"cannot read {path} after line {number}: {describe_error(error)}") from error


def _parse_json_line(where: str, line: str, folder: str) -> Document:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # Includes numbers that are too long and deep nesting.
        raise TextError(f"{where}: not a JSON object on one line: {error}") from error
    if not isinstance(value, dict):
        raise TextError(f"{where}: each line must be a JSON object, this line is a {type(value).__name__}")
    if not isinstance(value.get("text"), str):
        fields = ", ".join(map(repr, value)) or "none"
        raise TextError(f"{where}: no string field 'text'; its fields are {fields}")
    return Document(folder, value["text"])


def token_windows(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    length: int,
    num_windows: int | None = None,
    seed: int = 0,
    eos_id: int | None = None,
) -> tuple[np.ndarray, list[str]]:
    """Cut documents into windows of consecutive tokens. No window contains two topics.

    The windows are taken from the topics in turn, in an order shuffled by the seed, until no topic has a
    complete window left. Without `num_windows`, the documents of each topic are read in order. With it, they
    are cut at white space into passages of `length * PASSAGE_CHARS_PER_TOKEN` characters and shuffled. Only
    the text that the windows need is then tokenized.

    Args:
      documents: documents to read.
      tokenizer: tokenizer of the model.
      length: tokens per window.
      num_windows: largest number of windows. Default: no limit.
      seed: seed of the shuffling. The same arguments return the same windows.
      eos_id: token inserted between documents or passages. Default: none.

    Returns:
      token ids, int32 [W, length], and the topics of the W windows.

    Raises:
      TextError: the text is shorter than one window, or `length` or `num_windows` is less than 1.
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
            size = length * PASSAGE_CHARS_PER_TOKEN
            passages = [passage for text in texts for passage in split_passages(text, size)]
            texts = [passages[i] for i in rng.permutation(len(passages))]
        streams[topic] = _TokenStream(texts, tokenizer, eos_id)
    windows = _take_windows(streams, length, num_windows)
    if not windows:
        longest = max((len(stream.tokens) for stream in streams.values()), default=0)
        raise TextError(
            f"too little text for one window of {length} tokens: the longest of {len(streams)} topics has "
            f"{longest} tokens here. Parts of a text are kept for other uses; give several times as much"
        )
    return np.stack([window for _, window in windows]), [topic for topic, _ in windows]


class _TokenStream:
    """Tokens of several texts, which are tokenized on demand."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer, eos_id: int | None):
        self.tokens = np.empty(0, np.int32)
        self._texts = iter(texts)
        self._tokenizer = tokenizer
        self._separator = np.array([] if eos_id is None else [eos_id], np.int32)
        self._started = False

    def take(self, length: int) -> np.ndarray | None:
        """Return the next `length` tokens, or None if fewer are left. Those remain in `tokens`."""
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


def _take_windows(
    streams: dict[str, _TokenStream], length: int, num_windows: int | None
) -> list[tuple[str, np.ndarray]]:
    """Take windows from the topics in turn; return each with its topic."""
    windows, topics = list[tuple[str, np.ndarray]](), deque(streams)
    while topics and len(windows) != num_windows:
        topic = topics.popleft()
        if (window := streams[topic].take(length)) is not None:
            windows.append((topic, window))
            topics.append(topic)
    return windows


def split_passages(text: str, size: int) -> list[str]:
    """Cut a text before the first white space after every `size` characters."""
    white_space = re.compile(r"\s")
    passages, start = [], 0
    while gap := white_space.search(text, start + size):
        passages.append(text[start : gap.start()])
        start = gap.start()
    return [*passages, text[start:]]
