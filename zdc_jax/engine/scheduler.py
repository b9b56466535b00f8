"""Which request reads or writes tokens in the next step. Pure Python: nothing here knows of arrays.

A request that is under way has one of a fixed number of rows, and pages of the cache for its tokens. Its text
is read in pieces, and then it decodes. Each step reads some tokens of prompts *and* decodes all rows that are
ready, so that neither waits for the other. Requests wait by priority, then in the order in which they came.
One is begun when there are pages for its whole text, and some for those under way to grow.

Where pages run out, or a more urgent request waits, the least urgent one gives its row and pages away; it
reads its text anew later, with what it had generated. So the most urgent always gets on.

Pages keep what they hold until another request needs them. A text that begins alike shares them, and reads
the rest alone. What a method keeps of a row beside pages (its ring of near tokens) is copied at the end of
some pages, for a text can go on only from where there is such a copy.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from zdc_jax.engine.page_pool import PagePool, Tails, page_keys


@dataclass(eq=False)
class Work:
    """One request on its way. The scheduler alone changes what is below `output`.

    prompt: token ids. max_tokens: to be generated. salt: pages are shared only with requests of the same.
    anew: all of its text is read, and in pieces, whatever others read.
    output: tokens generated so far. row: of the cache, None while it waits. text: what is to be read in its
    row; keys: of its whole pages. pages: that it holds, in order. read: tokens of the text that are in the
    row, or will be once all steps so far are done. promised: tokens that these steps generate at most.
    cached: tokens of the text that others had read. marks: positions at which its row is to be copied.
    passed: steps that read others' texts and not its own, since it has a row.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    salt: str = ""
    output: list[int] = field(default_factory=list)
    anew: bool = False
    row: int | None = None
    text: tuple[int, ...] = ()
    keys: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    read: int = 0
    promised: int = 0
    cached: int = 0
    marks: list[int] = field(default_factory=list)
    arrival: int = -1
    passed: int = 0

    @property
    def decodes(self) -> bool:
        """Whether its text is read, and tokens are still to be generated."""
        return self.row is not None and self.read == len(self.text) and self.promised < self.max_tokens

    @property
    def reads(self) -> bool:
        """Whether its text is to be read further."""
        return self.row is not None and self.read < len(self.text)


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `begin` to `end` of a work's text, to be read; `last`: a token is generated behind them.

    tail: slot that takes a copy of the row then, or None.
    """

    work: Work
    begin: int
    end: int
    tail: int | None = None

    @property
    def last(self) -> bool:
        """Whether the text ends with it."""
        return self.end == len(self.work.text)


@dataclass(frozen=True)
class Plan:
    """One step: rows to be made as a tail's slot says, pieces to read one after another, and so many decode
    steps of `decode`, beside a piece or behind them. changed: works that have other pages than before."""

    restored: tuple[tuple[Work, int], ...]
    chunks: tuple[PrefillChunk, ...]
    decode: tuple[Work, ...]
    steps: int
    changed: tuple[Work, ...]


@dataclass(frozen=True)
class Grouping:
    """How pieces are put into programs.

    several: pieces that a program takes at most, of different texts; with `widest` tokens together at most.
    width: of the program that reads so many tokens, padding included.
    """

    several: int
    widest: int
    width: Callable[[int], int]

    def groups(
        self, chunks: Sequence[PrefillChunk], alone: Callable[[PrefillChunk], bool]
    ) -> Iterator[Sequence[PrefillChunk]]:
        """Pieces in their order, those of one program together; `alone`: which share none."""
        while chunks:
            counts = range(min(self.several, len(chunks)), 1, -1)
            fit = (count for count in counts if self._fit(chunks[:count]))
            count = next((count for count in fit if not any(map(alone, chunks[:count]))), 1)
            yield chunks[:count]
            chunks = chunks[count:]

    def _fit(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Whether a program takes these, and one by one they would be padded to as many tokens or more."""
        counts = [chunk.end - chunk.begin for chunk in chunks]
        return sum(counts) <= self.widest <= sum(map(self.width, counts))


class Scheduler:
    """Requests that wait and those that have one of `rows` rows.

    budget: tokens of prompts that a step reads at most. pages: of `page` tokens each, enough for any one
    request. alignment: pieces begin at multiples of it. steps: decode steps of a plan where nobody reads or
    waits; else one. reuse: whether texts share pages. tails: copies of rows that there may be; None where
    pages say all. whole: texts of more tokens than this, of which nothing is there, are read in one piece,
    whatever the budget says.

    Raises:
      ValueError: numbers that cannot be.
    """

    def __init__(
        self,
        rows: int,
        budget: int,
        *,
        pages: int,
        page: int,
        alignment: int = 1,
        steps: int = 1,
        reuse: bool = True,
        tails: int | None = None,
        whole: int | None = None,
    ):
        if rows < 1 or budget < alignment or steps < 1 or pages < 1:
            raise ValueError(
                f"{rows=}, {steps=} and {pages=} must be at least 1, {budget=} at least {alignment=}"
            )
        self.budget, self.alignment, self.steps, self.reuse = budget, alignment, steps, reuse
        self.page, self.pool, self.whole = page, PagePool(pages), whole
        self.tails = None if tails is None else Tails(tails)
        self.waiting: list[Work] = []
        self.running: dict[int, Work] = {}
        self.free = list(range(rows))
        self._changed: dict[Work, None] = {}
        self._clock = itertools.count()

    def add(self, work: Work) -> None:
        """Lets a new request wait."""
        work.arrival = next(self._clock)
        self._wait(work)

    def victim(self) -> Work | None:
        """Who must give row and pages away: the least urgent, of these the last; None where nobody must."""
        if not self.running:
            return None
        last = max(self.running.values(), key=_order)
        if len(self.running) > 1 and self._wanted() > self.pool.available:
            return last
        urgent = self.waiting and self.waiting[0].priority < last.priority
        return last if urgent and not self._has_room(self.waiting[0]) else None

    def preempt(self, work: Work) -> None:
        """Takes the row of a request, which waits again; what it generated is read with its prompt later.

        All steps so far must be done, and `output` must have what they gave.
        """
        self._release(work, keep=work.read if work.reads else len(work.prompt) + len(work.output) - 1)
        self._wait(work)

    def end(self, work: Work, keep: int = 0) -> None:
        """Forgets a request, wherever it is; its pages hold `keep` tokens of its prompt and output."""
        if work.row is not None:
            self._release(work, keep)
        elif work in self.waiting:
            self.waiting.remove(work)

    def plan(self) -> Plan | None:
        """The next step, which counts as done from now on; None where there is nothing to do."""
        self._changed = {}
        restored = tuple(self._admit())
        chunks = tuple(self._chunks())
        begun = {chunk.work for chunk in chunks}  # Their first tokens are not chosen before the step ends.
        able = (work for work in self.running.values() if work.decodes and work not in begun)
        ready = sorted(able, key=_order)
        left = max((work.max_tokens - work.promised for work in ready), default=1)
        steps = 1 if chunks or self.waiting else min(self.steps, left)
        decode = tuple(work for work in ready if self._grow(work, steps))
        if not chunks and not decode:
            return None
        return Plan(restored, chunks, decode, steps, tuple(self._changed))

    def _wait(self, work: Work) -> None:
        work.text = work.prompt + tuple(work.output)
        work.keys = page_keys(work.text, self.page, work.salt, work.keys) if self.reuse else []
        self.waiting.append(work)
        self.waiting.sort(key=_order)

    def _shared(self, work: Work) -> tuple[list[int], list[int]]:
        """Pages that are there of a text, of which one token is left to read; those it can go on from."""
        found = [] if work.anew else self.pool.find(work.keys[: (len(work.text) - 1) // self.page])
        if self.tails is None:
            return found, found
        whole = (count for count in range(len(found), 0, -1) if work.keys[count - 1] in self.tails)
        return found, found[: next(whole, 0)]

    def _has_room(self, work: Work) -> bool:
        """Whether a request can be begun: it has a row, and pages, and those under way have one to grow."""
        shared = self._shared(work)[1]
        taken = self._pages_for(len(work.text)) - len(shared) + self.pool.idle(shared)
        spare = sum(self._growth(other, other.max_tokens) > 0 for other in self.running.values())
        return bool(self.free) and taken + spare <= self.pool.available

    def _admit(self) -> Iterator[tuple[Work, int]]:
        """Begins requests in their order, as long as there is room; gives those that go on from a tail."""
        while self.waiting and self._has_room(self.waiting[0]):
            work = self.waiting.pop(0)
            found, shared = self._shared(work)
            self.pool.hold(shared)
            work.pages = shared + self.pool.take(self._pages_for(len(work.text)) - len(shared))
            work.cached = work.read = len(shared) * self.page
            if self.tails is not None and self.reuse:
                # Where this text ends, and up to where another was the same: that may come again.
                ends = {len(found) * self.page, (len(work.text) - 1) // self.page * self.page}
                work.marks = sorted(end for end in ends if end > work.read)
            work.row, work.promised = self.free.pop(), len(work.output)
            self.running[work.row] = work
            self._changed[work] = None
            if shared and self.tails is not None:
                slot = self.tails.find(work.keys[len(shared) - 1])
                assert slot is not None
                yield work, slot

    def _chunks(self) -> Iterator[PrefillChunk]:
        """Of those that read, the most urgent first, then whoever has least left.

        A step in which it is passed over brings it on as much as one in which it reads. So a text waits for
        shorter ones, which came later, for as many steps as it takes itself, and not longer.
        Each has one piece: those of different rows may be read in one program, and what is left of a text is
        read beside the next tokens of others.
        """

        def missing(work):
            return len(work.text) - work.read - work.passed * self.budget

        def urgency(work):
            return (work.priority, missing(work), work.arrival)

        left = self.budget
        for work in sorted((work for work in self.running.values() if work.reads), key=urgency):
            count = self._next_count(work, left)
            if count > 0:
                left -= count
                yield self._chunk(work, count)
            else:
                work.passed += 1

    def _next_count(self, work: Work, most: int) -> int:
        """Tokens of a text's next piece."""
        if most > 0 and self._at_once(work):
            return len(work.text)
        count = min(most, len(work.text) - work.read)
        if work.marks:
            count = min(count, work.marks[0] - work.read)
        if work.read + count < len(work.text):
            count -= (work.read + count) % self.alignment
        return count

    def _at_once(self, work: Work) -> bool:
        """Whether a text is read in one piece."""
        if self.whole is None or work.read or work.anew or len(work.text) <= self.whole:
            return False
        work.marks = []  # A row could be copied only at its end.
        return True

    def _chunk(self, work: Work, count: int) -> PrefillChunk:
        begin, end = work.read, work.read + count
        work.read = end
        work.promised += end == len(work.text)
        whole = slice(begin // self.page, end // self.page)
        self.pool.name(work.keys[whole], work.pages[whole])
        tail = None
        if work.marks and end == work.marks[0]:
            work.marks.pop(0)
            assert self.tails is not None
            tail = self.tails.put(work.keys[end // self.page - 1])
        return PrefillChunk(work, begin, end, tail)

    def _wanted(self) -> int:
        """Pages that the next step needs beside those of its rows, at most."""
        running = self.running.values()
        steps = 1 if self.waiting or any(work.reads for work in running) else self.steps
        return sum(self._growth(work, steps) for work in running if work.decodes)

    def _growth(self, work: Work, tokens: int) -> int:
        """Pages that a request needs beside its own for so many more tokens."""
        promised = min(work.promised + tokens, work.max_tokens)
        return max(0, self._pages_for(len(work.prompt) + promised - 1) - len(work.pages))

    def _grow(self, work: Work, steps: int) -> bool:
        """Promises tokens, if there are pages for them."""
        if (count := self._growth(work, steps)) > self.pool.available:
            return False
        if count:
            work.pages += self.pool.take(count)
            self._changed[work] = None
        work.promised += steps
        return True

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _release(self, work: Work, keep: int) -> None:
        assert work.row is not None
        if self.reuse:
            text = work.prompt + tuple(work.output)
            keys = page_keys(text, self.page, work.salt, work.keys)[: keep // self.page]
            self.pool.name(keys, work.pages)
        self.pool.let_go(work.pages)
        self.free.append(work.row)
        del self.running[work.row]
        work.row, work.pages, work.read, work.promised, work.marks, work.passed = None, [], 0, 0, [], 0


def _order(work: Work) -> tuple[int, int]:
    return work.priority, work.arrival
