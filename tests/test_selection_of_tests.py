"""Selection of the tests that `make test` runs."""

from types import SimpleNamespace

import pytest
from conftest import list_left_out


class Item(SimpleNamespace):
    """Stand-in for a collected test."""

    def __init__(self, nodeid: str, mark: pytest.MarkDecorator | None):
        super().__init__(nodeid=nodeid, mark=mark)

    __hash__ = object.__hash__

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.mark.mark if self.mark is not None and self.mark.name == name else None


@pytest.mark.parametrize(
    ("mark", "kept"),
    [
        (None, ["a", "b", "a, c"]),
        (pytest.mark.full, []),
        (pytest.mark.matrix, ["a"]),
        (pytest.mark.matrix("b", "a, c"), ["b", "a, c"]),
    ],
)
def test_a_mark_chooses_parameters(mark, kept):
    items = [Item(f"t.py::test_it[{name}]", mark) for name in ("a", "b", "a, c")]
    other = Item("t.py::test_other", pytest.mark.matrix)
    left_out = list_left_out([*items, other])
    assert [item.nodeid for item in items if item not in left_out] == [
        f"t.py::test_it[{name}]" for name in kept
    ]
    assert other not in left_out
