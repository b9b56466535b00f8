"""Kernels that a call runs on a GPU, read from a trace of JAX's profiler."""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill of a trace.

    Attributes:
      name: name without the numbers that XLA appends.
      operation: path of the JAX operation, empty if the trace has none.
      begin: begin in nanoseconds.
      duration: duration in nanoseconds.
    """

    name: str
    operation: str
    begin: float
    duration: float

    @property
    def end(self) -> float:
        """End in nanoseconds."""
        return self.begin + self.duration


def trace_kernels(call: Callable[[], Any]) -> list[Kernel]:
    """Return the kernels of a call in the order of their begin; none on a CPU.

    The call should have run before, so that nothing is compiled in the trace.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.xplane.pb")
        return read_kernels(path)


def read_kernels(path: Path) -> list[Kernel]:
    """Return the kernels of a trace file (`*.xplane.pb`) in the order of their begin."""
    found = []
    for plane in ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                operation = str(stats.get("tf_op", stats.get("name", ""))).removesuffix(":")
                name = re.sub(r"[._]?[0-9]+", "", event.name)
                found.append(Kernel(name, operation, event.start_ns, event.duration_ns))
    return sorted(found, key=lambda kernel: kernel.begin)


def waits_ns(kernels: list[Kernel]) -> list[float]:
    """Return the nanoseconds before each kernel in which none ran.

    `kernels` are in the order of their begin.
    """
    waits, reached = [], kernels[0].begin if kernels else 0.0
    for kernel in kernels:
        waits.append(max(0.0, kernel.begin - reached))
        reached = max(reached, kernel.end)
    return waits


def busy_ns(kernels: list[Kernel]) -> float:
    """Return the nanoseconds in which at least one kernel ran; `kernels` are in the order of their begin."""
    if not kernels:
        return 0.0
    return max(kernel.end for kernel in kernels) - kernels[0].begin - sum(waits_ns(kernels))
