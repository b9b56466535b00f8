"""`zdc demo`: convert and calibrate a model, quantize its KV cache, and ask about something said long before.

The same questions are put to the 16-bit cache, to the quantized cache of the plan, and to a cache that spends
the plan's bytes on recent tokens alone.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from convert import demo_checkpoint
from convert.calibration.calibrate import CalibrationOptions, calibrate, calibration_windows
from convert.cli.demo_questions import Question, answer_questions, write_questions
from convert.cli.demo_report import (
    CacheResult,
    draw_chart,
    print_commands,
    print_example,
    print_table,
    write_report,
)
from convert.cli.demo_text import write_text
from convert.conversion import convert, open_source
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.errors import CheckpointError, ConversionError
from zdc_jax.evaluation.perplexity import bootstrap_interval, token_nll
from zdc_jax.loading import LanguageModel, load
from zdc_jax.methods.coded import Settings
from zdc_jax.plan import CompressionPlan, LayerRanks

SETTINGS = Settings(bits_k=4, bits_v=4, bits_index=6, index=16, read=0, bits_near=8)
"""Precision of the quantized cache, the same in all layers."""
SINKS, WINDOW = 4, 64
"""First and recent tokens that the plan keeps in 8 bits."""
BYTES_DTYPE = "bfloat16"
"""Dtype in which the bytes of unquantized numbers are counted, whatever a CPU computes in."""
MARKER = ".zdc-demo"
"""Name of a file in folders that the demo made and may write to again."""


@dataclass(frozen=True)
class DemoSize:
    """Amounts of text in tokens, windows and questions.

    lead, distance: tokens before a fact, and between a fact and the question about it.
    """

    context: int = 1792
    lead: int = 150
    distance: int = 1500
    calibration_windows: int = 20
    heldout_windows: int = 8
    questions: int = 12
    batch: int = 6


FULL_SIZE = DemoSize()


def demo(
    output: Path, console: Console, source: Path | None = None, *, size: DemoSize = FULL_SIZE
) -> list[CacheResult]:
    """Run the demo; print a table and write model, plan, chart and report.

    Args:
      output: folder to write.
      source: Hugging Face folder or GGUF file; default the checkpoint that ships.
      size: amounts of text.

    Raises:
      CheckpointError: `output` holds something and was not made by the demo.
      ConversionError: the source cannot be converted, or has too few positions.
    """
    began = time.perf_counter()
    path = source or demo_checkpoint.PATH
    if (most := open_source(path).config(choose_dtype()).max_positions) < size.context:
        raise ConversionError(f"{path} has {most} positions, the demo needs {size.context}")
    claim_folder(output)
    checkpoint = convert(path, output / "model", dtype=choose_dtype(), overwrite=True, progress=False)
    text = write_text(output / "text")
    console.print(f"converted {checkpoint.config.num_layers} layers; calibrating")
    basis = calibrate_model(checkpoint, text.calibration, size)
    plan = make_plan(checkpoint, basis)
    plan.save(output / "plan.json")
    windows = cut_windows(checkpoint, text.heldout, size)
    dense = load(checkpoint.path, dtype=choose_dtype())
    questions = write_questions(
        dense, text.read_prose(), count=size.questions, lead=size.lead, distance=size.distance
    )
    (output / "prompt.txt").write_text(questions[0].text)
    results = list(measure_caches(checkpoint, dense, plan, windows, questions, size))
    title = f"{path.name}, {size.context:,} tokens"
    print_example(console, questions, results)
    print_table(console, results, title)
    draw_chart(results, output / "chart.png", title)
    head = {"source": path.name, "context": size.context, "basis": [basis.qk_kind, basis.vo_kind]}
    write_report(output / "report.json", head, questions, results)
    console.print(
        f"wrote {output}/chart.png, report.json, plan.json; {time.perf_counter() - began:.0f} s in all"
    )
    print_commands(console, output, questions[0], chat=dense.chat_template is not None, context=size.context)
    return results


def choose_dtype() -> str:
    """Return the dtype to compute in."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def claim_folder(output: Path) -> None:
    """Mark `output` as the demo's own; refuse a folder with other content, which would be replaced."""
    marker = output / MARKER
    if output.exists() and not marker.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(
            f"{output} is neither empty nor made by the demo; choose another folder with --output"
        )
    output.mkdir(parents=True, exist_ok=True)
    marker.touch()


def calibrate_model(checkpoint: Checkpoint, text: Path, size: DemoSize) -> Basis:
    """Calibrate the balanced basis on windows of text."""
    options = CalibrationOptions(
        tokens=size.calibration_windows * size.context,
        context=size.context,
        qk="balanced",
        vo="balanced",
        profile=False,
    )
    return calibrate(checkpoint.path, [text], options, dtype=choose_dtype())


def cut_windows(checkpoint: Checkpoint, text: Path, size: DemoSize) -> np.ndarray:
    """Return windows of held-out text, int32 [W, T]."""
    options = CalibrationOptions(tokens=size.heldout_windows * size.context, context=size.context)
    windows, _ = calibration_windows(checkpoint, [text], size.context, options)
    return windows


def make_plan(checkpoint: Checkpoint, basis: Basis) -> CompressionPlan:
    """Return the plan that quantizes all coordinates of the calibrated basis, the same in every layer."""
    config, H = checkpoint.config, checkpoint.config.head_dim
    plan = CompressionPlan.of_layers(
        config,
        [LayerRanks(H, H)] * config.num_layers,
        window=WINDOW,
        sinks=SINKS,
        method="coded",
        settings=SETTINGS,
    )
    return plan.for_model(checkpoint.fingerprint, basis.coordinates_hash)


def make_window_plan(config: ModelConfig, plan: CompressionPlan, context: int) -> CompressionPlan:
    """Return the plan of sinks and the shortest window that stores at least as many bytes as `plan`."""

    def make(window: int) -> CompressionPlan:
        ranks = [LayerRanks(config.head_dim, config.head_dim)] * config.num_layers
        made = CompressionPlan.of_layers(config, ranks, window=window, sinks=SINKS, method="window")
        return replace(made, rotated=False)

    def count_bytes(window: int) -> int:
        return make(window).bytes(context, 1, BYTES_DTYPE)

    wanted = plan.bytes(context, 1, BYTES_DTYPE)
    return make(1 + bisect_left(range(1, context), wanted, key=count_bytes))


def measure_caches(
    checkpoint: Checkpoint,
    dense: LanguageModel,
    plan: CompressionPlan,
    windows: np.ndarray,
    questions: list[Question],
    size: DemoSize,
) -> Iterator[CacheResult]:
    """Yield the measurements of the 16-bit cache, the plan, and a window of the plan's bytes."""
    window_plan = make_window_plan(checkpoint.config, plan, size.context)
    dense_nll = token_nll(dense.network, windows)
    full_bytes = dense.plan.bytes(size.context, 1, BYTES_DTYPE)
    for name, each in (("16 bits", None), ("plan", plan), ("window", window_plan)):
        model = dense if each is None else load(checkpoint.path, each, dtype=choose_dtype())
        nll = dense_nll if each is None else token_nll(model.network, windows)
        changes = (nll - dense_nll).mean(1, dtype=np.float64)
        stored = model.plan.bytes(size.context, 1, BYTES_DTYPE)
        yield CacheResult(
            name=name,
            bytes_per_token=stored / size.context,
            share=stored / full_bytes,
            perplexity=float(np.exp(nll.mean(dtype=np.float64))),
            increase=float(np.expm1(changes.mean())),
            interval=bootstrap_interval(changes),
            answers=answer_questions(model, questions, batch=size.batch),
        )
