"""`zdc inspect`: the model and the calibration in a converted folder."""

from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from rich.console import Console

from convert.cli.basis_report import report_basis
from convert.cli.flags import ModelFolder
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import LayerSpec, ModelConfig, RopeConfig
from zdc_jax.loading import stored_basis


@dataclass
class Inspect:
    """Print the model and the calibration in a converted folder.

    Attributes:
      path: Converted folder.
      check: Recompute the hashes of all files and compare them with the manifest.
    """

    path: ModelFolder
    check: bool = False

    def run(self, console: Console) -> None:
        checkpoint = Checkpoint.open(self.path)
        if self.check:
            checkpoint.check()
            console.print("all hashes match")
        summary = {"layers": _describe_layers(checkpoint.config), "fingerprint": checkpoint.fingerprint}
        console.print_json(data=checkpoint.config.to_json() | summary)
        if (checkpoint.calibration_path / "basis").exists():
            report_basis(console, stored_basis(checkpoint))
        else:
            console.print(
                "not calibrated: presets 8bit and 4bit work, 3bit and searched plans need a calibration; "
                f"{checkpoint.calibration_advice}",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )


def _describe_layers(config: ModelConfig) -> list[dict[str, Any]]:
    """Return runs of equal layers: their count, and their settings that differ from the defaults."""
    runs = [(layer, len(list(run))) for layer, run in groupby(config.layers)]
    return [{"count": count} | _list_changes(layer) for layer, count in runs]


def _list_changes(spec: LayerSpec | RopeConfig) -> dict[str, Any]:
    """Return the fields that differ from their defaults, also those of dataclasses in fields."""
    values = ((each.name, getattr(spec, each.name), each.default) for each in fields(spec))
    return {
        name: _list_changes(value) if isinstance(value, RopeConfig) else value
        for name, value, default in values
        if value != default
    }
