"""Scheduler: which requests prefill or decode in the next step. Pure Python, without arrays.

A running request has a place in the batch and pages of the cache. Its text is prefilled in chunks, then it
decodes. Each step prefills some chunks *and* decodes all sequences that are ready, so neither waits for the
other. Requests wait by priority, then by arrival. A request starts when there are pages for its whole text,
with one to spare for each running request that may still grow.

If pages run out, or a more urgent request waits, the least urgent running request is preempted: it loses its
place and its pages. Later it prefills its prompt again, together with what it had generated. So the most
urgent request always makes progress.

Pages keep their contents until they are allocated again. A text that starts with the same tokens shares them
and prefills only the rest. Some methods also have state outside pages, such as the ring of recent tokens. It
is copied at the end of some pages, and a text can continue only from a page with such a snapshot ("tail").
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from zdc_jax.engine.page_pool import PagePool, Tails, page_keys


@dataclass(eq=False)
class Work:
    """Scheduling state of one request. Only the scheduler changes the attributes after `skips_cache`.

    Attributes:
      prompt: token ids of the prompt.
      max_tokens: most tokens to generate.
      priority: requests with smaller numbers are more urgent.
      salt: pages are shared only between requests with the same salt.
      output: tokens generated so far.
      skips_cache: prefill the whole text, in chunks, without shared pages.
      row: index in the batch; None while the request waits.
      text: tokens to prefill: the prompt, and after a preemption the output so far.
      keys: keys of the whole pages of `text`.
      pages: pages in use, in order of position.
      prefilled: tokens of `text` in the cache once all planned steps are done.
      promised: most tokens generated once all planned steps are done.
      cached: tokens of `text` found in shared pages.
      marks: positions at which to take snapshots, ascending.
      arrival: order of arrival.
      skipped_steps: steps since its start in which only other texts were prefilled.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    salt: str = ""
    output: list[int] = field(default_factory=list)
    skips_cache: bool = False
    row: int | None = None
    text: tuple[int, ...] = ()
    keys: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    prefilled: int = 0
    promised: int = 0
    cached: int = 0
    marks: list[int] = field(default_factory=list)
    arrival: int = -1
    skipped_steps: int = 0

    @property
    def place(self) -> int:
        """Index in the batch of a running request."""
        assert self.row is not None
        return self.row

    @property
    def is_decoding(self) -> bool:
        """Whether the text is prefilled and tokens remain to be generated."""
        return self.row is not None and self.prefilled == len(self.text) and self.promised < self.max_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the text remains to be prefilled."""
        return self.row is not None and self.prefilled < len(self.text)


@dataclass(frozen=True)
class PrefillChunk:
    """Chunk of a text to prefill.

    Attributes:
      work: request that the text belongs to.
      begin: position of the first token.
      end: position after the last token.
      tail: slot for a snapshot, or None.
      mark: tokens of the text that the snapshot holds, at most `end`.
    """

    work: Work
    begin: int
    end: int
    tail: int | None = None
    mark: int = 0

    @property
    def last(self) -> bool:
        """Whether the text ends with this chunk, so that a token is generated after it."""
        return self.end == len(self.work.text)


@dataclass(frozen=True)
class Plan:
    """Plan of one step.

    Attributes:
      restored: requests that continue from a snapshot, with its slot.
      chunks: chunks to prefill, in order.
      decode: requests to decode, together with a chunk or after the chunks.
      steps: decode steps of each request in `decode`.
      changed: requests whose pages changed.
    """

    restored: tuple[tuple[Work, int], ...]
    chunks: tuple[PrefillChunk, ...]
    decode: tuple[Work, ...]
    steps: int
    changed: tuple[Work, ...]


@dataclass(frozen=True)
class Grouping:
    """Rule for combining chunks of different texts into one program.

    Attributes:
      several: most chunks of a program.
      widest: most tokens of a program with several chunks.
      longest: most tokens of each of several chunks.
      width: function from a number of tokens to the padded width of the program that prefills them.
    """

    several: int
    widest: int
    longest: int
    width: Callable[[int], int]

    def groups(
        self, chunks: Sequence[PrefillChunk], alone: Callable[[PrefillChunk], bool]
    ) -> Iterator[Sequence[PrefillChunk]]:
        """Yield the chunks of each program, in order; chunks that are `alone` share no program."""
        while chunks:
            counts = range(min(self.several, len(chunks)), 1, -1)
            fitting = (count for count in counts if self._fit(chunks[:count]))
            count = next((count for count in fitting if not any(map(alone, chunks[:count]))), 1)
            yield chunks[:count]
            chunks = chunks[count:]

    def _fit(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Return whether the chunks fit into one program that pads no more than one program for each."""
        counts = [chunk.end - chunk.begin for chunk in chunks]
        fits = max(counts) <= self.longest and sum(counts) <= self.widest
        return fits and self.widest <= sum(map(self.width, counts))


class Scheduler:
    """Scheduler of waiting and running requests.

    Args:
      rows: size of the batch, the most running requests.
      budget: most prompt tokens of a step.
      alone: most prompt tokens of a step where nothing else runs or waits; default `budget`.
      choose: function from the tokens left of a text, and the most of a chunk, to those of its next chunk.
      pages: number of pages, enough for any single request.
      page: tokens of a page.
      alignment: chunks start at multiples of this.
      steps: decode steps of a plan if nothing is prefilled and no request waits; otherwise 1.
      reuse: share pages between texts.
      tails: number of snapshots; None if sequences have no state outside pages.
      cuts: end chunks where snapshots are taken. Otherwise a chunk has at most one snapshot, anywhere.
      whole: texts with more tokens than this are prefilled in one chunk, regardless of the budget, if none of
        their tokens are cached. None for no such texts.

    Raises:
      ValueError: a number is out of range.
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
        cuts: bool = True,
        alone: int | None = None,
        choose: Callable[[int, int], int] = min,
        whole: int | None = None,
    ):
        if rows < 1 or budget < alignment or steps < 1 or pages < 1:
            raise ValueError(
                f"{rows=}, {steps=} and {pages=} must be at least 1, {budget=} at least {alignment=}"
            )
        self.budget, self.alignment, self.steps, self.reuse = budget, alignment, steps, reuse
        self.page, self.pool, self.whole = page, PagePool(pages), whole
        self.cuts, self.alone, self._choose = cuts, budget if alone is None else alone, choose
        self.tails = None if tails is None else Tails(tails)
        self.waiting: list[Work] = []
        self.running: dict[int, Work] = {}
        self.free = list(range(rows))
        self._changed: dict[Work, None] = {}
        self._restored: list[tuple[Work, int]] = []
        self._clock = itertools.count()

    def add(self, work: Work) -> None:
        """Queue a new request."""
        work.arrival = next(self._clock)
        self._enqueue(work)

    def victim(self) -> Work | None:
        """Return the request to preempt, the least urgent and latest one; None if no one must yield."""
        if not self.running:
            return None
        last = max(self.running.values(), key=_get_urgency)
        if len(self.running) > 1 and self._count_wanted_pages() > self.pool.available:
            return last
        urgent = self.waiting and self.waiting[0].priority < last.priority
        return last if urgent and not self._has_room(self.waiting[0]) else None

    def preempt(self, work: Work) -> None:
        """Stop a running request, free its pages, and queue it again.

        All planned steps must be done, and `work.output` must have their tokens.
        """
        cached = work.prefilled if work.is_prefilling else len(work.prompt) + len(work.output) - 1
        self._release(work, keep=cached)
        self._enqueue(work)

    def go_back(self, work: Work) -> None:
        """Prefill a running request again from `work.output`, which lacks tokens that were generated.

        As in `preempt`, but the request stays among the running ones, however many pages they may need.
        """
        self._release(work, keep=len(work.prompt) + len(work.output) - 1)
        self._set_text(work)
        self._start(work)

    def end(self, work: Work, keep: int = 0) -> None:
        """Remove a waiting or running request; its pages contain `keep` tokens of its prompt and output."""
        if work.row is not None:
            self._release(work, keep)
        elif work in self.waiting:
            self.waiting.remove(work)

    def forget(self, work: Work) -> list[int]:
        """Return the pages that only this running request uses, so that their contents can be cleared.

        No later request finds what the request stored itself, and neither pages that it shares with others.
        """
        own = work.pages[work.cached // self.page :]
        self.pool.forget(own)
        return self.pool.list_unshared(own)

    def plan(self) -> Plan | None:
        """Plan the next step, and count it as done; return None if there is nothing to do."""
        while self.waiting and self._has_room(self.waiting[0]):
            self._start(self.waiting.pop(0))
        chunks = tuple(self._plan_chunks())
        prefilling = {chunk.work for chunk in chunks}  # Their first tokens are known only after the step.
        candidates = (work for work in self.running.values() if work.is_decoding and work not in prefilling)
        ready = sorted(candidates, key=_get_urgency)
        longest = max((work.max_tokens - work.promised for work in ready), default=1)
        steps = 1 if chunks or self.waiting else min(self.steps, longest)
        decode = tuple(work for work in ready if self._promise(work, steps))
        restored, changed = tuple(self._restored), tuple(self._changed)
        self._restored, self._changed = [], {}
        return Plan(restored, chunks, decode, steps, changed) if chunks or decode else None

    def _set_text(self, work: Work) -> None:
        work.text = work.prompt + tuple(work.output)
        work.keys = page_keys(work.text, self.page, work.salt, work.keys) if self.reuse else []

    def _enqueue(self, work: Work) -> None:
        self._set_text(work)
        self.waiting.append(work)
        self.waiting.sort(key=_get_urgency)

    def _find_shared(self, work: Work) -> tuple[list[int], list[int]]:
        """Return the pages stored of a text, and those of them that it can continue from.

        At least one token of the text is left to prefill.
        """
        whole_pages = (len(work.text) - 1) // self.page
        stored = [] if work.skips_cache else self.pool.find(work.keys[:whole_pages])
        if self.tails is None:
            return stored, stored
        resumable = (count for count in range(len(stored), 0, -1) if work.keys[count - 1] in self.tails)
        return stored, stored[: next(resumable, 0)]

    def _has_room(self, work: Work) -> bool:
        """Return whether a request can start.

        It needs a place in the batch and pages for its text, with a page to spare for each running request
        that may grow.
        """
        _, shared = self._find_shared(work)
        needed = self._count_pages(len(work.text)) - len(shared) + self.pool.count_idle(shared)
        spare = sum(self._count_growth(other, other.max_tokens) > 0 for other in self.running.values())
        return bool(self.free) and needed + spare <= self.pool.available

    def _start(self, work: Work) -> None:
        """Give a request a place in the batch and pages for its text; note the snapshot that it continues."""
        stored, shared = self._find_shared(work)
        self.pool.retain(shared)
        work.pages = shared + self.pool.allocate(self._count_pages(len(work.text)) - len(shared))
        work.cached = work.prefilled = len(shared) * self.page
        if self.tails is not None and self.reuse:
            # Later texts may share all of this one, or the prefix that it shares with an earlier one.
            ends = {len(stored) * self.page, (len(work.text) - 1) // self.page * self.page}
            work.marks = sorted(end for end in ends if end > work.prefilled)
        # Low indices first: programs for few sequences serve the first ones.
        work.row, work.promised = heapq.heappop(self.free), len(work.output)
        self.running[work.row] = work
        self._changed[work] = None
        if shared and self.tails is not None:
            slot = self.tails.find(work.keys[len(shared) - 1])
            assert slot is not None
            self._restored.append((work, slot))

    def _plan_chunks(self) -> Iterator[PrefillChunk]:
        """Yield at most one chunk of each text, the most urgent first, then the one with least left.

        A skipped step counts as progress. So a text waits for shorter, later ones at most as many steps as
        its own prefill takes.

        One chunk of each text is enough: chunks of different sequences may share a program, and the rest of a
        text is prefilled together with the next tokens of others.

        A text waits for the next step if the tokens that are left would cut a small chunk from it. That chunk
        would take a program of its own, whose start and weights cost more than its tokens.
        """

        def get_order(work: Work) -> tuple[int, int, int]:
            remaining = len(work.text) - work.prefilled - work.skipped_steps * self.budget
            return work.priority, remaining, work.arrival

        budget = left = self.budget if self.waiting or len(self.running) > 1 else self.alone
        for work in sorted((work for work in self.running.values() if work.is_prefilling), key=get_order):
            count = self._choose_chunk_size(work, left)
            is_scrap = 2 * count < budget and count < self._choose_chunk_size(work, budget)
            if count > 0 and not is_scrap:
                left -= count
                yield self._make_chunk(work, count)
            else:
                work.skipped_steps += 1

    def _choose_chunk_size(self, work: Work, most: int) -> int:
        """Return the tokens of a text's next chunk, 0 for none."""
        if most > 0 and self._prefill_whole(work):
            return len(work.text)
        # Scores of a prompt's tokens need much memory, so that such chunks stay short.
        most = min(most, self.budget) if work.skips_cache else most
        count = self._choose(len(work.text) - work.prefilled, most) if most > 0 else 0
        inside = [mark for mark in work.marks if mark <= work.prefilled + count]
        if len(inside) > (0 if self.cuts else 1):
            count = inside[0] - work.prefilled
        if work.prefilled + count < len(work.text):
            count -= (work.prefilled + count) % self.alignment
        return count

    def _prefill_whole(self, work: Work) -> bool:
        """Decide whether a text is prefilled in one chunk; if so, drop its marks."""
        if self.whole is None or work.prefilled or work.skips_cache or len(work.text) <= self.whole:
            return False
        work.marks = []  # A snapshot could be taken only at the end of the text.
        return True

    def _make_chunk(self, work: Work, count: int) -> PrefillChunk:
        begin, end = work.prefilled, work.prefilled + count
        work.prefilled = end
        work.promised += end == len(work.text)
        whole_pages = slice(begin // self.page, end // self.page)
        self.pool.register(work.keys[whole_pages], work.pages[whole_pages])
        if not work.marks or end < work.marks[0]:
            return PrefillChunk(work, begin, end)
        assert self.tails is not None
        mark = work.marks.pop(0)
        return PrefillChunk(work, begin, end, self.tails.put(work.keys[mark // self.page - 1]), mark)

    def _count_wanted_pages(self) -> int:
        """Return the most new pages that the next step needs for running requests."""
        running = self.running.values()
        steps = 1 if self.waiting or any(work.is_prefilling for work in running) else self.steps
        return sum(self._count_growth(work, steps) for work in running if work.is_decoding)

    def _count_growth(self, work: Work, tokens: int) -> int:
        """Return the new pages that a request needs to generate `tokens` more tokens."""
        promised = min(work.promised + tokens, work.max_tokens)
        return max(0, self._count_pages(len(work.prompt) + promised - 1) - len(work.pages))

    def _promise(self, work: Work, steps: int) -> bool:
        """Allocate pages for `steps` tokens and promise the tokens; return whether there were pages."""
        if (count := self._count_growth(work, steps)) > self.pool.available:
            return False
        if count:
            work.pages += self.pool.allocate(count)
            self._changed[work] = None
        work.promised += steps
        return True

    def _count_pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _release(self, work: Work, keep: int) -> None:
        if self.reuse:
            text = work.prompt + tuple(work.output)
            keys = page_keys(text, self.page, work.salt, work.keys)[: keep // self.page]
            self.pool.register(keys, work.pages)
        self.pool.release(work.pages)
        heapq.heappush(self.free, work.place)
        del self.running[work.place]
        self._changed.pop(work, None)
        self._restored = [pair for pair in self._restored if pair[0] is not work]
        work.row, work.pages, work.marks = None, [], []
        work.prefilled, work.promised, work.skipped_steps = 0, 0, 0


def _get_urgency(work: Work) -> tuple[int, int]:
    """Return a sort key, smaller for more urgent requests."""
    return work.priority, work.arrival
