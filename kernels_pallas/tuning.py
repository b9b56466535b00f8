"""Measured tile sizes in `tuned/<device>.json`, written by `python -m benchmarks.kernels.tune_kernels`."""

import functools
import json
from pathlib import Path
from typing import Any

import jax

FOLDER = Path(__file__).parent / "tuned"

lowered_for: str | None = None
"""Kind of GPU that kernels are lowered for, in a process that has none."""


def file_of(device_kind: str) -> Path:
    """Return the path of a device's table, whether it exists or not."""
    return FOLDER / (device_kind.lower().replace(" ", "_") + ".json")


@functools.cache
def _table(device_kind: str) -> dict[str, Any]:
    path = file_of(device_kind)
    return json.loads(path.read_text()) if path.exists() else {}


def has_table(device_kind: str) -> bool:
    """Return whether tile sizes were measured on this kind of device; others use default ones."""
    return file_of(device_kind).exists()


def measured(kernel: str, **widths: int) -> dict[str, Any] | None:
    """Return the fastest measured config of a kernel at these widths on this device, or None."""
    kind = lowered_for or (jax.local_devices()[0].device_kind if jax.default_backend() == "gpu" else None)
    entries = _table(kind).get(kernel, []) if kind else []
    return next((entry["config"] for entry in entries if entry["widths"] == widths), None)
