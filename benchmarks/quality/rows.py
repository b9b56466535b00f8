"""The rows of `equal_bytes` as tables and plots show them: kinds of methods, what is retained least."""

import json
from typing import Any, NamedTuple

from benchmarks.common import RESULTS
from benchmarks.quality.plans import FIRST, others
from zdc_jax.evaluation.retention import HALF_WIDTH

NAME = "equal-bytes-smollm2-135m"
Row = dict[str, Any]
LOW_RANK = "low rank"
FAMILIES = {
    "floor": ("rotated",),
    "recent tokens": ("window", "duo"),
    "fewer bits": ("int8", "fp8", "kivi", "turboquant", "gear", "coded"),
    "eviction": ("h2o", "snapkv", "tova", "knorm"),
    LOW_RANK: ("zdc", "palu", "gear-zdc", "h2o-zdc"),
    "choosing": ("quest", "loki"),
}
"""Methods by what they spare, in the order of tables. Plans with other names are low ranks."""


class Least(NamedTuple):
    """The lowest retention of a row, and the task that it is of."""

    retention: float
    task: str


def read_run(name: str = NAME) -> dict[str, Any]:
    """The JSON of one model, with the rows of its searched plans of coded caches, which have a file of
    their own."""
    run = json.loads((RESULTS / f"{name}.json").read_text())
    plans = RESULTS / f"coded-{model_of(name)}.json"
    if plans.exists():
        run["rows"] += json.loads(plans.read_text())["rows"]
    return run


def model_of(name: str) -> str:
    """The model that the name of a result file ends in."""
    return name.removeprefix("equal-bytes-").removeprefix("coded-")


def family(method: str) -> str:
    """The kind of a method; of a searched plan by what its name begins with, up to a comma or bracket."""
    name = method.split(",")[0].split(" (")[0]
    return next((kind for kind, methods in FAMILIES.items() if name in methods), LOW_RANK)


def in_order(methods: set[str]) -> list[str]:
    """Methods kind by kind; plans with names of their own last."""
    known = [method for kind in FAMILIES.values() for method in kind]
    return [method for method in known if method in methods] + sorted(methods - set(known))


def of(rows: list[Row], context: int, protocol: str) -> list[Row]:
    """Rows of one context and protocol."""
    return [row for row in rows if (row["context"], row["protocol"]) == (context, protocol)]


def least(row: Row) -> Least:
    """Over the tasks that count."""
    return min(Least(task["retention"], name) for name, task in row["tasks"].items() if task["counts"])


def retentions(row: Row) -> tuple[int, int]:
    """How many tasks of a row count, and of how many of them retention is not known within `HALF_WIDTH`."""
    counting = [task for task in row["tasks"].values() if task["counts"]]

    def reach(task):
        return max(abs(end - task["retention"]) for end in task["interval"])

    return len(counting), sum(reach(task) > HALF_WIDTH for task in counting)


def missing(run: dict[str, Any], context: int, protocol: str) -> dict[str, list[float]]:
    """Budgets by method that are to be measured and are neither there nor refused."""
    there = {(row["method"], row["budget"]) for row in of(run["rows"], context, protocol)}
    there |= {(cell["method"], cell["budget"]) for cell in run["refused"] if cell["context"] == context}
    listed = FIRST if run["config"]["first_only"] else (*FIRST, *others(lambda _: ()))
    entries = {entry.name: entry.budgets for entry in listed}
    left = {name: [b for b in entries[name] if (name, b) not in there] for name in in_order(set(entries))}
    return {name: budgets for name, budgets in left.items() if budgets}
