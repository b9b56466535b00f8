"""Which tests `make test` draws."""

from types import SimpleNamespace

import pytest
from conftest import TURNS, not_drawn


def item(nodeid: str, sampled: bool, *shared: str) -> SimpleNamespace:
    mark = pytest.mark.sampled(*shared).mark
    return SimpleNamespace(
        nodeid=nodeid, get_closest_marker=lambda name: mark if sampled and name == "sampled" else None
    )


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_all_turns_draw_each_sampled_test_once_and_others_always(count):
    sampled = [item(f"a.py::test_long[{i}]", True) for i in range(count)] + [item("a.py::test_one", True)]
    others = [item(f"a.py::test_short[{i}]", False) for i in range(count)]
    turns = [list(not_drawn([*sampled, *others], turn)) for turn in range(9, 9 + TURNS)]
    for each in sampled:
        assert sum(each in left_out for left_out in turns) == TURNS - 1
    assert not any(each in left_out for each in others for left_out in turns)


def test_a_turn_draws_a_share_of_a_test():
    sampled = [item(f"a.py::test_long[{i}]", True) for i in range(4 * TURNS)]
    assert len(list(not_drawn(sampled, 0))) == 4 * (TURNS - 1)


def test_tests_that_share_programs_draw_the_same_parameters():
    names = ("test_one", "test_other", "test_third")
    sampled = [item(f"a.py::{name}[{i}]", True, "methods") for name in names for i in range(12)]
    for turn in range(TURNS):
        left_out = list(not_drawn(sampled, turn))
        drawn = [{i for i in range(12) if sampled[12 * n + i] not in left_out} for n in range(len(names))]
        assert drawn == [drawn[0]] * len(names)
