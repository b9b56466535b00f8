"""`zdc demo`: convert and calibrate a model, quantize its KV cache, and ask about something said long before.

The same questions are put to the 16-bit cache, to the quantized cache of the plan, and to a cache that spends
the plan's bytes on recent tokens alone.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

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
    write_request,
)
from convert.cli.demo_text import write_text
from convert.cli.flags import show_default
from convert.conversion import convert, open_source
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.errors import CheckpointError, ConversionError
from zdc_jax.evaluation.perplexity import bootstrap_interval, token_nll
from zdc_jax.loading import LanguageModel, load
from zdc_jax.methods.coded import Settings
from zdc_jax.plan import CompressionPlan, LayerRanks

SETTINGS = Settings(bits_k=3, bits_v=3, bits_index=6, index=16, read=0, bits_near=8)
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
    calibration_tokens: int = 19 * 1792
    heldout_windows: int = 8
    questions: int = 8


SHIPPED_SIZE = DemoSize()
"""Size for the tiny checkpoint that ships."""
SOURCE_SIZE = DemoSize(calibration_tokens=9 * 1792, heldout_windows=3, questions=4)
"""Size for any other model: one with 135 million parameters takes minutes."""


@dataclass
class Demo:
    """Convert, calibrate and generate; print cache size and perplexity of several plans.

    Attributes:
      source: Hugging Face folder or GGUF file.
      output: Folder for the converted model and the report.
    """

    source: Annotated[Path | None, show_default("the small checkpoint in the package")] = None
    output: Path = Path("demo-output")

    def run(self, console: Console) -> None:
        demo(self.output, console, self.source)


def demo(
    output: Path, console: Console, source: Path | None = None, *, size: DemoSize | None = None
) -> list[CacheResult]:
    """Run the demo; print a table and write model, plan, chart and report.

    Args:
      output: folder to write.
      source: Hugging Face folder or GGUF file; default the checkpoint that ships.
      size: amounts of text; default by source.

    Raises:
      CheckpointError: `output` holds something and was not made by the demo.
      ConversionError: the source cannot be converted, or has too few positions.
    """
    began = time.perf_counter()
    size = size or (SHIPPED_SIZE if source is None else SOURCE_SIZE)
    path = source or demo_checkpoint.PATH
    if (most := open_source(path).config(choose_dtype()).max_positions) < size.context:
        raise ConversionError(f"{path} has {most} positions, the demo needs {size.context}")
    claim_folder(output)
    checkpoint = convert(path, output / "model", dtype=choose_dtype(), overwrite=True, progress=False)
    text = write_text(output / "text")
    console.print(f"converted {path.name}; calibrating on {size.calibration_tokens:,} tokens")
    options = CalibrationOptions(tokens=size.calibration_tokens, context=size.context, profile=False)
    basis = calibrate(checkpoint.path, [text.calibration], options, dtype=choose_dtype())
    plan = make_plan(checkpoint, basis)
    plan.save(output / "plan.json")
    dense = load(checkpoint.path, dtype=choose_dtype())
    questions = write_questions(
        dense, text.read_prose(), count=size.questions, lead=size.lead, distance=size.distance
    )
    (output / "prompt.txt").write_text(questions[0].text)
    chat = dense.chat_template is not None
    write_request(output / "request.json", questions[0], chat=chat)
    heldout = replace(options, tokens=size.heldout_windows * size.context)
    windows, _ = calibration_windows(checkpoint, [text.heldout], size.context, heldout)
    results = []
    for result in measure_caches(checkpoint, dense, plan, windows, questions):
        console.print(f"measured {result.name}, {time.perf_counter() - began:.0f} s")
        results.append(result)
    print_example(console, questions[0], results, distance=size.distance)
    print_table(console, results)
    draw_chart(results, output / "chart.png", f"{path.name}, {size.context:,} tokens")
    head = {"source": path.name, "context": size.context, "basis": [basis.qk_kind, basis.vo_kind]}
    write_report(output / "report.json", head, questions, results)
    seconds = time.perf_counter() - began
    console.print(f"wrote {output}/chart.png, report.json and plan.json; {seconds:.0f} s in all")
    print_commands(console, output, chat=chat)
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


def make_plan(checkpoint: Checkpoint, basis: Basis) -> CompressionPlan:
    """Return the plan that quantizes all coordinates of the calibrated basis, the same in every layer."""
    plan = keep_ranks(checkpoint.config, window=WINDOW, method="coded", settings=SETTINGS)
    return plan.for_model(checkpoint.fingerprint, basis.coordinates_hash, basis.shifted)


def make_window_plan(config: ModelConfig, plan: CompressionPlan, context: int) -> CompressionPlan:
    """Return the plan of sinks and the shortest window that stores at least as many bytes as `plan`."""

    def make(window: int) -> CompressionPlan:
        return replace(keep_ranks(config, window=window, method="window"), rotated=False)

    def count_bytes(window: int) -> int:
        return make(window).bytes(context, 1, BYTES_DTYPE)

    wanted = plan.bytes(context, 1, BYTES_DTYPE)
    return make(1 + bisect_left(range(1, context), wanted, key=count_bytes))


def keep_ranks(config: ModelConfig, **options: Any) -> CompressionPlan:
    """Return a plan that keeps all coordinates in every layer."""
    ranks = [LayerRanks(config.head_dim, config.head_dim)] * config.num_layers
    return CompressionPlan.of_layers(config, ranks, sinks=SINKS, **options)


def measure_caches(
    checkpoint: Checkpoint,
    dense: LanguageModel,
    plan: CompressionPlan,
    windows: np.ndarray,
    questions: Sequence[Question],
) -> Iterator[CacheResult]:
    """Yield the measurements of the 16-bit cache, the plan, and a window of the plan's bytes."""
    context = windows.shape[1]
    window_plan = make_window_plan(checkpoint.config, plan, context)
    dense_nll = token_nll(dense.network, windows)
    full_bytes = dense.plan.bytes(context, 1, BYTES_DTYPE)
    for name, each in (
        ("16 bits", None),
        (f"plan ({SETTINGS.bits_k} bits)", plan),
        (f"last {window_plan.window} tokens", window_plan),
    ):
        model = dense if each is None else load(checkpoint.path, each, dtype=choose_dtype())
        nll = dense_nll if each is None else token_nll(model.network, windows)
        changes = (nll - dense_nll).mean(1, dtype=np.float64)
        stored = model.plan.bytes(context, 1, BYTES_DTYPE)
        yield CacheResult(
            name=name,
            bytes_per_token=stored / context,
            share=stored / full_bytes,
            perplexity=float(np.exp(nll.mean(dtype=np.float64))),
            increase=float(np.expm1(changes.mean())),
            interval=bootstrap_interval(changes),
            answers=answer_questions(model, questions),
        )
