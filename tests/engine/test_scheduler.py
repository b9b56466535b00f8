"""The scheduler alone: each token of each request is read once and in order, whatever requests come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.engine.page_pool import PagePool, Tails, page_keys
from zdc_jax.engine.scheduler import Grouping, Plan, PrefillChunk, Scheduler, Work

PAGE = 4


class Device:
    """A fake device: contents of pages, and the tokens in each row's ring.

    A row continues only from the end of its ring.
    """

    def __init__(self, pages: int, page: int, rows: int, rings: bool):
        self.page, self.rings = page, rings
        self.pages = [[None] * page for _ in range(pages)]
        self.ring: list[tuple | None] = [None] * rows
        self.tails: dict[int, tuple | None] = {}

    def write(self, work: Work, begin: int, tokens) -> None:
        for position, token in enumerate(tokens, begin):
            self.pages[work.pages[position // self.page]][position % self.page] = token

    def held(self, work: Work, count: int) -> tuple:
        return tuple(self.pages[work.pages[i // self.page]][i % self.page] for i in range(count))

    def run(self, plan: Plan, budget: int, alignment: int) -> list[tuple[Work, int]]:
        """Execute a step and return each work that got tokens, and how many."""
        sizes = [chunk.end - chunk.begin for chunk in plan.chunks]
        assert sum(sizes) <= budget or (sizes == [sizes[0]] and not plan.decode)
        for work, slot in plan.restored:
            self.ring[work.row] = self.tails[slot]
            assert self.tails[slot] == work.text[: work.cached]
        made = []
        for chunk in plan.chunks:
            made += self._read(chunk, alignment)
        for work in plan.decode:
            text = work.prompt + tuple(work.output)
            there = len(text) - 1
            assert all(work is not one for one, _ in made), "its first token is not sampled yet"
            assert self.held(work, there) == text[:there]
            assert not self.rings or self.ring[work.row] == text[:there]
            steps = min(plan.steps, work.max_tokens - len(work.output))
            self.write(work, there, [-1] * min(plan.steps, max(steps, 0)))
            made.append((work, plan.steps))
        return made

    def _read(self, chunk: PrefillChunk, alignment: int) -> list[tuple[Work, int]]:
        work = chunk.work
        assert chunk.begin < chunk.end <= len(work.text)
        assert chunk.begin % alignment == 0
        assert self.held(work, chunk.begin) == work.text[: chunk.begin], "earlier tokens are cached"
        assert not (self.rings and chunk.begin) or self.ring[work.row] == work.text[: chunk.begin]
        self.write(work, chunk.begin, work.text[chunk.begin : chunk.end])
        self.ring[work.row] = work.text[: chunk.end]
        if chunk.tail is not None:
            assert chunk.mark % self.page == 0
            assert chunk.begin < chunk.mark <= chunk.end
            self.tails[chunk.tail] = work.text[: chunk.mark]
        return [(work, 1)] if chunk.last else []

    def learn(self, work: Work) -> None:
        """Record the decoded tokens; the newest token is not in the cache yet."""
        text = (work.prompt + tuple(work.output))[:-1]
        begin = len(work.text)
        self.write(work, begin, text[begin:])
        self.ring[work.row] = text


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 40),  # Tokens of the prompt,
        st.integers(1, 9),  # to generate,
        st.integers(0, 2),  # priority,
        st.integers(0, 6),  # the step before which the request comes,
        st.integers(-1, 12),  # the step before which it is cancelled, if it still runs,
        st.integers(-1, 20),  # and the step before which it goes back by up to two tokens.
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=300)
@given(
    requests=REQUESTS,
    rows=st.integers(1, 4),
    budget=st.integers(4, 24),
    alignment=st.sampled_from([1, 4]),
    steps=st.integers(1, 4),
    pages=st.integers(13, 40),
    tails=st.sampled_from([None, 0, 1, 3]),
    cuts=st.booleans(),
    alone=st.sampled_from([None, 32]),
)
def test_all_requests_end_and_every_token_is_read_once_in_order(
    requests, rows, budget, alignment, steps, pages, tails, cuts, alone
):
    reuse = alignment == 1
    options = {"pages": pages, "page": PAGE, "alignment": alignment, "steps": steps, "reuse": reuse}
    scheduler = Scheduler(rows, budget, **options, tails=tails, cuts=cuts, alone=alone)
    device, works = Device(pages, PAGE, rows, rings=tails is not None), []
    for index, (length, tokens, priority, *_) in enumerate(requests):
        # Prompts are few, so that some continue others.
        works.append(Work(tuple(range(length)), tokens, priority, salt=str(index % 2)))
    ended, step = set(), 0
    while len(ended) < len(works):
        assert step < 900, "a request starves"
        for index, (work, (*_, begins, cancelled, back)) in enumerate(zip(works, requests, strict=True)):
            if back == step and reuse and work.row is not None and not work.is_prefilling:
                work.output[:] = work.output[: max(len(work.output) - 2, 1)]
                scheduler.go_back(work)
                assert work.is_prefilling, "it need not wait for pages"
            if begins == step:
                scheduler.add(work)
            if begins <= step == cancelled and index not in ended:
                scheduler.end(work)
                ended.add(index)
        while (victim := scheduler.victim()) is not None:
            assert len(scheduler.running) > 1 or victim.priority > scheduler.waiting[0].priority
            scheduler.preempt(victim)
        plan = scheduler.plan()
        held = [work.row for work in works if work.row is not None]
        assert sorted([*held, *scheduler.free]) == list(range(rows)), "no row is lost"
        using = {page for work in works for page in work.pages}
        assert scheduler.pool.available == pages - len(using), "no page is lost"
        for work, count in device.run(plan, budget, alignment) if plan else []:
            new = min(count, work.max_tokens - len(work.output))
            work.output += [100 + len(work.output) + i for i in range(new)]
        for work in list(scheduler.running.values()):
            if not work.is_prefilling and work.output:
                device.learn(work)
            if len(work.output) == work.max_tokens:
                scheduler.end(work, keep=len(work.prompt) + len(work.output) - 1)
                ended.add(works.index(work))
        step += 1
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pool.available == pages
    for work, (*_, begins, cancelled, _) in zip(works, requests, strict=True):
        assert cancelled >= begins or len(work.output) == work.max_tokens


def scheduler_of(rows: int, budget: int, pages: int = 64, **options) -> Scheduler:
    return Scheduler(rows, budget, pages=pages, page=PAGE, **options)


def test_a_step_has_one_piece_of_a_text():
    # A text that stops at a mark continues in the next step, and other texts get its room.
    scheduler = scheduler_of(3, 16, tails=4)
    marked, other = Work(tuple(range(10)), 1), Work(tuple(range(20, 40)), 1)
    for work in (marked, other):
        scheduler.add(work)
    assert [lengths(scheduler.plan()) for _ in range(3)] == [
        [(0, 8), (0, 8)],
        [(8, 10), (8, 16)],
        [(16, 20)],
    ]


def lengths(plan: Plan) -> list[tuple[int, int]]:
    return [(chunk.begin, chunk.end) for chunk in plan.chunks]


def test_requests_take_the_lowest_free_index():
    # Programs for few sequences serve the first of the batch.
    scheduler = scheduler_of(3, 16)
    first, second, third = (Work((1, 2, 3), 5, salt=str(i)) for i in range(3))
    for work in (first, second):
        scheduler.add(work)
    scheduler.plan()
    assert (first.row, second.row) == (0, 1)
    scheduler.end(first)
    scheduler.add(third)
    scheduler.plan()
    assert third.row == 0


def test_a_short_prompt_does_not_wait_for_a_long_one():
    scheduler = scheduler_of(2, 8)
    long, short = Work(tuple(range(100)), 1), Work((1, 2, 3), 1)
    scheduler.add(long)
    assert lengths(scheduler.plan()) == [(0, 8)]
    scheduler.add(short)
    chunks = scheduler.plan().chunks
    assert [(chunk.work is short, chunk.end - chunk.begin) for chunk in chunks] == [(True, 3), (False, 5)]


def test_no_small_chunk_is_cut_from_a_text():
    # Such a chunk would take a program of its own.
    scheduler = scheduler_of(5, 8)
    for work in (Work(tuple(range(i, i + length)), 1, salt=f"{i}") for i, length in enumerate((6, 7, 20))):
        scheduler.add(work)
    plans = [lengths(scheduler.plan()) for _ in range(5)]
    assert plans == [[(0, 6)], [(0, 7)], [(0, 8)], [(8, 16)], [(16, 20)]]
    works = [Work(tuple(range(length)), 1, salt=f"{length}") for length in (4, 11)]
    for work in works:
        scheduler.add(work)
    assert lengths(scheduler.plan()) == [(0, 4), (0, 4)]


def test_a_long_prompt_gets_on_however_many_short_ones_come():
    scheduler = scheduler_of(3, 8)
    long = Work(tuple(range(40)), 1)
    scheduler.add(long)
    short: list[Work] = []
    for _ in range(40):
        for work in short:
            if work.row is not None and not work.is_prefilling:
                scheduler.end(work)
        short += [Work(tuple(range(8)), 1) for _ in range(2)]
        for work in short[-2:]:
            scheduler.add(work)
        scheduler.plan()
    assert not long.is_prefilling


def test_prompts_that_come_together_end_one_after_another():
    # With round-robin, all prompts would end at the last step.
    scheduler = scheduler_of(4, 8)
    works = [Work(tuple(range(32)), 1) for _ in range(4)]
    for work in works:
        scheduler.add(work)
    steps = []
    for step in range(1, 17):
        before = [work.is_prefilling for work in works]
        scheduler.plan()
        steps += [
            step
            for work, read in zip(works, before, strict=True)
            if (read or step == 1) and not work.is_prefilling
        ]
    assert steps == [4, 8, 12, 16]


@pytest.mark.parametrize("length", [16, 40, 96])
def test_a_text_waits_for_later_ones_at_most_as_long_as_it_takes_itself(length):
    scheduler = scheduler_of(64, 8)
    long = Work(tuple(range(length)), 1)
    scheduler.add(long)
    steps = 0
    while steps == 0 or long.is_prefilling:
        scheduler.add(Work(tuple(range(8)), 1))
        scheduler.plan()
        steps += 1
    assert length // 8 < steps <= 2 * length // 8


def test_rows_decode_while_a_prompt_is_read():
    scheduler = scheduler_of(2, 8, steps=4)
    first = Work((1, 2), 100)
    scheduler.add(first)
    assert not scheduler.plan().decode, "its first token is sampled after its last chunk"
    plan = scheduler.plan()
    assert (plan.decode, plan.steps) == ((first,), 4), "no request waits"
    scheduler.add(Work(tuple(range(50)), 1))
    for _ in range(6):
        plan = scheduler.plan()
        assert plan.chunks
        assert (plan.decode, plan.steps) == ((first,), 1)


def test_no_call_has_more_steps_than_any_row_has_tokens_left():
    scheduler = scheduler_of(2, 8, steps=4)
    for tokens in (4, 7):
        scheduler.add(Work((1, 2), tokens))
    scheduler.plan()
    assert [(plan.steps, len(plan.decode)) for plan in iter(scheduler.plan, None)] == [(4, 2), (2, 1)]


def after(scheduler: Scheduler, prompt: tuple[int, ...], output: list[int], salt: str = "") -> Work:
    """Serve a request to its end."""
    work = Work(prompt, len(output), salt=salt)
    scheduler.add(work)
    while work.row is None or work.is_prefilling:
        scheduler.plan()
    work.output += output
    scheduler.end(work, keep=len(prompt) + len(output) - 1)
    return work


def test_a_prompt_that_begins_alike_reads_the_rest_alone():
    scheduler = scheduler_of(2, 16)
    after(scheduler, tuple(range(10)), [20, 21, 22])
    for prompt, cached in [
        (tuple(range(10)), 8),  # Two whole pages;
        ((*range(10), 20, 21, 30), 12),  # a third with what was generated;
        (tuple(range(8)), 4),  # if all is cached, one page is read again, because a token must be;
        ((*range(6), 30, 31, 32), 4),
    ]:
        work = Work(prompt, 1)
        scheduler.add(work)
        assert lengths(scheduler.plan()) == [(cached, len(prompt))]
        assert work.cached == cached
        scheduler.end(work)
    other = Work(tuple(range(10)), 1, salt="another")
    scheduler.add(other)
    assert lengths(scheduler.plan()) == [(0, 10)]


def test_two_that_run_share_pages():
    scheduler = scheduler_of(2, 16)
    first, second = Work(tuple(range(10)), 1), Work((*range(9), 30), 1)
    scheduler.add(first)
    scheduler.plan()
    scheduler.add(second)
    scheduler.plan()
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    scheduler.end(first)
    assert scheduler.pool.available == 64 - 3


def test_with_rings_a_text_goes_on_where_one_was_kept():
    scheduler = scheduler_of(2, 64, tails=4)
    after(scheduler, (*range(10), 30), [1])
    second, third, fourth = (Work((*range(5), i, *range(5, 12)), 1) for i in (40, 41, 42))
    scheduler.add(second)
    plans = [scheduler.plan() for _ in range(3)]
    assert not any(plan.restored for plan in plans)
    # Its first page equals an earlier one; that page and the last are copied.
    assert [lengths(plan) for plan in plans] == [[(0, 4)], [(4, 12)], [(12, 13)]]
    assert [plan.chunks[0].tail is not None for plan in plans] == [True, True, False]
    scheduler.end(second)
    scheduler.add(third)
    plan = scheduler.plan()
    assert plan.restored == ((third, 2),)
    assert lengths(plan) == [(4, 12)]
    assert fourth.row is None


def test_the_last_gives_its_pages_away_where_they_run_out():
    scheduler = scheduler_of(2, 16, pages=5)
    first, second = Work(tuple(range(7)), 12), Work(tuple(range(20, 27)), 12)
    for work in (first, second):
        scheduler.add(work)
        scheduler.plan()
    for _ in range(30):
        if scheduler.victim():
            break
        for work in scheduler.plan().decode:
            work.output = [1] * work.promised
    assert scheduler.victim() is second
    scheduler.preempt(second)
    assert scheduler.victim() is None
    assert first in scheduler.plan().decode


def test_a_request_is_begun_when_its_whole_text_has_room():
    scheduler = scheduler_of(2, 16, pages=8)
    first, second = Work(tuple(range(16)), 8), Work(tuple(range(50, 63)), 1)
    for work in (first, second):
        scheduler.add(work)
    scheduler.plan()
    assert (first.row is None, second.row is None) == (False, True), "the first one may grow"
    scheduler.end(first)
    scheduler.plan()
    assert second.row is not None


def test_long_texts_of_which_nothing_is_there_are_read_at_once():
    scheduler = scheduler_of(3, 8, whole=8)
    long, short = Work(tuple(range(30)), 2), Work((50, 51), 1)
    for work in (short, long):
        scheduler.add(work)
    assert lengths(scheduler.plan()) == [(0, 2), (0, 30)]
    scheduler.end(long)
    following = Work((*range(16), 50, *range(12)), 1)
    scheduler.add(following)
    assert lengths(scheduler.plan()) == [(16, 24)], "the rest of a text comes in chunks"


def test_keys_are_of_all_that_is_before():
    one, other = page_keys(range(12), 4, ""), page_keys([0, 1, 2, 9, *range(4, 12)], 4, "")
    assert len(one) == 3
    assert not {*one} & {*other}
    assert not {*one} & {*page_keys(range(12), 4, "salt")}
    assert page_keys(range(15), 4, "", one[:2]) == one


def test_pages_that_were_longest_unused_go_first():
    pool = PagePool(4)
    one, other = pool.allocate(2), pool.allocate(1)
    pool.register([b"a", b"b"], one)
    pool.register([b"c"], other)
    pool.release(other)
    pool.release(one)
    assert pool.allocate(1) == [3], "one that holds nothing"
    assert pool.allocate(1) == other
    assert pool.find([b"a", b"b"]) == one
    pool.allocate(1)
    assert pool.find([b"a", b"b"]) == one[:1], "ends of texts are evicted before their beginnings"


def test_tails_that_were_longest_unused_go_first():
    tails = Tails(2)
    slots = tails.put(b"a"), tails.put(b"b")
    assert tails.find(b"a") == slots[0]
    assert tails.put(b"c") == slots[1]
    assert tails.put(b"a") is None
    assert b"b" not in tails
    assert Tails(0).put(b"a") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rows": 0}, "rows=0"), ({"pages": 0}, "pages=0"), ({"alignment": 16}, "at least alignment=16")],
)
def test_numbers_that_cannot_be(change, message):
    given = {"rows": 1, "budget": 8, "pages": 4, "page": 4} | change
    with pytest.raises(ValueError, match=message):
        Scheduler(given.pop("rows"), given.pop("budget"), **given)


@given(
    st.lists(st.integers(1, 70), max_size=8),
    st.integers(1, 3),
    st.sampled_from([32, 64, 128]),
    st.sampled_from([32, 128]),
    st.sets(st.integers(0, 7)),
)
def test_groups_hold_all_pieces_in_order_and_pad_no_more_than_one_by_one(
    counts, several, widest, longest, alone
):
    chunks = [PrefillChunk(Work((), 1), 0, min(count, widest)) for count in counts]
    grouping = Grouping(several, widest, longest, lambda tokens: max(32, 1 << (tokens - 1).bit_length()))

    def tokens(group):
        return [chunk.end for chunk in group]

    def padded(group):
        return sum(map(grouping.width, tokens(group)))

    are_alone = [chunk for place, chunk in enumerate(chunks) if place in alone]
    groups = list(grouping.groups(chunks, lambda chunk: chunk in are_alone))
    assert [chunk for group in groups for chunk in group] == chunks
    for group in groups:
        assert len(group) <= several
        if len(group) > 1:
            assert not any(chunk in are_alone for chunk in group)
            assert max(tokens(group)) <= longest
            assert sum(tokens(group)) <= widest <= padded(group)
