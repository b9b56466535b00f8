"""`zdc evaluate`: perplexity and long-range tasks under a plan, compared with the unmodified model."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional

from convert.cli.flags import DtypeFlag, ModelFolder, PlanFlag, show_default, show_repeated
from convert.cli.output import check_output
from convert.progress import counted
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import EvaluationError, NonFiniteError, TextError
from zdc_jax.evaluation.answers import Protocol
from zdc_jax.evaluation.evaluate import TASKS, evaluate, prepare, reads_text
from zdc_jax.evaluation.text import read_documents
from zdc_jax.files import whole_file
from zdc_jax.loading import load
from zdc_jax.plan import CompressionPlan


@dataclass
class Evaluate:
    """Measure perplexity and long-range tasks with a plan and without it, on the same text.

    The retention of a task is the factor by which the probability of right answers changes; 1 means no loss.

    Attributes:
      path: Converted folder.
      texts: Text files or folders, best of text that calibration did not read. A third of the text is read,
        which `zdc plan` does not search on. Tasks of RULER without a haystack of text need none.
      tasks: Measurements to make. copy@1024 is the task copy at a distance of 1024 tokens, long_agreement
        compares 2,000 generated tokens, and ruler stands for all tasks of RULER.
      contexts: Context lengths in tokens, questions included, and answers of RULER.
      protocol: Attention inside a context. cached: through the compressed cache; exact: uncompressed, so that
        only the questions see the compressed cache.
      max_documents: Most documents with questions per context length. Measuring stops earlier once fewer are
        conclusive. Tasks of RULER have as many samples each, and read all of them.
      batch: Contexts to run at once.
      seed: Seed that chooses text and the facts put into it.
      dtype: Dtype to run in.
      output: JSON file for the printed report.
    """

    path: ModelFolder
    texts: Annotated[Positional[tuple[Path, ...]], show_repeated("TEXT", "required by most tasks")]
    flags: Annotated[PlanFlag, tyro.conf.arg(name="")] = field(default_factory=PlanFlag)
    tasks: tuple[str, ...] = TASKS
    contexts: Annotated[tuple[int, ...], show_default("the model's positions, at most 4096")] = ()
    protocol: Protocol = "cached"
    max_documents: int = 128
    batch: int = 1
    seed: int = 0
    dtype: DtypeFlag = None
    output: Annotated[Path | None, show_default("none")] = None

    def run(self, console: Console) -> None:
        if not self.texts and (reading := [task for task in self.tasks if reads_text(task)]):
            raise TextError(
                "TEXT is missing; give at least one text file or folder after the model's folder, or leave "
                f"out tasks that read text: {', '.join(reading)}"
            )
        if self.batch < 1:
            raise EvaluationError(f"--batch {self.batch}: must be at least 1")
        if self.output is not None:
            check_output(self.output)
        checkpoint = Checkpoint.open(self.path)
        plan = self.flags.build(self.path)
        if self.protocol == "exact" and plan is not None and not plan.settings.reads_exactly:
            raise EvaluationError(
                f"--protocol exact: not for plans of method {plan.method}; use --protocol cached"
            )
        materials = prepare(
            checkpoint.config,
            checkpoint.tokenizer(),
            plan or CompressionPlan.full(checkpoint.config),
            read_documents(self.texts) if self.texts else (),
            tasks=self.tasks,
            contexts=self.contexts,
            max_documents=self.max_documents,
            seed=self.seed,
        )
        if plan is None:
            print("no plan given: measuring the unmodified model", file=sys.stderr)
        dense = load(self.path, dtype=self.dtype).network
        network = dense if plan is None else load(self.path, plan, dtype=self.dtype).network
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
        try:
            text = json.dumps(report, indent=2, allow_nan=False)
        except ValueError as error:  # JSON has no NaN.
            raise NonFiniteError("results are", network.dtype.name) from error
        console.print_json(text)
        if self.output is not None:
            with whole_file(self.output) as file:
                file.write_text(text + "\n")
