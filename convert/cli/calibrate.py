"""`zdc calibrate`: the basis of a converted folder, from text."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional

from convert.calibration.calibrate import CalibrationOptions, calibrate
from convert.cli.basis_report import report_basis
from convert.cli.flags import DtypeFlag, ModelFolder
from convert.cli.output import check_writable
from convert.default_text import write_default_text
from zdc_jax.errors import TextError


@dataclass
class Calibrate:
    """Calibrate a converted folder on text: moments, basis, spectrum, error certificate and profile.

    Attributes:
      path: Converted folder.
      texts: Text files (.txt, .jsonl, .md, .rst, .py, also .xz or .gz) or folders of them. Each folder is a
        topic.
      from_moments: Read no text, but make another basis from the moments of an earlier calibration. --qk auto
        and --vo auto then mean balanced, and no profile is stored.
      overwrite: Replace an existing basis and its profile. Plans made with the old basis no longer load.
      dtype: Dtype to run in.
    """

    path: ModelFolder
    texts: Annotated[
        Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="[TEXT ...]", help_behavior_hint="(default: the documentation of Python)"),
    ] = ()
    from_moments: bool = False
    options: Annotated[CalibrationOptions, tyro.conf.arg(name="")] = field(default_factory=CalibrationOptions)
    overwrite: bool = False
    dtype: DtypeFlag = None

    def run(self, console: Console) -> None:
        if self.texts and self.from_moments:
            raise TextError("--from-moments: reads no text; drop it, or drop TEXT")
        check_writable(self.path)
        with TemporaryDirectory() as scratch:
            texts: Sequence[Path] = self.texts
            if not texts and not self.from_moments:
                print("no TEXT given: calibrating on the documentation that Python ships", file=sys.stderr)
                texts = [write_default_text(Path(scratch) / "python-documentation")]
            basis = calibrate(self.path, texts, self.options, overwrite=self.overwrite, dtype=self.dtype)
        report_basis(console, basis)
