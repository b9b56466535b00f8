"""Does the certificate of a basis tell which layers may keep less? Its rank correlation with what they cost.

    python -m benchmarks.quality.certificate_check --model CONVERTED --journal plan.journal.jsonl --name N

The journal is that of a search (`zdc plan --texts`), in which single layers were lowered to a rank of Q/K, or
of V, all else whole. The certificate is the calibrated relative error of scores, or of values, at that rank,
mean over heads. No model runs. Correlations are Spearman's, over all ranks together and at each alone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from scipy.stats import spearmanr

from benchmarks.common import RESULTS, write_result
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import PlanError
from zdc_jax.loading import stored_basis


@dataclass(frozen=True)
class Options:
    """model: the calibrated folder that was searched. journal: beside the plan that the search wrote."""

    model: Path
    journal: Path
    name: str
    results: Path = RESULTS


class Lowered(NamedTuple):
    """One layer at one rank of Q/K or of V: its certificate, and what it costs.

    nats: increase of the mean negative log likelihood. lost: of each task, how much the mean log-probability
    of a right token falls.
    """

    layer: int
    part: str
    rank: int
    certificate: float
    nats: float
    lost: dict[str, float]


def lowered(basis: Basis, journal: Path) -> list[Lowered]:
    """The trials of a journal in which one rank of one layer is lowered.

    Raises:
      PlanError: there is no such trial.
    """
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    dense = {entry["key"]: entry for entry in entries if entry["plan"] is None}
    found = []
    for entry in entries:
        if entry["plan"] is None or entry["key"] not in dense:
            continue
        H = entry["plan"]["head_dim"]
        below = [
            (layer, part, ranks[part])
            for layer, ranks in enumerate(entry["plan"]["layers"])
            for part in ("qk", "v")
            if ranks[part] != H
        ]
        if len(below) == 1 and entry["plan"]["classes"] is None:
            found.append(_lowered(basis, *below[0], entry, dense[entry["key"]]))
    if not found:
        raise PlanError(f"{journal} holds no trial with one rank of one layer lowered")
    return found


def _lowered(
    basis: Basis, layer: int, part: str, rank: int, entry: dict[str, Any], dense: dict[str, Any]
) -> Lowered:
    errors = basis.qk_error if part == "qk" else basis.vo_error
    lost = {task: float(np.mean(dense["logs"][task]) - np.mean(logs)) for task, logs in entry["logs"].items()}
    nats = float(np.mean(entry["nll"]) - np.mean(dense["nll"]))
    return Lowered(layer, part, rank, float(errors[layer, :, rank].mean()), nats, lost)


def correlations(trials: Sequence[Lowered]) -> dict[str, Any]:
    """Spearman's correlation of the certificate with each cost; None for fewer than three trials."""
    if len(trials) < 3:
        return {"trials": len(trials), "nats": None, "lost": None}
    certificate = [trial.certificate for trial in trials]

    def with_cost(cost):
        return float(spearmanr(certificate, cost).statistic)

    return {
        "trials": len(trials),
        "nats": with_cost([trial.nats for trial in trials]),
        "lost": {task: with_cost([trial.lost[task] for trial in trials]) for task in trials[0].lost},
    }


def main(options: Options) -> None:
    """Writes one JSON."""
    trials = lowered(stored_basis(Checkpoint.open(options.model)), options.journal)
    rows = []
    for part in ("qk", "v"):
        of_part = [trial for trial in trials if trial.part == part]
        for rank in (None, *sorted({trial.rank for trial in of_part})):
            alike = [trial for trial in of_part if rank in (None, trial.rank)]
            rows.append({"part": part, "rank": rank, **correlations(alike)})
            print(rows[-1])
    results = {"correlations": rows, "trials": [trial._asdict() for trial in trials]}
    print(write_result(options.name, {"journal": options.journal.name}, results, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options))
