"""What `bench_sequence_parallel` measures, in order of business, and what its figures say together."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.mesh.rivals.methods import Method
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.payload import Payload
from zdc_jax.parallel.weights import WeightPlacement


@dataclass(frozen=True)
class Row:
    """One way to a prompt's first token: `method` None is one device, `near` None a full plan.

    partition: of the prompt over devices, for `runahead` (KV-Runahead) only.
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
    "ring_plan": Row("ring", "window"),  # The kernels cannot skip sinks of keys that go round.
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
"""A row's name alone: its time to the first token and bytes; with `:parts`, one layer's attention in parts,
with `:numerics`, its errors at the timed length; with `:check`, two layers' errors on a short prompt."""
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
    """Seconds of a figure; None where there are none."""
    times = out.get(key)
    return float(np.median(times)) if isinstance(times, list) else None


def compare(results: dict[str, Any], layers: int) -> None:
    """Writes into each row, as `compared`, what follows from its figures and from its peers' of that length.

    speedup_over: times to the first token of peers over this one's. of_dense: bytes and exchange as shares of
    dense Ulysses'. together_over_sum: near attention and exchange in one program over both alone.
    exchange_share: of the exchange alone in the first token's time. rest: seconds a layer beside attention.
    Rows are compared in times only that were taken at one commit.
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
            f"speedup_over_{name}": _over(_beside(out, peer[name], "first_token"), first) for name in PEERS
        }
        compared["bytes_of_dense"] = _over(sent(out), sent(peer["dense"]))
        compared["exchange_of_dense"] = _over(exchange, _beside(out, peer["dense"], "exchange"))
        compared["together_over_sum"] = _over(median(out, "near_and_exchange"), alone)
        compared["exchange_share"] = _over(exchange, _over(first, layers))
        if first is not None and attention is not None:
            compared["rest"] = first / layers - attention
        out["compared"] = {name: value for name, value in compared.items() if value is not None}


def sent(out: dict[str, Any]) -> float | None:
    """Bytes of a prompt that leave a device, at most; None where they are not known."""
    return out.get("bytes", {}).get("formula")


def _beside(out: dict[str, Any], peer: dict[str, Any], key: str) -> float | None:
    """Seconds of a peer's figure, where it is of the same commit."""

    def commit(row):
        return row.get("commits", {}).get(key)

    return median(peer, key) if commit(peer) == commit(out) else None


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b
