"""Which pages of a cache are whose. Pure Python: nothing here knows of arrays.

A page that no request holds keeps its tokens until another needs it, the longest unused first. Its key tells
which tokens these are and all before them, so that a text that begins alike finds it.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

DIGEST = 32
"""Bytes of a key: two texts of the same do not happen, by chance or on purpose."""


def page_keys(tokens: Sequence[int], page: int, salt: str, known: Sequence[bytes] = ()) -> list[bytes]:
    """Of each whole page of a text: a digest of it, of all before it and of the salt.

    known: the first of them.
    """
    keys = list(known)
    before = keys[-1] if keys else hashlib.blake2b(salt.encode(), digest_size=DIGEST).digest()
    for begin in range(len(keys) * page, len(tokens) // page * page, page):
        text = array("q", tokens[begin : begin + page]).tobytes()
        before = hashlib.blake2b(text, digest_size=DIGEST, key=before).digest()
        keys.append(before)
    return keys


class PagePool:
    """`pages` pages. Those of a request are held by it; several may hold one."""

    def __init__(self, pages: int):
        self.pages = pages
        self._holders = [0] * pages
        self._idle = OrderedDict.fromkeys(range(pages))
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Pages that nobody holds."""
        return len(self._idle)

    def take(self, count: int) -> list[int]:
        """So many of the available ones, held once; what was in them is forgotten."""
        taken = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for page in taken:
            if key := self._key_of.pop(page, None):
                del self._page_of[key]
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """Holds pages once more."""
        for page in pages:
            self._holders[page] += 1
            self._idle.pop(page, None)

    def let_go(self, pages: Sequence[int]) -> None:
        """Holds pages of a text once less; of those that are left over the last are needed least."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._idle[page] = None
                self._idle.move_to_end(page, last=page in self._key_of)

    def name(self, keys: Iterable[bytes], pages: Iterable[int]) -> None:
        """Says what is in pages; of two of the same text the first stays the one that is found."""
        for key, page in zip(keys, pages, strict=False):
            if key not in self._page_of:
                self._page_of[key] = page
                self._key_of[page] = key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of a text, as far as they are there without a gap."""
        found = []
        for key in keys:
            if (page := self._page_of.get(key)) is None:
                break
            found.append(page)
        return found

    def idle(self, pages: Iterable[int]) -> int:
        """How many of them nobody holds."""
        return sum(page in self._idle for page in pages)


class Tails:
    """`slots` copies of what rows hold beside their pages, at the ends of pages; the longest unused goes."""

    def __init__(self, slots: int):
        self._free = list(range(slots))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()

    def put(self, key: bytes) -> int | None:
        """The slot that is to take the copy of a text, None where there is one, or no slot at all."""
        if key in self._slot_of or not (self._free or self._slot_of):
            return None
        slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
        self._slot_of[key] = slot
        return slot

    def find(self, key: bytes) -> int | None:
        """The slot of a text's copy; it counts as used."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
        return self._slot_of.get(key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of
