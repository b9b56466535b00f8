"""What single layers bear: of each, far tokens left out, keys in few bits, or values, all else in eight bits.

    python -m benchmarks.quality.coded_layers --journal coded.journal.jsonl --name coded-layers-smollm2-135m \
        --measured "one H200, commit 2e555ed"

The journal is that of a search for plans of method `coded`. No model runs.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.common import RESULTS, write_result
from zdc_jax.errors import PlanError
from zdc_jax.evaluation.retention import LEAST_SCORE
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.layer_costs import Precision, build_layer

WHOLE = 8
"""Bits of all other layers."""


@dataclass(frozen=True)
class Options:
    """journal: beside the plan that the search wrote. measured: where it ran, device and commit."""

    journal: Path
    name: str
    measured: str
    results: Path = RESULTS


def single_layers(journal: Path) -> list[dict[str, Any]]:
    """A row for each trial of the journal in which one layer differs from eight bits.

    Raises:
      PlanError: there is none.
    """
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    dense = {entry["key"]: entry for entry in entries if entry["plan"] is None}
    rows = []
    for entry in entries:
        if entry["plan"] is None or entry["key"] not in dense:
            continue
        plan = CompressionPlan.from_json(entry["plan"], journal)
        eight = Precision(plan.head_dim, WHOLE)
        lower = [(i, ranks) for i, ranks in enumerate(plan.layers) if ranks != build_layer(eight, eight)]
        if len(lower) == 1:
            rows.append(_row(*lower[0], entry, dense[entry["key"]]))
    if not rows:
        raise PlanError(f"{journal} holds no trial in which one layer alone differs from {WHOLE} bits")
    return sorted(rows, key=lambda row: (row["layer"], row["lowered"]))


def _row(layer: int, ranks: LayerRanks, entry: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    def lost(task):
        return np.mean(entry["logs"][task]) - np.mean(dense["logs"][task])

    return {
        "layer": layer,
        "lowered": _lowered(ranks),
        "increase": float(np.expm1(np.mean(entry["nll"]) - np.mean(dense["nll"]))),
        "retention": {
            task: float(np.exp(lost(task))) for task, score in dense["scores"].items() if score >= LEAST_SCORE
        },
    }


def _lowered(ranks: LayerRanks) -> str:
    if ranks.qk == 0:
        return "no far tokens"
    codes: Any = ranks.settings
    sides = (("keys", ranks.qk, codes.bits_k), ("values", ranks.v, codes.bits_v))
    return ", ".join(
        f"{rank} coordinates of {side} in {bits} bits" for side, rank, bits in sides if bits < WHOLE
    )


def main(options: Options) -> None:
    """Writes one JSON."""
    rows = single_layers(options.journal)
    config = {"journal": options.journal.name, "measured": options.measured}
    print(write_result(options.name, config, rows, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options))
