"""Text for searching a plan, for reporting on it and for tests: three shares of any text, without overlap."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Literal, get_args

from zdc_jax.evaluation.text import Document, pieces

Split = Literal["search", "report", "test"]
"""What text and seeds are for: a plan is searched on one share and reported on another."""
SPLITS: tuple[Split, ...] = get_args(Split)
PIECE_CHARS = 8192
"""Longer documents are cut at white space into pieces of about this many characters."""


def documents_of(split: Split, documents: Iterable[Document]) -> Iterator[Document]:
    """The pieces of documents that belong to a split, about a third of all.

    A hash of its text alone puts a piece into its split. So one folder serves all splits, and copies of a
    text are never in two.
    """
    for document in documents:
        for piece in pieces(document.text, PIECE_CHARS):
            if SPLITS[_number(piece) % len(SPLITS)] == split:
                yield replace(document, text=piece)


def split_seed(split: Split, seed: int) -> int:
    """A seed of 32 bits for a user's seed, another in each split."""
    return _number(f"{split} {seed}") % 2**32


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
