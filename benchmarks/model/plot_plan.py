"""Draw the README's picture: cache memory and decoded tokens per second, with 16 bits and with a plan.

    python -m benchmarks.model.plot_plan

Reads `results/one-plan-h100.json` (`bench_one_plan`) and writes `docs/images/one-plan.png`.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import tyro

matplotlib.use("agg")
import matplotlib.pyplot as plt

from benchmarks.common import RESULTS

SHAPE = "Llama-3-8B"
KINDS = {"dense": ("16 bits", "#9aa5b1"), "searched": ("plan, 20 % of the bytes", "#1f77b4")}
"""Label and color of each kind of cache."""
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "one-plan.png"


def read_rows() -> dict[str, dict[int, dict[str, Any]]]:
    """Return the rows of the shape by kind and prompt length."""
    run = json.loads((RESULTS / "one-plan-h100.json").read_text())
    return {
        entry["kind"]: {row["length"]: row for row in entry["rows"]}
        for entry in run["results"]
        if entry["shape"] == SHAPE and entry["kind"] in KINDS
    }


def draw_bars(
    axis: Any, values: dict[str, list[float]], lengths: list[int], *, title: str, form: str
) -> None:
    """Draw one group of bars for each length, one bar for each kind."""
    for place, (kind, heights) in enumerate(values.items()):
        label, color = KINDS[kind]
        at = [index + 0.4 * (place - 0.5) for index in range(len(lengths))]
        bars = axis.bar(at, heights, width=0.38, label=label, color=color)
        axis.bar_label(bars, fmt=form, padding=2, fontsize=8)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_xlabel("tokens of a sequence")
    axis.set_title(title, fontsize=10)
    axis.set_yscale("log")
    axis.margins(y=0.15)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw and save the picture."""
    rows = read_rows()
    lengths = sorted(set.intersection(*(set(by_length) for by_length in rows.values())))
    memory = {kind: [rows[kind][n]["bytes_a_row"] / 2**30 for n in lengths] for kind in KINDS}
    speed = {
        kind: [
            rows[kind][n]["largest"] / median(rows[kind][n]["token"][str(rows[kind][n]["largest"])])
            for n in lengths
        ]
        for kind in KINDS
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    draw_bars(left, memory, lengths, title="KV cache of one sequence, GiB", form="%.2f")
    draw_bars(right, speed, lengths, title="tokens per second, as many sequences as fit", form="{:,.0f}")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(f"{SHAPE}'s shape on one H100 of 80 GB, random weights", fontsize=10)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=130)
    print(PICTURE)


if __name__ == "__main__":
    tyro.cli(main)
