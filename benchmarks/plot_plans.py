"""Draws what `bench_plans` measured: fronts of KV bytes and perplexity, and how far the certificate tells it.

python -m benchmarks.plot_plans
"""

import itertools
import json
from typing import Any

import matplotlib
import numpy as np
from scipy.stats import spearmanr

from benchmarks.common import RESULTS
from convert.search.trials import undominated

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MODELS = ("ref-llama-23m", "ref-opt-26m")


def rows_of(model: str) -> list[dict[str, Any]]:
    """All measured plans of a model, those predicted for it with it left out among them."""

    def read(path):
        return json.loads(path.read_text())["results"]["rows"] if path.exists() else []

    predicted = read(RESULTS / f"predicted-{model}.json")
    others = [row for row in predicted if row["kind"] in ("predicted", "predicted, checked")]
    return read(RESULTS / f"plans-{model}.json") + others


def rank_correlation(rows: list[dict[str, Any]]) -> float:
    """Spearman's, of the certificate's squared errors together and the increase of perplexity."""
    error = [row["score_error"] ** 2 + row["value_error"] ** 2 for row in rows]
    return float(spearmanr(error, [row["increase"] for row in rows]).statistic)


def draw_fronts() -> None:
    """`plans.png`: one line a kind of plan."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True, layout="constrained")
    kinds = sorted({row["kind"] for model in MODELS for row in rows_of(model)})
    for axis, model in zip(axes, MODELS, strict=True):
        for color, kind in enumerate(kinds):
            chosen = [row for row in rows_of(model) if row["kind"] == kind]
            points = [(100 * row["bytes_share"], 100 * row["increase"]) for row in chosen]
            if points:
                front = np.array(points)[undominated(points)]
                axis.plot(front[:, 0], front[:, 1], "o-", color=f"C{color}", markersize=4, label=kind)
        axis.axhline(1, linestyle=":", color="0.5")
        axis.set(title=model, xlabel="KV bytes at 4096 tokens, % of dense", xlim=(0, 100), ylim=(-0.5, 12))
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    axes[0].set_ylabel("increase of perplexity, %, held-out text")
    figure.savefig(RESULTS / "plans.png", dpi=110)


def draw_certificate() -> None:
    """`certificate.png`: errors of far pairs against perplexity by window, of models whose rows have them."""
    certified = {model: [row for row in rows_of(model) if "score_error" in row] for model in MODELS}
    models = [model for model in MODELS if certified[model]]
    figure, axes = plt.subplots(1, len(models), figsize=(5.5 * len(models), 4.5), layout="constrained")
    for axis, model in zip(np.atleast_1d(axes), models, strict=True):
        rows = sorted(certified[model], key=lambda row: row["plan"]["window"])
        for window, group in itertools.groupby(rows, key=lambda row: row["plan"]["window"]):
            chosen = [row for row in group if row["increase"] > 0]
            error = [np.sqrt(row["score_error"] ** 2 + row["value_error"] ** 2) for row in chosen]
            label = f"window {window}: rank correlation {rank_correlation(chosen):.2f}"
            axis.loglog(error, [100 * row["increase"] for row in chosen], "o", markersize=4, label=label)
        axis.set(title=model, xlabel="certificate: relative error of scores and values of far pairs")
        axis.legend(fontsize=8)
        print(f"{model}: all plans together {rank_correlation(rows):.2f}")
        axis.set_ylabel("increase of perplexity, %, held-out text")
    figure.savefig(RESULTS / "certificate.png", dpi=110)


if __name__ == "__main__":
    draw_fronts()
    draw_certificate()
