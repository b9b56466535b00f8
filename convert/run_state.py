"""State of a run of `zdc compress` in its output: the plans to judge, and what was measured of them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zdc_jax.errors import CheckpointError
from zdc_jax.files import load_json, whole_file
from zdc_jax.plan import CompressionPlan

STATE_FILE = "compress.json"
"""File in the output that lets an interrupted run continue."""
STATE_FORMAT = 2
"""Version of the state file. An interrupted run of another version cannot continue."""


@dataclass(frozen=True)
class Candidate:
    """Plan to judge.

    Attributes:
      plan: the plan.
      loss: loss that the search predicts, in shares of its limit; None if it predicts none.
    """

    plan: CompressionPlan
    loss: float | None = None


@dataclass
class RunState:
    """Measurements of a run so far, in a file of the output.

    Attributes:
      path: the file.
      run: source, text and options of the run.
      is_done: whether the plan is chosen.
      candidates: plans to judge by name, the smallest first; empty before the search.
      seconds: time of the search.
      reports: report of each plan, by name.
    """

    path: Path
    run: dict[str, Any]
    is_done: bool = False
    candidates: dict[str, Candidate] = field(default_factory=dict)
    seconds: float = 0.0
    reports: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, output: Path, run: dict[str, Any], *, overwrite: bool) -> "RunState":
        """Continue an interrupted run of the same options, or begin a new one.

        Raises:
          CheckpointError: the output exists, and is not from an interrupted run of these options.
        """
        path, run = output / STATE_FILE, {"format": STATE_FORMAT, **run}
        if overwrite or not output.exists():
            return cls(path, run)
        stored = load_json(path) if path.exists() else None
        if not isinstance(stored, dict) or stored.get("run") != run or stored.get("done"):
            raise CheckpointError(
                f"{output} exists, and no interrupted run with the same options made it; "
                "pass --overwrite to replace it, or choose another folder"
            )
        candidates = {
            name: Candidate(CompressionPlan.from_json(value["plan"], path), value["loss"])
            for name, value in stored["candidates"].items()
        }
        return cls(path, run, False, candidates, stored["seconds"], stored["reports"])

    def save(self) -> None:
        """Write the state atomically."""
        value = {
            "run": self.run,
            "done": self.is_done,
            "candidates": {
                name: {"plan": each.plan.to_json(), "loss": each.loss}
                for name, each in self.candidates.items()
            },
            "seconds": self.seconds,
            "reports": self.reports,
        }
        with whole_file(self.path) as file:
            file.write_text(json.dumps(value, indent=1) + "\n")
