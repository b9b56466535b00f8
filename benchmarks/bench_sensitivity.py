"""How much do the paper's parameters matter (ZDC, Figs. 24 to 26), and does a basis hold on other topics?

    python -m benchmarks.bench_sensitivity --model HF_FOLDER --corpus CORPUS --name sensitivity-NAME

Perplexity is of held-out text and real arrays; a PNG of the same name shows all parts.

`g`         fraction of important tokens, the same in all layers (Fig. 24), with the time of a prefill.
`p`         share of Q/K or of V that is dropped, the other left whole (Fig. 25), with the time of a prefill.
`prune`     share of each topic's sequences left out of the paper's calibration (Fig. 26a), with its time.
`clusters`  its centroids M per head (Fig. 26b), with its time; half of the sequences left out.
`transfer`  basis from half of the topics, tested on the other half and on its own, and from one topic, tested
            on all others; each against the basis from all topics (Fig. 14, and Fig. 26 across data sets).

Calibration seconds are of a second run, without compiling. `prune` and `clusters` keep half of Q/K and three
quarters of V, in the paper's basis.
"""

import itertools
import time
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib
import numpy as np
import tyro

from benchmarks.bench_quality import Bench, Case
from benchmarks.studies import (
    GROUPS,
    Options,
    class_plan,
    degradation,
    over,
    percent,
    run_parts,
    uniform_plan,
)
from benchmarks.timing import costs_in_turns
from convert.calibration.kmeans import kmeans_moments
from convert.calibration.moments import Moments
from zdc_jax.basis import Basis
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan, allowed_ranks

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
PRUNE = (0.1, 0.3, 0.5, 0.7, 0.8)
CLUSTERS = (64, 256, 1024, 4096)
PAPER_PRUNE = 0.5
CLUSTERS_OF_PRUNE = 1024
KEPT = ((3, 3), (2, 2), (1, 1), (2, 3))
"""Quarters of (Q/K, V) that `transfer` keeps; the last for bases from single topics too."""


def prefill_ms(bench: Bench, network: Transformer) -> list[float]:
    """Device time of one batch of windows, without the head."""
    tokens = jnp.asarray(bench.heldout[: bench.options.batch])

    def call(network, tokens):
        return network.hidden(tokens)

    return costs_in_turns({"prefill": (call, (network, tokens))}, rounds=2)["prefill"]["ms"]


def timed_row(bench: Bench, case: Case) -> dict[str, Any]:
    """A row with the time of its prefill."""
    model = bench.model(case.plan, bench.bases[case.basis])
    return bench.run(case, model) | {"prefill_ms": prefill_ms(bench, model.network)}


def fractions(bench: Bench) -> dict[str, Any]:
    """Fig. 24."""
    rows = []
    for g in FRACTIONS:
        plan = class_plan(bench.config, (g,) * GROUPS)
        rows.append(timed_row(bench, Case("g", f"g={g}", "balanced", plan, {"g": g})))
    return {"rows": rows}


def dropped(bench: Bench) -> dict[str, Any]:
    """Fig. 25, in our basis and the paper's; times do not depend on the basis."""
    H, rows = bench.config.head_dim, []
    for side, rank in itertools.product(("qk", "v"), allowed_ranks(H)[1:-1]):
        plan = CompressionPlan.uniform(bench.config, **({"qk": H, "v": H} | {side: rank}))
        about = {"side": side, "p": 1 - rank / H}
        label = f"p of {side} = {about['p']:.2f}"
        rows.append(timed_row(bench, Case("p", label, "balanced", plan, about)))
        rows.append(bench.run(Case("p", label, "stacked", plan, about)))
    return {"rows": rows}


def papers_calibration(bench: Bench, prune: float, clusters: int) -> tuple[Basis, float]:
    """The basis of the paper's route, and the seconds that a second run of it takes."""
    for _ in range(2):
        began = time.perf_counter()
        moments = kmeans_moments(
            bench.dense.network,
            bench.train,
            bench.train_topics,
            prune=prune,
            clusters=clusters,
            seed=bench.options.seed,
            fingerprint=bench.checkpoint.fingerprint,
        )
        basis = bench.make_basis(moments, qk="stacked", vo="stacked")
        seconds = time.perf_counter() - began
    return basis, seconds


def calibrations(bench: Bench, name: str, settings: list[tuple[float, int]]) -> dict[str, Any]:
    """One row for each (prune, clusters), over the basis of exact moments of all tokens."""
    plan = uniform_plan(bench.config, 2, 3)
    exact = bench.run(Case(name, "exact moments", "stacked", plan))
    rows = [exact]
    for prune, clusters in settings:
        bench.bases["paper"], seconds = papers_calibration(bench, prune, clusters)
        about = {"prune": prune, "clusters": clusters, "calibration_seconds": seconds}
        row = bench.run(Case(name, f"prune={prune} M={clusters}", "paper", plan, about))
        rows.append(over(row, exact))
    return {"rows": rows}


def prune(bench: Bench) -> dict[str, Any]:
    """Fig. 26a."""
    return calibrations(bench, "prune", [(share, CLUSTERS_OF_PRUNE) for share in PRUNE])


def clusters(bench: Bench) -> dict[str, Any]:
    """Fig. 26b."""
    return calibrations(bench, "clusters", [(PAPER_PRUNE, count) for count in CLUSTERS])


def transfer(bench: Bench) -> dict[str, Any]:
    """Fig. 14 and the case across data sets of Fig. 26; `over_all` is over the basis from all topics."""
    topics = np.array(bench.train_topics)
    moments = {str(t): bench.collect(bench.train[topics == t]) for t in np.unique(topics)}
    halves = [merged(moments, list(moments)[start::2]) for start in range(2)]
    in_first = np.isin(bench.topics, list(moments)[::2])
    rows = []
    for qk, v in KEPT:
        plan = uniform_plan(bench.config, qk, v)
        everything, first, second = (heldout_nll(bench, plan, m) for m in (bench.moments, *halves))
        for basis, nll in {
            "all topics": everything,
            "half of the topics, seen": np.where(in_first, first, second),
            "half of the topics, unseen": np.where(in_first, second, first),
        }.items():
            rows.append(transferred(bench, basis, plan, nll, everything))
    return {"rows": rows + single_topics(bench, moments, plan, everything)}


def single_topics(
    bench: Bench, moments: dict[str, Moments], plan: CompressionPlan, everything: np.ndarray
) -> list[dict[str, Any]]:
    """Bases from one topic each, on the windows of all others; and their mean, window by window."""
    nll = np.array([heldout_nll(bench, plan, one) for one in moments.values()])
    unseen = np.array(list(moments))[:, None] != np.array(bench.topics)
    rows = [
        transferred(bench, f"only {topic}, unseen", plan, row, everything, other)
        for topic, row, other in zip(moments, nll, unseen, strict=True)
    ]
    mean = (nll * unseen).sum(0) / unseen.sum(0)
    return [*rows, transferred(bench, "one topic, unseen", plan, mean, everything)]


def merged(moments: dict[str, Moments], topics: list[str]) -> Moments:
    """Moments of these topics together."""
    return reduce(Moments.merge, (moments[topic] for topic in topics))


def heldout_nll(bench: Bench, plan: CompressionPlan, moments: Moments) -> np.ndarray:
    """Of each held-out window, with the balanced basis of these moments."""
    model = bench.model(plan, bench.make_basis(moments, qk="balanced", vo="balanced"))
    return window_nll(model.network, bench.heldout, batch=bench.options.batch)


def transferred(
    bench: Bench,
    basis: str,
    plan: CompressionPlan,
    nll: np.ndarray,
    everything: np.ndarray,
    chosen: np.ndarray | slice = slice(None),
) -> dict[str, Any]:
    """A row on the chosen windows: over the unmodified model, and over the basis from all topics."""
    found = degradation(nll[chosen], bench.dense_nll[chosen])
    more = degradation(nll[chosen], everything[chosen])
    ranks = {"qk": plan.layers[0].qk, "v": plan.layers[0].v}
    print(f"transfer   {ranks} {basis:32} {percent(found)}, over all topics {percent(more)}", flush=True)
    return {"basis": basis, **ranks, **found, "over_all": more, "windows": len(nll[chosen])}


def draw(results: dict[str, Any], path: Path) -> None:
    """One panel a part that was measured."""
    names = [name for name in PARTS if name in results]
    size = (4 * len(names), 4)
    figure, axes = plt.subplots(1, len(names), figsize=size, layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        axis.set(title=name, ylabel="increase of perplexity, %")
        PANELS[name](axis, results[name]["rows"])
    figure.savefig(path, dpi=100)
    plt.close(figure)


def line(axis: Axes, x: list[Any], rows: list[dict[str, Any]], label: str, **style: Any) -> None:
    """Increase of perplexity with its intervals."""
    y = np.array([row["increase"] for row in rows])
    bars = np.abs(np.array([row["interval"] for row in rows]).T - y)
    axis.errorbar(x, 100 * y, 100 * bars, marker="o", markersize=4, capsize=2, label=label, **style)


def draw_fractions(axis: Axes, rows: list[dict[str, Any]]) -> None:
    g = [row["g"] for row in rows]
    line(axis, g, rows, "perplexity")
    axis.set(xlabel="fraction of important tokens g")
    if rows[0]["prefill_ms"]:
        beside = axis.twinx()
        beside.plot(g, [np.median(row["prefill_ms"]) for row in rows], "s--", color="0.5", markersize=4)
        beside.set(ylabel="prefill, ms")


def draw_dropped(axis: Axes, rows: list[dict[str, Any]]) -> None:
    for side, basis in itertools.product(("qk", "v"), ("balanced", "stacked")):
        own = [row for row in rows if (row["side"], row["basis"]) == (side, basis)]
        line(axis, [row["p"] for row in own], own, f"{side}, {basis}")
    axis.set(xlabel="share dropped p", yscale="log")
    axis.legend(fontsize=7)


def draw_calibrations(axis: Axes, rows: list[dict[str, Any]], by: str, scale: str) -> None:
    exact, *rows = rows
    x = [row[by] for row in rows]
    line(axis, x, rows, "K-means route")
    axis.axhline(100 * exact["increase"], color="0.5", linestyle=":", label="exact moments of all tokens")
    beside = axis.twinx()
    beside.plot(x, [row["calibration_seconds"] for row in rows], "s--", color="0.5", markersize=4)
    beside.set(ylabel="calibration, s", ylim=(0, None))
    axis.set(xlabel=by, xscale=scale)
    axis.minorticks_off()
    axis.set_xticks(x, x)
    axis.legend(fontsize=7)


def draw_transfer(axis: Axes, rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if not row["basis"].startswith(("only ", "all "))]
    kept = list(dict.fromkeys((row["qk"], row["v"]) for row in rows))
    for shift, basis in zip((-0.1, 0, 0.1), dict.fromkeys(row["basis"] for row in rows), strict=True):
        own = [row for row in rows if row["basis"] == basis]
        x = [kept.index((row["qk"], row["v"])) + shift for row in own]
        line(axis, x, [row["over_all"] for row in own], basis, linestyle="")
    axis.axhline(0, color="0.5", linestyle=":")
    axis.set_xticks(range(len(kept)), [f"({qk}, {v})" for qk, v in kept])
    axis.set(xlabel="kept of (Q/K, V)", ylabel="over the basis from all topics, %")
    axis.legend(fontsize=7)


PARTS = {"g": fractions, "p": dropped, "prune": prune, "clusters": clusters, "transfer": transfer}
PANELS = {
    "g": draw_fractions,
    "p": draw_dropped,
    "prune": partial(draw_calibrations, by="prune", scale="linear"),
    "clusters": partial(draw_calibrations, by="clusters", scale="log"),
    "transfer": draw_transfer,
}

if __name__ == "__main__":
    run_parts(tyro.cli(Options, description=__doc__), PARTS, draw)
