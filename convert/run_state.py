"""A run of `zdc compress`: its options, and its state in the output, with what was measured so far."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zdc_jax.errors import CheckpointError, EvaluationError
from zdc_jax.files import load_json, whole_file
from zdc_jax.plan import CompressionPlan

LEAST_CONTEXT = 1024
"""Shortest context in tokens. The questions of all tasks need several hundred."""
STATE_FILE = "compress.json"
"""File in the output that lets an interrupted run continue."""
STATE_FORMAT = 3
"""Version of the state file. An interrupted run of another version cannot continue."""


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    """Options of `compress`.

    Attributes:
      max_loss: Largest relative increase of perplexity, such as 0.01 for 1 %.
      min_retention: Smallest share of each task that the plan must keep.
      context: Context length to calibrate, search and judge at, in tokens.
      minutes: Time after which no further plan is searched. The judgement follows in any case.
      tokens: Tokens of text to calibrate on. At least one context is read.
      documents: Most documents with task questions in the judgement. Below 50, losses in single documents
        can stay hidden. The search reads half as many, at most 12. Tasks of RULER have
        two samples for each document, at most 100.
      seed: Seed that chooses text and facts.
    """

    max_loss: float = 0.01
    min_retention: float = 0.97
    context: int = 8192
    minutes: float = 5.0
    tokens: int = 32_768
    documents: int = 56
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.max_loss < 1:
            raise EvaluationError(f"max_loss={self.max_loss} must lie between 0 and 1, such as 0.01 for 1 %")
        if not 0 < self.min_retention < 1:
            raise EvaluationError(
                f"min_retention={self.min_retention} must lie between 0 and 1, such as 0.97 for 97 %"
            )
        if not self.minutes > 0:
            raise EvaluationError(f"minutes={self.minutes} must be above 0")
        for name, least in (("context", LEAST_CONTEXT), ("documents", 1), ("tokens", 1), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                raise EvaluationError(f"{name}={value} must be at least {least}")


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
      options: options of the run.
      run: source, text and options as JSON. A run continues only with the same ones.
      is_done: whether the plan is chosen.
      candidates: plans to judge by name, the smallest first; empty before the search.
      seconds: time of the search.
      reports: report of each plan, by name.
    """

    path: Path
    options: CompressOptions
    run: dict[str, Any]
    is_done: bool = False
    candidates: dict[str, Candidate] = field(default_factory=dict)
    seconds: float = 0.0
    reports: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(
        cls, output: Path, options: CompressOptions, source: Path, texts: list[str], *, overwrite: bool
    ) -> "RunState":
        """Continue an interrupted run of the same options, or begin a new one.

        Raises:
          CheckpointError: the output exists, and is not from an interrupted run of these options.
        """
        path = output / STATE_FILE
        run = {"format": STATE_FORMAT, "source": str(source.resolve()), "texts": texts, **asdict(options)}
        if overwrite or not output.exists():
            return cls(path, options, run)
        stored = load_json(path) if path.exists() else None
        if not isinstance(stored, dict) or stored.get("run") != run or stored.get("done"):
            raise CheckpointError(
                f"{output} exists, and no interrupted run with the same options and version made it; "
                "pass --overwrite to replace it, or choose another folder"
            )
        candidates = {
            name: Candidate(CompressionPlan.from_json(value["plan"], path), value["loss"])
            for name, value in stored["candidates"].items()
        }
        return cls(path, options, run, False, candidates, stored["seconds"], stored["reports"])

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
