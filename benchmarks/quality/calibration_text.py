"""Loss by calibration on Python's documentation instead of real text, on one model.

    python -m benchmarks.quality.calibration_text --model model.gguf --texts corpus/ --heldout heldout/

The model is converted in float32 and calibrated on both texts, with the same number of tokens. Presets `4bit`
and `3bit` are judged on held-out text: perplexity, and divergence from the unmodified model. `4bit` without
any calibration is a third side.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.common import RESULTS, commit, earlier, environment, write_result
from convert.calibration.calibrate import CalibrationOptions, calibrate
from convert.conversion import convert
from convert.default_text import write_default_text
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.evaluation.evaluate import Evaluation, prepare
from zdc_jax.evaluation.text import read_documents
from zdc_jax.loading import load, stored_basis
from zdc_jax.plan import CompressionPlan
from zdc_jax.presets import coded_plan, preset_settings

DTYPE = "float32"


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      model: GGUF file, or Hugging Face folder.
      texts: real text to calibrate on.
      heldout: text to judge on, of other topics.
      tokens: tokens of each calibration.
      context: tokens of a window.
      windows: windows of held-out text.
      seed: seed that chooses the windows.
    """

    model: Path
    texts: tuple[Path, ...]
    heldout: tuple[Path, ...]
    tokens: int = 16_384
    context: int = 1024
    windows: int = 8
    seed: int = 5
    name: str = "calibration-text"
    results: Path = RESULTS


def calibrate_all(options: Options, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield each side's name and its converted folder; the first has no calibration."""
    convert(options.model, folder / "none", dtype=DTYPE, progress=False)
    yield "none", folder / "none"
    default = write_default_text(folder / "text")
    for name, texts in (("Python's documentation", [default]), ("real text", [*options.texts])):
        shutil.copytree(folder / "none", folder / name)
        settings = CalibrationOptions(tokens=options.tokens, context=options.context, profile=False)
        calibrate(folder / name, texts, settings, dtype=DTYPE, progress=False)
        yield name, folder / name


def list_plans(folder: Path, *, calibrated: bool) -> dict[str, CompressionPlan]:
    """Return the presets to judge by name."""
    checkpoint = Checkpoint.open(folder)
    basis = stored_basis(checkpoint) if calibrated else None
    names = ("4bit", "3bit") if calibrated else ("4bit",)
    return {
        name: coded_plan(checkpoint, basis, preset_settings(name, checkpoint.config.head_dim))
        for name in names
    }


def measure(options: Options, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each text and preset."""
    evaluation = None
    for text, converted in calibrate_all(options, folder):
        if evaluation is None:
            evaluation = _prepare_evaluation(options, converted)
        for preset, plan in list_plans(converted, calibrated=text != "none").items():
            began = time.monotonic()
            report = evaluation.evaluate(load(converted, plan, dtype=DTYPE).network).perplexity
            assert report is not None
            yield {
                "model": options.model.stem,
                "text": text,
                "preset": preset,
                "windows": report.windows,
                "increase": report.increase,
                "interval": report.interval,
                "kl": report.kl,
                "top1": report.top1,
                "seconds": time.monotonic() - began,
                "commit": commit(),
            }


def _prepare_evaluation(options: Options, converted: Path) -> Evaluation:
    checkpoint = Checkpoint.open(converted)
    (material,) = prepare(
        checkpoint.config,
        checkpoint.tokenizer(),
        CompressionPlan.full(checkpoint.config),
        read_documents(options.heldout),
        tasks=("perplexity",),
        contexts=(options.context,),
        max_documents=options.windows,
        seed=options.seed,
    )
    dense = load(converted, dtype=DTYPE).network
    return Evaluation(dense, material, protocol="cached", batch=1)


def main(options: Options) -> None:
    """Measure one model; after each row write those of all models to one file."""
    settings = {name: getattr(options, name) for name in ("tokens", "context", "windows", "seed")}
    device = environment()["device"]
    rows = earlier(options.results / f"{options.name}.json", settings, device)
    rows = [row for row in rows if row["model"] != options.model.stem]
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(options, Path(folder)):
            rows.append(row)
            print(f"{row['text']}, {row['preset']}: {row['increase']:+.2%}, KL {row['kl']:.4f}", flush=True)
            write_result(options.name, settings, rows, options.results)


if __name__ == "__main__":
    main(tyro.cli(Options))
