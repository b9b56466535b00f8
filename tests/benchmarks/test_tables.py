"""README and docs show what the results say."""

import re

import pytest

from benchmarks.tables import PAGES, TABLES

SHOWN = [
    (page, *found)
    for page in PAGES
    for found in re.findall(r"<!-- table (.+?) -->\n(.*?)\n<!-- end \1 -->", page.read_text(), re.DOTALL)
]


@pytest.mark.parametrize(
    ("page", "name", "text"), SHOWN, ids=[f"{page.stem}-{name}" for page, name, _ in SHOWN]
)
def test_a_table_is_what_its_results_give(page, name, text):
    assert text.count("\n") >= 2, "it has no rows"
    assert text == TABLES[name]()


def test_every_table_is_shown():
    assert {name for _, name, _ in SHOWN} == set(TABLES)
    assert all(page.read_text().count("<!-- table ") == sum(at == page for at, *_ in SHOWN) for page in PAGES)
