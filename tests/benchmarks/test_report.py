"""Documents that show what the results say."""

import math

import pytest

from benchmarks import report
from benchmarks.quality import plans
from zdc_jax import methods


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.stem)
def test_pages_are_as_written(page):
    text = page.read_text()
    assert report.with_tables(text) == text


def test_retention_counts_quarters_in_which_the_unmodified_model_succeeds():
    def quarter(retention: float, dense: float, questions: int) -> dict[str, float]:
        return {"retention": retention, "dense": dense, "questions": questions}

    task = {"by_depth": [quarter(3.0, 0.4, 9), quarter(0.5, 0.5, 1), None, quarter(2.0, 0.9, 3)]}
    assert report.retention(task) == pytest.approx(math.exp((math.log(0.5) + 3 * math.log(2)) / 4))
    assert report.retention({"by_depth": [quarter(1.0, 0.4, 5)]}) is None
    assert report.retention({"by_depth": None, "dense": 0.6, "retention": 0.9}) == 0.9


def test_methods_that_are_judged_have_a_family():
    # A method without an entry in `quality.plans` needs none.
    judged = {entry.name for entry in (*plans.FIRST, *plans.others(lambda count: ((),)))}
    known = {method for family in report.FAMILIES.values() for method in family}
    assert judged <= known <= judged | {*methods.names()}
