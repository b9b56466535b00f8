"""Draws what `equal_bytes` measured, a figure a context: perplexity and the lowest retention by bytes.

python -m benchmarks.quality.plot_equal_bytes
"""

from typing import Any

import matplotlib

from benchmarks.common import RESULTS
from benchmarks.quality.rows import FAMILIES, NAME, Row, family, in_order, least, model_of, of, read_run
from benchmarks.tables import OLD_CODE

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLORS = dict(zip(FAMILIES, ("Oranges", "Greys", "Blues", "Reds", "Greens", "Purples"), strict=True))
MARKERS = "osD^v"
OWN = {"color": "gold", "marker": "*", "markersize": 15, "markeredgecolor": "k", "linestyle": "", "zorder": 5}
"""Of plans with names of their own, which stand out."""
OLD = OWN | {"color": "silver", "zorder": 4}
"""Of such plans in a code that is not in use any more; named in the legend alone."""
PANELS = tuple(
    (protocol, share) for protocol in ("cached", "exact") for share in ("bytes_share", "read_share")
)
SHARES = {"bytes_share": "held", "read_share": "read a token"}


def styles(methods: set[str]) -> dict[str, dict[str, Any]]:
    """Of each method: methods of one kind have shades of one colour, and markers of their own."""
    found = {method: OLD if method.startswith(OLD_CODE) else OWN for method in methods}
    for kind, color in COLORS.items():
        alike = FAMILIES[kind]
        for place, method in enumerate(alike):
            shade = matplotlib.colormaps[color](0.95 - 0.55 * place / max(1, len(alike) - 1))
            marker = MARKERS[place % len(MARKERS)]
            found[method] = {"color": shade, "marker": marker, "markersize": 4.5, "linewidth": 1.3}
    return found


def draw_panel(increase: Axes, retention: Axes, rows: list[Row], share: str, style: dict[str, Any]) -> None:
    """One line a method in both axes, over a share of the dense bytes."""
    named: set[str] = set()
    for method in in_order({row["method"] for row in rows}):
        chosen = sorted((row for row in rows if row["method"] == method), key=lambda row: row[share])
        x = [100 * row[share] for row in chosen]
        increase.plot(x, [100 * row["increase"] for row in chosen], label=method, **style[method])
        retention.plot(x, [least(row).retention for row in chosen], **style[method])
        name = method.split(",")[0]
        if style[method] is OWN and name not in named:  # Plans of one name stand close together.
            named.add(name)
            for axis, y in ((increase, 100 * chosen[0]["increase"]), (retention, least(chosen[0]).retention)):
                axis.annotate(name, (x[0], y), (10, 6), textcoords="offset points", fontsize=10)


def draw(run: dict[str, Any], context: int) -> None:
    """`NAME-CONTEXT.png`: protocols and shares side by side, perplexity above retention."""
    style = styles({row["method"] for row in run["rows"]})
    figure, axes = plt.subplots(
        2, len(PANELS), figsize=(15, 7.5), sharex=True, sharey="row", layout="constrained"
    )
    for (protocol, share), (increase, retention) in zip(PANELS, axes.T, strict=True):
        draw_panel(increase, retention, of(run["rows"], context, protocol), share, style)
        increase.set(title=f"{protocol}, by bytes {SHARES[share]}")
        increase.set_yscale("symlog", linthresh=0.1)
        retention.set(xlabel=f"bytes {SHARES[share]}, % of dense", xlim=(0, 112), ylim=(-0.03, 1.07))
        for axis in (increase, retention):
            axis.grid(alpha=0.25)
    axes[0, 0].set(ylabel="increase of perplexity, %")
    axes[0, 0].yaxis.set_major_formatter("{x:g}")
    axes[1, 0].set(ylabel="lowest retention of a task that counts")
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    methods = in_order(set(lines))
    figure.legend(
        [lines[method] for method in methods],
        [f"{method} ({family(method)})" for method in methods],
        loc="outside right upper",
        fontsize=9,
    )
    figure.suptitle(f"{model_of(NAME)}, {context} tokens")
    figure.savefig(RESULTS / f"{NAME}-{context}.png", dpi=100)
    plt.close(figure)


def main() -> None:
    """A figure of each context."""
    run = read_run()
    for context in sorted({row["context"] for row in run["rows"]}):
        draw(run, context)


if __name__ == "__main__":
    main()
