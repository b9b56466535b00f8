"""JSON and plot of the best plans that a search measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

from convert.search.search import SearchOptions
from convert.search.trials import Trial, TrialBook, pareto_front, trial_json
from zdc_jax.files import whole_file

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def write_front(book: TrialBook, best: Trial, options: SearchOptions, path: Path) -> None:
    """Write all undominated trials as JSON to `path`, and a plot of all trials next to it as PNG."""
    front = pareto_front(book.trials)

    def describe_trial(trial: Trial) -> dict[str, Any]:
        return trial_json(replace(trial, plan=book.bind(trial.plan)))

    value = {
        "max_degradation": options.max_degradation,
        "min_retention": options.min_retention,
        "mode": options.mode,
        "objective": options.objective,
        "context": int(book.windows.shape[1]),
        "windows": len(book.windows),
        "documents": len(book.documents),
        "best": describe_trial(best),
        "front": [describe_trial(trial) for trial in front],
    }
    with whole_file(path) as file:
        file.write_text(json.dumps(value, indent=1) + "\n")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([t.bytes_share for t in book.trials], [t.increase for t in book.trials], ".", color="0.75")
    axes.plot([t.bytes_share for t in front], [t.increase for t in front], "o-", label="undominated")
    label = f"least {options.objective} within the limit"
    axes.plot(best.bytes_share, best.increase, "*", markersize=14, label=label)
    axes.axhline(options.max_degradation, linestyle=":", color="0.4", label="limit")
    axes.set(xlabel="KV bytes, share of dense", ylabel="increase of perplexity")
    axes.set_ylim(-0.01, max(6 * options.max_degradation, 0.05))
    axes.legend()
    with whole_file(path.with_suffix(".png")) as file:
        figure.savefig(file, dpi=120, format="png")
    plt.close(figure)
