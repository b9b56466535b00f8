"""Which request reads or writes tokens in the next step. Pure Python: nothing here knows of arrays.

A model's cache has a fixed number of rows. A request that is under way has one of them; its text is read in
pieces, and then it decodes. Each step reads some tokens of prompts *and* decodes all rows that are ready, so
that neither waits for the other. Requests wait by priority, then in the order in which they came. One that is
more urgent than a request under way takes that one's row; the other reads its text anew later, with what it
had generated.

A row that is free keeps what it holds until another request needs it. A request whose prompt goes on from
there takes it over and reads the rest alone.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class Work:
    """One request on its way. The scheduler alone changes what is below `output`.

    prompt: token ids. max_tokens: to be generated. salt: rows are taken over only from requests of the same.
    output: tokens generated so far. row: of the cache, None while it waits. text: what is to be read in its
    row. read: tokens of the text that are in the row, or will be once all steps so far are done. promised:
    tokens that these steps generate at most. cached: tokens of the text that its row held before.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    salt: str = ""
    output: list[int] = field(default_factory=list)
    row: int | None = None
    text: tuple[int, ...] = ()
    read: int = 0
    promised: int = 0
    cached: int = 0
    arrival: int = -1
    served: int = -1

    @property
    def decodes(self) -> bool:
        """Whether its text is read, and tokens are still to be generated."""
        return self.row is not None and self.read == len(self.text) and self.promised < self.max_tokens

    @property
    def reads(self) -> bool:
        """Whether its text is to be read further."""
        return self.row is not None and self.read < len(self.text)


@dataclass(frozen=True)
class Piece:
    """Tokens `begin` to `end` of a work's text, to be read; `last`: a token is generated behind them."""

    work: Work
    begin: int
    end: int

    @property
    def last(self) -> bool:
        """Whether the text ends with it."""
        return self.end == len(self.work.text)


@dataclass(frozen=True)
class Plan:
    """One step: pieces to read one after another, then so many decode steps of `decode`."""

    pieces: tuple[Piece, ...]
    decode: tuple[Work, ...]
    steps: int


@dataclass
class _Held:
    """What a free row holds: tokens, for requests of one salt; since: when it became free."""

    tokens: tuple[int, ...] = ()
    salt: str = ""
    since: int = -1


class Scheduler:
    """Requests that wait and those that have one of `rows` rows.

    budget: tokens of prompts that a step reads at most. alignment: pieces begin at multiples of it. steps:
    decode steps of a plan where nobody reads or waits; else one. reuse: whether free rows are taken over.
    """

    def __init__(self, rows: int, budget: int, *, alignment: int = 1, steps: int = 1, reuse: bool = True):
        if rows < 1 or budget < alignment or steps < 1:
            raise ValueError(f"{rows=} and {steps=} must be at least 1, {budget=} at least {alignment=}")
        self.budget, self.alignment, self.steps, self.reuse = budget, alignment, steps, reuse
        self.waiting: list[Work] = []
        self.running: dict[int, Work] = {}
        self.free = {row: _Held() for row in range(rows)}
        self._clock = itertools.count()
        self._planned = self._planned_before = -1

    def add(self, work: Work) -> None:
        """Lets a new request wait."""
        work.arrival = next(self._clock)
        self._wait(work)

    def victim(self) -> Work | None:
        """Who must give its row to a more urgent request that waits: the least urgent, of these the last."""
        if self.free or not self.waiting:
            return None
        last = max(self.running.values(), key=_order)
        return last if last.priority > self.waiting[0].priority else None

    def preempt(self, work: Work) -> None:
        """Takes the row of a request, which waits again; what it generated is read with its prompt later."""
        self._release(work, keep=0)
        self._wait(work)

    def end(self, work: Work, keep: int = 0) -> None:
        """Forgets a request, wherever it is; its row holds `keep` tokens of its prompt and output."""
        if work.row is not None:
            self._release(work, keep)
        elif work in self.waiting:
            self.waiting.remove(work)

    def plan(self) -> Plan | None:
        """The next step, which counts as done from now on; None where there is nothing to do."""
        self._planned_before, self._planned = self._planned, next(self._clock)
        self._admit()
        pieces = tuple(self._pieces())
        decode = tuple(work for work in self.running.values() if work.decodes)
        if not pieces and not decode:
            return None
        busy = bool(pieces or self.waiting)
        steps = 1 if busy else self.steps
        for work in decode:
            work.promised += steps
        return Plan(pieces, decode, steps)

    def _wait(self, work: Work) -> None:
        self.waiting.append(work)
        self.waiting.sort(key=_order)

    def _admit(self) -> None:
        """Gives free rows to those that wait, in their order."""
        while self.waiting and self.free:
            work = self.waiting.pop(0)
            work.text = work.prompt + tuple(work.output)
            row = self._row_for(work)
            held = self.free.pop(row)
            work.cached = work.read = len(held.tokens) if self._goes_on(work, held) else 0
            work.row, work.promised = row, len(work.output)
            # Before those that read in the last step, behind those that were passed over in it.
            work.served = self._planned_before
            self.running[row] = work

    def _row_for(self, work: Work) -> int:
        """The row that holds most of the text; else an empty one, or the one that was free longest."""
        fits = [row for row, held in self.free.items() if self._goes_on(work, held)]
        if fits:
            return max(fits, key=lambda row: len(self.free[row].tokens))
        return min(self.free, key=lambda row: (bool(self.free[row].tokens), self.free[row].since, row))

    def _goes_on(self, work: Work, held: _Held) -> bool:
        """Whether the text begins with all that a free row holds, and has more. Only then is the row what
        reading its tokens alone gives: of earlier ones it may have forgotten some."""
        count = len(held.tokens)
        return (
            self.reuse
            and 0 < count < len(work.text)
            and held.salt == work.salt
            and work.text[:count] == held.tokens
        )

    def _pieces(self) -> Iterator[Piece]:
        """Of those that read, the most urgent first, then whoever was served longest ago."""
        left = self.budget
        order = sorted(
            (work for work in self.running.values() if work.reads),
            key=lambda work: (work.priority, work.served, work.arrival),
        )
        for work in order:
            count = min(left, len(work.text) - work.read)
            if work.read + count < len(work.text):
                count -= (work.read + count) % self.alignment
            if count <= 0:
                return
            piece = Piece(work, work.read, work.read + count)
            work.read, work.served = piece.end, next(self._clock)
            work.promised += piece.last
            left -= count
            yield piece

    def _release(self, work: Work, keep: int) -> None:
        assert work.row is not None
        held = (work.prompt + tuple(work.output))[:keep]
        self.free[work.row] = _Held(held, work.salt, next(self._clock))
        del self.running[work.row]
        work.row, work.read, work.promised = None, 0, 0


def _order(work: Work) -> tuple[int, int]:
    return work.priority, work.arrival
