"""Draws what `bench_sequence_parallel` measured: time to the first token and bytes, by method and link.

python -m benchmarks.plot_sequence
"""

import json
from collections.abc import Iterable
from typing import Any

import matplotlib
import numpy as np

from benchmarks.common import RESULTS
from benchmarks.sequence_rows import LABELS, SEQUENCE_LENGTH, SEQUENCE_RESULTS, median, sent

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def rows_of(name: str) -> dict[str, dict[str, Any]]:
    """Rows of one file that were timed at the commit of dense Ulysses."""
    results = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    rows = {row: results.get(f"{row} {SEQUENCE_LENGTH}", {}) for row in LABELS}
    return {row: out for row, out in rows.items() if "speedup_over_dense" in out.get("compared", {})}


def draw() -> None:
    """`sequence.png`: a panel of times for each link, one of bytes."""
    links = {link: name for link, name in SEQUENCE_RESULTS.items() if (RESULTS / f"{name}.json").exists()}
    panels = len(links) + 1
    figure, axes = plt.subplots(1, panels, figsize=(6 * panels, 4.5), layout="constrained")
    for axis, (link, name) in zip(axes, links.items(), strict=False):
        rows = rows_of(name)
        axis.barh(names_of(rows), np.array([median(out, "first_token") for out in rows.values()]))
        axis.set(title=link, xlabel="time to the first token, s")
    measured = {row: out for name in links.values() for row, out in rows_of(name).items()}
    left = {row: count / 1e9 for row, out in measured.items() if (count := sent(out)) is not None}
    axes[-1].barh(names_of(left), list(left.values()))
    axes[-1].set(xlabel="GB that leave a GPU, at most")
    for axis in axes:
        axis.invert_yaxis()
    figure.savefig(RESULTS / "sequence.png", dpi=110)


def names_of(rows: Iterable[str]) -> list[str]:
    """Labels without the tables' emphasis."""
    return [LABELS[row].strip("*") for row in rows]


if __name__ == "__main__":
    draw()
