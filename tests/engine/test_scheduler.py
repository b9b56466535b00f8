"""The scheduler by itself: whatever comes, every token of every request is read once and in its order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.engine.scheduler import Piece, Plan, Scheduler, Work


class Device:
    """Rows as a cache would hold them: appends, and forgets nothing that it was not told to."""

    def __init__(self, rows: int):
        self.rows: list[list[int]] = [[] for _ in range(rows)]

    def run(self, plan: Plan, budget: int, alignment: int) -> list[tuple[Work, int]]:
        """Does a step; gives the works that got tokens, and how many."""
        assert sum(piece.end - piece.begin for piece in plan.pieces) <= budget
        seen = [piece.work for piece in plan.pieces]
        assert len(set(map(id, seen))) == len(seen)
        made = []
        for piece in plan.pieces:
            made += self._read(piece, alignment)
        for work in plan.decode:
            known = work.prompt + tuple(work.output)
            assert self.rows[work.row] == list(known if work in seen else known[:-1])
            self.rows[work.row] += [-1] * plan.steps
            made.append((work, plan.steps))
        return made

    def _read(self, piece: Piece, alignment: int) -> list[tuple[Work, int]]:
        work, row = piece.work, self.rows[piece.work.row]
        assert piece.begin < piece.end <= len(work.text)
        assert piece.begin % alignment == 0
        if piece.begin == 0:
            row.clear()
        assert row == list(work.text[: piece.begin]), "a row holds what was read, and nothing else"
        row += work.text[piece.begin : piece.end]
        return [(work, 1)] if piece.last else []


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 40),  # Tokens of the prompt,
        st.integers(1, 9),  # to generate,
        st.integers(0, 2),  # priority,
        st.integers(0, 6),  # the step before which it comes,
        st.integers(-1, 12),  # and before which it is cancelled, if it still runs.
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=150)
@given(
    requests=REQUESTS,
    rows=st.integers(1, 4),
    budget=st.integers(4, 24),
    alignment=st.sampled_from([1, 4]),
    steps=st.integers(1, 4),
)
def test_all_requests_end_and_every_token_is_read_once_in_order(requests, rows, budget, alignment, steps):
    scheduler = Scheduler(rows, budget, alignment=alignment, steps=steps, reuse=alignment == 1)
    device, works = Device(rows), []
    for index, (length, tokens, priority, _, _) in enumerate(requests):
        # Few different prompts, so that some go on from others.
        works.append(Work(tuple(range(length)), tokens, priority, salt=str(index % 2)))
    ended, step = set(), 0
    while len(ended) < len(works):
        assert step < 500, "a request starves"
        for index, (work, (*_, begins, cancelled)) in enumerate(zip(works, requests, strict=True)):
            if begins == step:
                scheduler.add(work)
            if begins <= step == cancelled and index not in ended:
                scheduler.end(work)
                ended.add(index)
        while (victim := scheduler.victim()) is not None:
            assert victim.priority > min(work.priority for work in scheduler.waiting)
            scheduler.preempt(victim)
        plan = scheduler.plan()
        held = [work.row for work in works if work.row is not None]
        assert len(set(held)) == len(held)
        assert sorted([*held, *scheduler.free]) == list(range(rows)), "no row is lost"
        for work, count in device.run(plan, budget, alignment) if plan else []:
            new = min(count, work.max_tokens - len(work.output))
            work.output += [100 + len(work.output) + i for i in range(new)]
            row = device.rows[work.row]
            # What was decoded is known now; the newest token is not in the row yet.
            row[:] = list(work.prompt + tuple(work.output))[:-1]
            if len(work.output) == work.max_tokens:
                scheduler.end(work, keep=len(row))
                ended.add(works.index(work))
        step += 1
    assert not scheduler.running
    assert not scheduler.waiting
    for work, (*_, begins, cancelled) in zip(works, requests, strict=True):
        assert cancelled >= begins or len(work.output) == work.max_tokens


def lengths(plan: Plan) -> list[tuple[int, int]]:
    return [(piece.begin, piece.end) for piece in plan.pieces]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    scheduler = Scheduler(2, 8)
    long, short = Work(tuple(range(100)), 1), Work((1, 2, 3), 1)
    scheduler.add(long)
    assert lengths(scheduler.plan()) == [(0, 8)]
    scheduler.add(short)
    pieces = scheduler.plan().pieces
    assert [(piece.work is short, piece.end - piece.begin) for piece in pieces] == [(True, 3), (False, 5)]


def test_a_long_prompt_gets_on_however_many_short_ones_come():
    scheduler = Scheduler(3, 8)
    long = Work(tuple(range(40)), 1)
    scheduler.add(long)
    short: list[Work] = []
    for _ in range(40):
        for work in short:
            if work.row is not None and not work.reads:
                scheduler.end(work)
        short += [Work(tuple(range(8)), 1) for _ in range(2)]
        for work in short[-2:]:
            scheduler.add(work)
        scheduler.plan()
    assert not long.reads


def test_an_empty_row_is_taken_before_one_that_holds_a_conversation():
    scheduler = Scheduler(2, 8)
    first, second = Work((1, 2, 3), 2), Work((4, 5), 2)
    for work in (first, second):
        scheduler.add(work)
    scheduler.plan()
    kept = first.row
    first.output += [4, 5]
    scheduler.end(first, keep=4)
    scheduler.end(second)
    scheduler.add(Work((7, 8), 1))
    scheduler.plan()
    assert scheduler.free[kept].tokens == (1, 2, 3, 4)


def test_rows_decode_while_a_prompt_is_read():
    scheduler = Scheduler(2, 8, steps=4)
    first = Work((1, 2), 100)
    scheduler.add(first)
    plan = scheduler.plan()
    assert (plan.decode, plan.steps) == ((first,), 1)
    assert scheduler.plan().steps == 4, "nobody waits"
    scheduler.add(Work(tuple(range(50)), 1))
    for _ in range(6):
        plan = scheduler.plan()
        assert plan.pieces
        assert (plan.decode, plan.steps) == ((first,), 1)


def test_a_row_is_taken_over_where_a_prompt_goes_on():
    scheduler = Scheduler(2, 8)
    first = Work((1, 2, 3), 2)
    scheduler.add(first)
    scheduler.plan()
    row = first.row
    first.output += [4, 5]
    scheduler.end(first, keep=4)
    following = Work((1, 2, 3, 4, 5, 6), 1)
    scheduler.add(following)
    assert lengths(scheduler.plan()) == [(4, 6)]
    assert (following.row, following.cached) == (row, 4)


@pytest.mark.parametrize("prompt", [(1, 2, 3, 4), (1, 2, 9, 4, 5)])
def test_a_row_that_holds_more_or_other_tokens_is_not(prompt):
    scheduler = Scheduler(1, 8)
    first = Work((1, 2, 3), 2)
    scheduler.add(first)
    scheduler.plan()
    first.output += [4, 5]
    scheduler.end(first, keep=4)
    scheduler.add(Work(prompt, 1))
    assert lengths(scheduler.plan()) == [(0, len(prompt))]


def test_numbers_that_cannot_be():
    with pytest.raises(ValueError, match="rows=0"):
        Scheduler(0, 8)
    with pytest.raises(ValueError, match="at least alignment=16"):
        Scheduler(1, 8, alignment=16)
