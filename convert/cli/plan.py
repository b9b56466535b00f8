"""`zdc plan`: a compression plan as a JSON file, described by flags or searched."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional

from convert.cli.flags import ModelFolder
from convert.cli.output import check_output
from convert.cli.plan_flags import PlanFlags
from convert.cli.search_flags import SearchFlags
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import PlanError
from zdc_jax.loading import stored_basis
from zdc_jax.plan import CompressionPlan
from zdc_jax.planning.certificate import certificate


@dataclass
class Plan:
    """Write a compression plan as JSON and print it. The plan is described by flags or found by a search.

    Attributes:
      path: Converted and calibrated folder.
      output: JSON file to write. A search also writes PLAN.front.json and PLAN.front.png with the best plans
        at each size, and PLAN.journal.jsonl, from which it resumes when run again.
      overwrite: Replace an existing plan. A search always does.
    """

    path: ModelFolder
    output: Annotated[Positional[Path], tyro.conf.arg(metavar="PLAN.json")]
    flags: Annotated[PlanFlags, tyro.conf.arg(name="")] = field(default_factory=PlanFlags)
    search: Annotated[SearchFlags, tyro.conf.arg(name="")] = field(default_factory=SearchFlags)
    overwrite: bool = False

    def run(self, console: Console) -> None:
        self.search.check(self.flags)
        # A search continues where it ended, and writes the plan again.
        check_output(self.output, overwrite=self.overwrite or self.search.is_requested)
        checkpoint = Checkpoint.open(self.path)
        plan: CompressionPlan | None
        if not self.search.is_requested:
            plan = self.flags.build(self.path)
        else:
            plan = self.search.search(self.path, self.output, console, self.flags.method or "zdc")
        if plan is None:
            raise PlanError(
                "no plan described; give --preset, --budget, --max-score-error, --qk/--v, --window or "
                "--method, or --texts to search"
            )
        plan.check_model(checkpoint.config, checkpoint.fingerprint)
        if plan.basis:
            plan.check_basis(stored_basis(checkpoint).coordinates_hash)
        plan.save(self.output)
        console.print_json(self.output.read_text())
        _report_savings(plan, checkpoint)


def _report_savings(plan: CompressionPlan, checkpoint: Checkpoint) -> None:
    """Print to standard error the size of a plan's cache at the model's positions, and its certificate."""
    config, full = checkpoint.config, CompressionPlan.full(checkpoint.config)
    stored, stored_full = (each.bytes(config.max_positions, 1, "bfloat16") for each in (plan, full))
    share = stored / stored_full
    cut, layers = sum(ranks.qk == 0 for ranks in plan.layers), config.num_layers
    print(
        f"KV cache: {share:.1%} of a 16-bit cache's bytes at {config.max_positions:,} tokens; "
        f"{cut} of {layers} layers drop all tokens outside the window",
        file=sys.stderr,
    )
    read, read_full = (each.bytes_read(config.max_positions, "bfloat16") for each in (plan, full))
    if (read_share := read / read_full) < share - 1e-3:
        print(f"decoding a token reads {read_share:.1%} of a 16-bit cache's bytes", file=sys.stderr)
    if plan.rotated and cut < layers and (checkpoint.calibration_path / "basis").exists():
        print(f"certificate: {certificate(plan, stored_basis(checkpoint))}", file=sys.stderr)
