"""Draws the fronts of `bench_plans`: KV bytes against perplexity, both reference models side by side.

python -m benchmarks.plot_plans
"""

import itertools
import json

import matplotlib

from benchmarks.common import RESULTS

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MODELS = ("ref-llama-23m", "ref-opt-26m")


def undominated(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points (bytes, increase) that no other beats in both."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def main() -> None:
    """Writes `plans.png` beside the JSON files."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, model in zip(axes, MODELS, strict=True):
        rows = json.loads((RESULTS / f"plans-{model}.json").read_text())["results"]["rows"]
        for kind, group in itertools.groupby(sorted(rows, key=lambda r: r["kind"]), key=lambda r: r["kind"]):
            points = undominated([(100 * r["bytes_share"], 100 * r["increase"]) for r in group])
            axis.plot(*zip(*points, strict=True), "o-", markersize=4, label=kind)
        axis.axhline(1, linestyle=":", color="0.5")
        axis.set(title=model, xlabel="KV bytes at 4096 tokens, % of dense", xlim=(0, 100), ylim=(-0.5, 12))
    axes[0].set_ylabel("increase of perplexity, %, held-out text")
    axes[0].legend()
    figure.savefig(RESULTS / "plans.png", dpi=110)


if __name__ == "__main__":
    main()
