"""What tables say of rows at equal bytes; the page of methods names all, with their settings."""

import dataclasses
import re
from pathlib import Path

import pytest

from benchmarks.quality.rows import FAMILIES, Least, in_order, least, missing, of, retentions
from benchmarks.tables import plan_cell
from zdc_jax import methods

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def task(retention: float, interval: tuple[float, float], counts: bool) -> dict[str, object]:
    return {"retention": retention, "interval": list(interval), "counts": counts}


ROW = {
    "method": "kivi",
    "budget": 0.52,
    "context": 4096,
    "protocol": "cached",
    "tasks": {
        "lookup": task(0.5, (0.49, 0.51), True),
        "needles": task(0.75, (0.74, 0.79), True),
        "passkey": task(0.1, (0.0, 0.9), False),
    },
}


def test_tasks_that_do_not_count_say_nothing():
    assert least(ROW) == Least(0.5, "lookup")
    assert retentions(ROW) == (2, 1)


def test_missing_cells_are_neither_there_nor_refused():
    refused = [{"method": "kivi", "budget": 0.12, "context": 4096, "reason": ""}]
    run = {"config": {"first_only": False}, "rows": [ROW], "refused": refused}
    assert of(run["rows"], 8192, "cached") == []
    assert missing(run, 4096, "cached")["kivi"] == [0.36, 0.28, 0.20, 0.15]
    assert missing(run, 4096, "exact")["kivi"] == [0.52, 0.36, 0.28, 0.20, 0.15]
    assert missing(run, 8192, "cached")["kivi"] == [0.52, 0.36, 0.28, 0.20, 0.15, 0.12]
    assert missing(run, 4096, "cached")["palu"] == [0.52, 0.36]
    assert "palu" not in missing(run | {"config": {"first_only": True}}, 4096, "cached")


def test_kinds_stand_together():
    assert in_order({"loki", "a plan", "window", "int8", "h2o"}) == [
        "window",
        "int8",
        "h2o",
        "loki",
        "a plan",
    ]
    beside = {"gear-zdc", "h2o-zdc", "rotated"}
    assert {method for kind in FAMILIES.values() for method in kind} == {*methods.names(), *beside}


@pytest.mark.parametrize(
    ("ranks", "settings", "said"),
    [
        ([(8, 8)], {}, "window 3"),
        ([(4, 8)], {"bits": 2}, "(4, 8), 2 bits, window 3"),
        (
            [(8, 8), (4, 8)],
            {"bits_k": 3, "bits_v": 2, "kept": 16},
            "ranks by layer, 3 and 2 bits, kept 16, window 3",
        ),
        ([(8, 8), (8, 8)], {"heads": [[0], [0, 1]]}, "3 of 4 heads, window 3"),
    ],
)
def test_plan_cell(ranks, settings, said):
    layers = [{"qk": R, "v": Z} for R, Z in ranks]
    plan = {"head_dim": 8, "num_kv_heads": 2, "window": 3, "layers": layers, "settings": settings}
    assert plan_cell(plan) == said


@pytest.mark.parametrize("name", methods.names())
def test_page_of_methods(name):
    """The row of a method says each of its settings with its default."""
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` "))
    said = dict(re.findall(r"`(\w+)=([^`]*)`", row))
    fields = dataclasses.fields(methods.named(name).Settings)
    assert said == {field.name: str(field.default).lower() for field in fields}
