"""Disjoint splits of any text: one to search for a plan, one to report on it, and one for tests."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Literal, get_args

from zdc_jax.evaluation.text import Document, split_passages

Split = Literal["search", "report", "test"]
"""Purpose of text and seeds. A plan is searched on one split and reported on another."""
SPLITS: tuple[Split, ...] = get_args(Split)
PASSAGE_CHARS = 65_536
"""Approximate length, in characters, of the passages that longer documents are cut into."""


def documents_of(split: Split, documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the passages of documents that belong to a split, about a third of all passages.

    The split of a passage depends only on a hash of its text. One folder can therefore serve all splits, and
    copies of a text are always in the same split.
    """
    for document in documents:
        for passage in split_passages(document.text, PASSAGE_CHARS):
            if SPLITS[_hash_text(passage) % len(SPLITS)] == split:
                yield replace(document, text=passage)


def split_seed(split: Split, seed: int) -> int:
    """Return a 32-bit seed that differs between splits, derived from the user's seed."""
    return _hash_text(f"{split} {seed}") % 2**32


def _hash_text(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
