"""Allocation of cache pages and reuse of their contents. Pure Python, without arrays.

A page that no request uses keeps its tokens until it is allocated again, the least recently used page first.
The key of a page identifies its tokens and all tokens before them, so a later request with the same prefix
finds it.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

DIGEST = 32
"""Bytes of a key, enough to rule out collisions, accidental or deliberate."""


def page_keys(tokens: Sequence[int], page: int, salt: str, known: Sequence[bytes] = ()) -> list[bytes]:
    """Return the key of each whole page of a token sequence.

    A key is a digest of the page's tokens, of all tokens before them, and of the salt.

    Args:
      tokens: token ids.
      page: tokens of a page.
      salt: salt of the prefix cache.
      known: keys of the first pages, if they were computed before.
    """
    keys = list(known)
    before = keys[-1] if keys else hashlib.blake2b(salt.encode(), digest_size=DIGEST).digest()
    for begin in range(len(keys) * page, len(tokens) // page * page, page):
        text = array("q", tokens[begin : begin + page]).tobytes()
        before = hashlib.blake2b(text, digest_size=DIGEST, key=before).digest()
        keys.append(before)
    return keys


class PagePool:
    """Pool of pages with reference counts; several requests may use one page.

    Attributes:
      pages: number of pages.
    """

    def __init__(self, pages: int):
        self.pages = pages
        self._references = [0] * pages
        self._idle = OrderedDict.fromkeys(range(pages))
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Number of pages that no request uses."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Allocate unused pages with one reference each, and forget their contents."""
        pages = [self._idle.popitem(last=False)[0] for _ in range(count)]
        self.forget(pages)
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page of a sequence; its last unused pages are evicted first."""
        for page in reversed(pages):
            self._references[page] -= 1
            if not self._references[page]:
                self._idle[page] = None
                self._idle.move_to_end(page, last=page in self._key_of)

    def register(self, keys: Iterable[bytes], pages: Iterable[int]) -> None:
        """Record the contents of pages; of two pages with the same key, `find` returns the first."""
        for key, page in zip(keys, pages, strict=False):
            if key not in self._page_of:
                self._page_of[key] = page
                self._key_of[page] = key

    def forget(self, pages: Iterable[int]) -> None:
        """Forget the contents of pages, so that `find` does not return them."""
        for page in pages:
            if key := self._key_of.pop(page, None):
                del self._page_of[key]

    def list_unshared(self, pages: Iterable[int]) -> list[int]:
        """Return the pages that have one reference."""
        return [page for page in pages if self._references[page] == 1]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest stored prefix."""
        pages = []
        for key in keys:
            if (page := self._page_of.get(key)) is None:
                break
            pages.append(page)
        return pages

    def count_idle(self, pages: Iterable[int]) -> int:
        """Count the pages that no request uses."""
        return sum(page in self._idle for page in pages)


class Tails:
    """Slots for snapshots of state outside pages, taken at page ends; the least recently used is replaced.

    Args:
      slots: number of slots.
    """

    def __init__(self, slots: int):
        self._free = list(range(slots))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()

    def put(self, key: bytes) -> int | None:
        """Return the slot for a new snapshot; None if one with this key exists or there are no slots."""
        if key in self._slot_of or not (self._free or self._slot_of):
            return None
        slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
        self._slot_of[key] = slot
        return slot

    def find(self, key: bytes) -> int | None:
        """Return the slot of a snapshot and mark it as used; None if there is none."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
        return self._slot_of.get(key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of
