"""Fit of the constants of `zdc_jax.planning.costs` to measured kernels, with the error of each row.

python -m benchmarks.studies.fit_costs
"""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

from benchmarks.common import RESULTS
from zdc_jax.plan import LayerRanks
from zdc_jax.planning.costs import AttentionCall, KernelCosts

KERNELS = RESULTS / "kernels-h200.json"
N, H = 32, 128
"""Query heads and head dimension of every row of `bench_kernels`."""


class Measured(NamedTuple):
    """One measured row: the call, the ranks of its tokens, and seconds."""

    name: str
    kind: str
    call: AttentionCall
    ranks: LayerRanks
    seconds: float

    def predicted(self, costs: KernelCosts) -> float:
        """Return the seconds that the model predicts."""
        return (costs.decode if self.kind == "decode" else costs.prefill)(self.call, self.ranks)


def measured_rows(path: Path = KERNELS) -> list[Measured]:
    """Return the rows that the model describes: contiguous caches on our kernels."""
    results = json.loads(path.read_text())["results"]
    rows = (row for section in results.values() if isinstance(section, list) for row in section)
    described = ((row, _describe(row["name"])) for row in rows)
    return [Measured(row["name"], *call, 1e-3 * row["ms"]) for row, call in described if call is not None]


def _describe(name: str) -> tuple[str, AttentionCall, LayerRanks] | None:
    def alike(R, Z):
        return LayerRanks(int(R), int(Z))

    if match := re.fullmatch(r"prefill \((\d+),(\d+)\) K=(\d+)", name):
        R, Z, K = match.groups()
        return "prefill", AttentionCall(N, int(K), H, 16384), alike(R, Z)
    if match := re.fullmatch(r"decode \((\d+),(\d+)\)( ring 512)? B=(\d+) S=(\d+) K=(\d+)", name):
        R, Z, ring, B, S, K = match.groups()
        near = (512, 4) if ring else (0, 0)
        return "decode", AttentionCall(N, int(K), H, int(S), int(B), *near), alike(R, Z)
    if match := re.fullmatch(r"window 512 alone S=(\d+)", name):
        call = AttentionCall(N, N, H, int(match[1]), window=512, sinks=4)
        return "prefill", call, alike(0, 0)
    if match := re.fullmatch(r"\((\d+),(\d+)\) alone S=(\d+)", name):
        return "prefill", AttentionCall(N, N, H, int(match[3])), alike(match[1], match[2])
    if match := re.fullmatch(r"two ranks, window 512, far \((\d+),(\d+)\)", name):
        return "prefill", AttentionCall(N, N, H, 32768, window=512, sinks=4), alike(*match.groups())
    if name == "decode window 512 alone B=16 S=8192 K=32":
        return "decode", AttentionCall(N, N, H, 8192, 16, window=512, sinks=4), alike(0, 0)
    return None


def fit(rows: list[Measured]) -> KernelCosts:
    """Fit the constants by least squares of relative errors."""
    prefill = [row for row in rows if row.kind == "prefill"]
    decode = [row for row in rows if row.kind == "decode"]
    far = _least_squares([row.call.prefill_terms(row.ranks) / row.seconds for row in prefill])
    cached = _least_squares([row.call.decode_terms(row.ranks) / row.seconds for row in decode])
    return KernelCosts(*far, *cached)


def _least_squares(terms: list[np.ndarray]) -> list[float]:
    scale = np.abs(terms).max(0)
    return (np.linalg.lstsq(np.array(terms) / scale, np.ones(len(terms)))[0] / scale).tolist()


def main() -> None:
    """Print the constants and the rows."""
    rows = measured_rows()
    costs = fit(rows)
    for name, value in asdict(costs).items():
        print(f"{name}={value:.4g}")
    for row in rows:
        ms = 1e3 * row.predicted(costs)
        print(f"{row.name:44} {1e3 * row.seconds:8.3f} ms, model {ms:8.3f} {ms / 1e3 / row.seconds - 1:+.1%}")


if __name__ == "__main__":
    tyro.cli(main)
