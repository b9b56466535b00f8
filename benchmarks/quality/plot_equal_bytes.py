"""Figures of cache methods at equal bytes: perplexity and lowest retention over bytes, one file a context.

python -m benchmarks.quality.plot_equal_bytes
"""

from typing import Any

import matplotlib
import tyro

from benchmarks.common import RESULTS
from benchmarks.report import FAMILIES, MODEL, Row, family, in_order, lowest, rows_at

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLORS = dict(zip(FAMILIES, ("Oranges", "Greys", "Blues", "Reds", "Greens", "Purples"), strict=True))
MARKERS = "osD^v"
PLAN = {
    "color": "gold",
    "marker": "*",
    "markersize": 15,
    "markeredgecolor": "k",
    "linestyle": "",
    "zorder": 5,
}
"""Style of searched plans."""
PANELS = tuple(
    (protocol, share) for protocol in ("cached", "exact") for share in ("bytes_share", "read_share")
)
SHARES = {"bytes_share": "stored", "read_share": "read a token"}


def styles(methods: set[str]) -> dict[str, dict[str, Any]]:
    """Return the style of each method: a color for each family, with shades and markers for its methods."""
    style = dict.fromkeys(methods, PLAN)
    for kind, color in COLORS.items():
        alike = FAMILIES[kind]
        for place, method in enumerate(alike):
            shade = matplotlib.colormaps[color](0.95 - 0.55 * place / max(1, len(alike) - 1))
            marker = MARKERS[place % len(MARKERS)]
            style[method] = {"color": shade, "marker": marker, "markersize": 4.5, "linewidth": 1.3}
    return style


def draw_panel(increase: Axes, retention: Axes, rows: list[Row], share: str, style: dict[str, Any]) -> None:
    """Draw one line a method in both axes, over a share of the bytes of the 16-bit cache."""
    named: set[str] = set()
    for method in in_order({row["method"] for row in rows}):
        chosen = sorted((row for row in rows if row["method"] == method), key=lambda row: row[share])
        x = [100 * row[share] for row in chosen]
        y = [lowest(row["tasks"]).retention for row in chosen]
        increase.plot(x, [100 * row["increase"] for row in chosen], label=method, **style[method])
        retention.plot(x, y, **style[method])
        name = method.split(",")[0]
        if style[method] is PLAN and name not in named:  # Plans of one name are close together.
            named.add(name)
            for axis, height in ((increase, 100 * chosen[0]["increase"]), (retention, y[0])):
                axis.annotate(name, (x[0], height), (10, 6), textcoords="offset points", fontsize=10)


def draw(context: int) -> None:
    """Write `equal-bytes-MODEL-CONTEXT.png`: protocols and shares side by side."""
    panels = {panel: rows_at(context, panel[0]) for panel in PANELS}
    style = styles({row["method"] for rows in panels.values() for row in rows})
    figure, axes = plt.subplots(
        2, len(PANELS), figsize=(15, 7.5), sharex=True, sharey="row", layout="constrained"
    )
    for ((protocol, share), rows), (increase, retention) in zip(panels.items(), axes.T, strict=True):
        draw_panel(increase, retention, rows, share, style)
        increase.set(title=f"{protocol}, by bytes {SHARES[share]}")
        increase.set_yscale("symlog", linthresh=0.1)
        retention.set(xlabel=f"bytes {SHARES[share]}, % of 16 bits", xlim=(0, 112), ylim=(-0.03, 1.07))
        for axis in (increase, retention):
            axis.grid(alpha=0.25)
    axes[0, 0].set(ylabel="increase of perplexity, %")
    axes[0, 0].yaxis.set_major_formatter("{x:g}")
    axes[1, 0].set(ylabel="lowest retention of a task")
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    methods = in_order(set(lines))
    figure.legend(
        [lines[method] for method in methods],
        [f"{method} ({family(method)})" for method in methods],
        loc="outside right upper",
        fontsize=9,
    )
    figure.suptitle(f"SmolLM2-135M-Instruct, {context:,} tokens")
    figure.savefig(RESULTS / f"equal-bytes-{MODEL}-{context}.png", dpi=100)
    plt.close(figure)


def main() -> None:
    """Draw the figure of each context."""
    for context in (4096, 8192):
        draw(context)


if __name__ == "__main__":
    tyro.cli(main)
