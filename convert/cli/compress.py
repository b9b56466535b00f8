"""`zdc compress`: one command from a checkpoint to a judged plan."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from convert.cli.flags import show_default
from convert.compress import CompressOptions, Outcome, compress
from convert.judging import MARGIN, Row

COLUMNS = ("bytes", "tokens that fit", "perplexity", "KL", "worst task", "tokens/s")
"""Columns of numbers in the final table. All digits fit into 80 characters."""


@dataclass
class Compress:
    """Convert a model, calibrate it, choose a plan and judge it; then `zdc serve OUTPUT` uses the plan.

    An interrupted command continues when it is run again with the same flags.

    Attributes:
      source: Hugging Face folder or GGUF file.
      output: Folder to write.
      texts: Text files or folders, best text like yours. The choice and the judgement read different thirds.
        Needed for contexts above 8,192 tokens.
      overwrite: Replace an existing output folder.
    """

    source: Annotated[Positional[Path], tyro.conf.arg(metavar="MODEL")]
    output: Annotated[Positional[Path], tyro.conf.arg(metavar="OUTPUT")]
    options: Annotated[CompressOptions, tyro.conf.arg(name="")] = field(default_factory=CompressOptions)
    texts: Annotated[tuple[Path, ...], show_default("documentation and code of Python's library")] = ()
    overwrite: bool = False

    def run(self, console: Console) -> None:
        began = time.monotonic()

        def say(text: str) -> None:
            minutes, seconds = divmod(int(time.monotonic() - began), 60)
            print(f"{minutes:3}:{seconds:02} {text}", file=sys.stderr, flush=True)

        outcome = compress(
            self.source, self.output, self.texts, self.options, overwrite=self.overwrite, watch=say
        )
        _print_outcome(console, outcome, self)


def _print_outcome(console: Console, outcome: Outcome, command: Compress) -> None:
    table = Table(title=f"at {command.options.context:,} tokens", box=SIMPLE_HEAD)
    rows = [_list_cells(row) for row in outcome.rows]
    table.add_column("cache", overflow="fold")
    for column, cells in zip(COLUMNS, list(zip(*rows, strict=True))[1:], strict=True):
        table.add_column(column, justify="right", min_width=max(map(len, cells)))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if not outcome.within:
        most, least = command.options.max_loss, command.options.min_retention
        console.print(
            f"no plan holds the limits ({most:.1%} of perplexity, every task at {least:.1%} with an interval "
            f"above {least - MARGIN:.1%}); the folder keeps the plan of 8 bits",
            soft_wrap=True,
        )
    console.print(f"next: zdc serve {command.output}", soft_wrap=True, highlight=False)


def _list_cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.share:.1%}",
        "unknown" if row.tokens_that_fit is None else f"{row.tokens_that_fit:,}",
        f"{row.increase:+.2%}",
        "" if row.kl is None else f"{row.kl:.4f}",
        "" if row.worst is None else f"{row.worst:.3f}",
        f"{row.tokens_per_second:,.0f}",
    )
