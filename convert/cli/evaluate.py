"""`zdc evaluate`: what a plan costs in perplexity and in tasks over long ranges."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional

from convert.cli.flags import PlanFlags, at_least_one
from convert.cli.output import check_output
from convert.progress import counted
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import Dtype
from zdc_jax.errors import EvaluationError, TextError
from zdc_jax.evaluation.answers import Protocol
from zdc_jax.evaluation.evaluate import TASKS, evaluate, prepare
from zdc_jax.evaluation.text import read_documents
from zdc_jax.files import whole_file
from zdc_jax.loading import load
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan


@dataclass
class Evaluate:
    """Perplexity and tasks over long ranges, with a plan and without, on the same text.

    A plan's retention of a task is the factor by which right answers stay as likely; 1 where nothing is lost.
    """

    path: Positional[Path]
    """Converted folder."""
    texts: Annotated[Positional[tuple[Path, ...]], at_least_one("TEXT")]
    """Text files or folders; take text that calibration did not see. A third of it is read, which a search
    leaves."""
    flags: Annotated[PlanFlags, tyro.conf.arg(name="")] = field(default_factory=PlanFlags)
    tasks: tuple[str, ...] = TASKS
    """What to measure; copy@1024 is copy at this distance."""
    contexts: tuple[int, ...] = ()
    """Tokens of contexts, questions included; default the model's positions, at most 4096."""
    protocol: Protocol = "cached"
    """Whether tokens of a context see each other as the cache holds them, or exactly, before it is filled."""
    max_documents: int = 128
    """Contexts to ask about at most; fewer are read where they tell enough."""
    batch: int = 1
    """Contexts at a time."""
    seed: int = 0
    """Chooses text and what is put into it."""
    dtype: Dtype | None = None
    """Dtype to run in; default that of the stored weights."""
    output: Path | None = None
    """JSON file to write the printed report to."""

    def run(self, console: Console) -> None:
        if not self.texts:
            raise TextError("give at least one text file or folder after the model's folder")
        if self.batch < 1:
            raise EvaluationError(f"batch={self.batch} must be >= 1")
        if self.output is not None:
            check_output(self.output)
        checkpoint = Checkpoint.open(self.path)
        plan = self.flags.build(self.path)
        if self.protocol == "exact" and plan is not None and plan.classes is not None:
            raise EvaluationError("protocol='exact' must be 'cached' for a plan with token classes")
        materials = prepare(
            checkpoint.config,
            checkpoint.tokenizer(),
            plan or CompressionPlan.full(checkpoint.config),
            read_documents(self.texts),
            tasks=self.tasks,
            contexts=self.contexts,
            max_documents=self.max_documents,
            seed=self.seed,
        )
        if plan is None:
            print("no plan given: the model is unmodified", file=sys.stderr)
        dense = load(self.path, dtype=self.dtype).network
        network = dense if plan is None else load(self.path, plan, dtype=self.dtype).network
        assert isinstance(dense, Transformer)  # Neither was loaded onto a mesh.
        assert isinstance(network, Transformer)
        with counted("batches", "reading the first context") as show:
            reports = evaluate(
                dense, network, materials, protocol=self.protocol, batch=self.batch, watch=show
            )
        report = {
            "contexts": [each.to_json() for each in reports],
            "protocol": self.protocol,
            "texts": [str(path) for path in self.texts],
            "seed": self.seed,
        }
        text = json.dumps(report, indent=2)
        console.print_json(text)
        if self.output is not None:
            with whole_file(self.output) as file:
                file.write_text(text + "\n")
