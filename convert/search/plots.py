"""Plots of what a search saw."""

import json
from dataclasses import replace
from pathlib import Path

import matplotlib

from convert.search.search import SearchOptions
from convert.search.trials import Trial, TrialBook, pareto_front, trial_json
from zdc_jax.files import whole_file

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def write_front(book: TrialBook, best: Trial, options: SearchOptions, path: Path) -> None:
    """All undominated trials as `path` (JSON) and, beside it, a plot (PNG)."""
    front = pareto_front(book.trials)

    def bound(trial):
        return trial_json(replace(trial, plan=book.bound(trial.plan)))

    value = {
        "max_degradation": options.max_degradation,
        "min_retention": options.min_retention,
        "mode": options.mode,
        "objective": options.objective,
        "context": int(book.windows.shape[1]),
        "windows": len(book.windows),
        "documents": len(book.documents),
        "best": bound(best),
        "front": [bound(trial) for trial in front],
    }
    with whole_file(path) as file:
        file.write_text(json.dumps(value, indent=1) + "\n")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([t.bytes_share for t in book.trials], [t.increase for t in book.trials], ".", color="0.75")
    axes.plot([t.bytes_share for t in front], [t.increase for t in front], "o-", label="undominated")
    least = f"least {options.objective} within the limit"
    axes.plot(best.bytes_share, best.increase, "*", markersize=14, label=least)
    axes.axhline(options.max_degradation, linestyle=":", color="0.4", label="limit")
    axes.set(xlabel="KV bytes, share of dense", ylabel="increase of perplexity")
    axes.set_ylim(-0.01, max(6 * options.max_degradation, 0.05))
    axes.legend()
    with whole_file(path.with_suffix(".png")) as file:
        figure.savefig(file, dpi=120, format="png")
    plt.close(figure)
