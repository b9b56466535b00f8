"""Rows and tasks of `bench_sequence_parallel`, and comparisons between its figures."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.mesh.rivals.methods import Method
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.payload import Payload
from zdc_jax.parallel.weights import WeightPlacement


@dataclass(frozen=True)
class Row:
    """One way to the first token of a prompt.

    Attributes:
      method: method of sequence parallelism; None for one device.
      near: recent tokens at full rank; None for a full plan.
      implementation: implementation of attention on GPUs.
      partition: partition of the prompt for KV-Runahead.
      weights: placement of weights.
      payload: format of the exchange.
    """

    method: Method | None
    near: Literal["window", "window and sinks"] | None
    implementation: Implementation = "pallas"
    partition: Literal["even", "searched"] = "even"
    weights: WeightPlacement = "replicated"
    payload: Payload = "native"


ROWS = {
    "dense": Row("ulysses", None, "cudnn"),
    "plan": Row("ulysses", "window and sinks"),
    "one_device": Row(None, "window and sinks"),
    "late": Row("late_ulysses", "window and sinks"),
    "all_gather": Row("all_gather", None),
    "ring": Row("ring", None),
    "runahead": Row("runahead", "window and sinks"),
    "all_gather_plan": Row("all_gather", "window and sinks"),
    "ring_plan": Row("ring", "window"),  # The kernels cannot skip sinks in keys of other devices.
    "one_device_dense": Row(None, None, "cudnn"),
    "dense_pallas": Row("ulysses", None),
    "plan_float8": Row("ulysses", "window and sinks", payload="float8"),
    "plan_gathered": Row("ulysses", "window and sinks", weights="gathered"),
    "runahead_dense": Row("runahead", None),
    "runahead_searched": Row("runahead", "window and sinks", partition="searched"),
    "all_gather_zigzag": Row("all_gather_zigzag", None),
    "ring_zigzag": Row("ring_zigzag", None),
    "dense_float8": Row("ulysses", None, "cudnn", payload="float8"),
    "dense_coded": Row("ulysses", None, payload="coded"),
    "plan_coded": Row("ulysses", "window and sinks", payload="coded"),
}
SHARDED = tuple(name for name, row in ROWS.items() if row.method not in (None, "runahead"))
PARTS = tuple(f"{name}:parts" for name in SHARDED)
NUMERICS = tuple(
    f"{name}:numerics" for name, row in ROWS.items() if row.method is not None and row.partition == "even"
)
CHECKS = tuple(f"{name}:check" for name in ROWS)
Task = Literal[*ROWS, *PARTS, *NUMERICS, *CHECKS]
"""Task: a row's name alone (TTFT and bytes), or with a suffix.

`:parts` times one layer's attention in parts, `:numerics` measures its errors at the timed length, and
`:check` measures the errors of two layers on a short prompt.
"""
TASKS: tuple[Task, ...] = (
    *(
        "dense",
        "plan",
        "one_device",
        "plan:parts",
        "dense:parts",
        "plan_float8",
        "plan_float8:parts",
        "plan:check",
    ),
    *("late", "all_gather", "ring", "runahead", "all_gather_plan", "ring_plan", "one_device_dense"),
    *("dense_pallas", "plan_gathered", "runahead_dense", "runahead_searched"),
    *("late:parts", "dense:check", "plan_float8:check", "ring:check", "runahead:check"),
    *("all_gather_zigzag", "ring_zigzag", "dense_float8", "dense_coded", "plan_coded"),
    *("all_gather_zigzag:parts", "ring_zigzag:parts", "dense_float8:parts", "dense_coded:parts"),
    *("plan_coded:parts", "all_gather_zigzag:check", "ring_zigzag:check", "dense_float8:check"),
    *("dense_coded:check", "plan_coded:check"),
    *NUMERICS,
)

PEERS = ("dense", "one_device", "one_device_dense")


def median(out: dict[str, Any], key: str) -> float | None:
    """Return the median seconds of a figure; None if it was not measured."""
    times = out.get(key)
    return float(np.median(times)) if isinstance(times, list) else None


def compare(results: dict[str, Any], layers: int) -> None:
    """Write into each row, as `compared`, the ratios of its figures to those of its peers at the same length.

    - `speedup_over_PEER`: TTFT of the peer over that of the row.
    - `bytes_of_dense`, `exchange_of_dense`: shares of the figures of dense Ulysses.
    - `together_over_sum`: recent tokens and exchange in one program, over the sum of both alone.
    - `exchange_share`: share of the exchange in the TTFT.
    - `rest`: seconds a layer without attention.

    Times are compared only within one commit.
    """
    for out in results.values():
        if not isinstance(out, dict) or "row" not in out:
            continue
        peer = {name: results.get(f"{name} {out['length']}", {}) for name in PEERS}
        first, exchange, near, attention = (
            median(out, key) for key in ("first_token", "exchange", "near", "attention")
        )
        alone = None if exchange is None or near is None else exchange + near
        compared = {
            f"speedup_over_{name}": _over(_same_commit(out, peer[name], "first_token"), first)
            for name in PEERS
        }
        compared["bytes_of_dense"] = _over(sent(out), sent(peer["dense"]))
        compared["exchange_of_dense"] = _over(exchange, _same_commit(out, peer["dense"], "exchange"))
        compared["together_over_sum"] = _over(median(out, "near_and_exchange"), alone)
        compared["exchange_share"] = _over(exchange, _over(first, layers))
        if first is not None and attention is not None:
            compared["rest"] = first / layers - attention
        out["compared"] = {name: value for name, value in compared.items() if value is not None}


def sent(out: dict[str, Any]) -> float | None:
    """Return bytes of a prompt that leave a device, at most; None if not known."""
    return out.get("bytes", {}).get("formula")


def _same_commit(out: dict[str, Any], peer: dict[str, Any], key: str) -> float | None:
    """Return the seconds of a peer's figure if it has the same commit."""

    def commit(row):
        return row.get("commits", {}).get(key)

    return median(peer, key) if commit(peer) == commit(out) else None


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b
