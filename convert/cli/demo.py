"""`zdc demo`: the whole path on the checkpoint that ships with the package, and a table of what it gave.

Text comes from the Python sources of installed dependencies: calibration reads one set of packages,
perplexity another, and neither is what the checkpoint was trained on.
"""

import importlib.util
import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from convert import demo_checkpoint
from convert.calibration.calibrate import CalibrationOptions, calibrate, calibration_windows
from convert.conversion import convert
from zdc_jax.errors import CheckpointError
from zdc_jax.generate.api import Generation, generate
from zdc_jax.generate.sampling import Sampling
from zdc_jax.loading import LanguageModel, load
from zdc_jax.planning.evaluate import compare, window_nll
from zdc_jax.planning.spectrum import plan_from_spectrum

CALIBRATION_PACKAGES = ("numpy", "rich", "safetensors", "tyro")
HELDOUT_PACKAGES = ("flax", "optax", "jaxtyping")
TEXT_BYTES = 400_000
"""Of Python source copied from each package."""
CONTEXT = 1024
CALIBRATION_TOKENS = 16 * CONTEXT
HELDOUT_WINDOWS = 10
NEW_TOKENS = 48
SAMPLING = Sampling(temperature=0.7, top_p=0.9, seed=1)
PROMPT = "def moving_average(values, window):\n"
MARKER = ".zdc-demo"
"""A file in folders that the demo made, which it may write to again."""


def _dtype() -> str:
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def demo(output: Path, console: Console) -> None:
    """Converts, calibrates, generates; prints plan, KV bytes per token, perplexity, tokens per second.

    Raises:
      CheckpointError: `output` holds something and was not made by the demo.
    """
    began = time.perf_counter()
    _claim(output)
    model_path = output / "model"
    checkpoint = convert(demo_checkpoint.PATH, model_path, overwrite=True, progress=False)
    calibration_text = _collect_sources(CALIBRATION_PACKAGES, output / "text" / "calibration")
    heldout_text = _collect_sources(HELDOUT_PACKAGES, output / "text" / "heldout")
    console.print(f"converted {checkpoint.config.num_layers} layers; calibrating")
    options = CalibrationOptions(tokens=CALIBRATION_TOKENS, context=CONTEXT)
    basis = calibrate(model_path, [calibration_text], options, dtype=_dtype())
    heldout = CalibrationOptions(tokens=HELDOUT_WINDOWS * CONTEXT, context=CONTEXT)
    windows, _ = calibration_windows(checkpoint, [heldout_text], CONTEXT, heldout)

    plans = {
        "dense": None,
        "per layer 3/4": plan_from_spectrum(basis, budget=0.75, window=128, sinks=4),
        "per layer 1/2": plan_from_spectrum(basis, budget=0.5, window=128, sinks=4),
        "per layer 3/8": plan_from_spectrum(basis, budget=0.375, window=128, sinks=4),
    }
    rows: list[dict[str, Any]] = []
    for name, plan in plans.items():
        model = load(model_path, plan, dtype=_dtype())
        if plan is None:
            dense_nll = window_nll(model.network, windows)
        result, rate = _timed_generation(model)
        rows.append(_row(name, model, dense_nll, windows, result, rate))
    _print(console, rows)
    report = {"basis": [basis.qk_kind, basis.vo_kind], "rows": rows}
    (output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"wrote {output / 'report.json'}; {time.perf_counter() - began:.0f} s in all")
    plan_flags = ["--budget", "0.75", "--window", "128", "--sinks", "4"]
    command = shlex.join([*_program(), "generate", str(model_path), "def ", *plan_flags])
    console.out(f"next: {command}", highlight=False)


def _claim(output: Path) -> None:
    """Makes `output` the demo's own; what anybody else put there would be replaced."""
    marker = output / MARKER
    if output.exists() and not marker.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(
            f"{output} is neither empty nor made by the demo; choose another folder with --output"
        )
    output.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _program() -> list[str]:
    """What runs `zdc` again from this folder."""
    return [sys.argv[0]] if Path(sys.argv[0]).name == "zdc" else [sys.executable, "-m", "convert.cli.main"]


def _collect_sources(packages: tuple[str, ...], folder: Path) -> Path:
    """Copies Python files of installed packages, one folder (topic) a package."""
    shutil.rmtree(folder, ignore_errors=True)
    for package in packages:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        size = 0
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) < 2000 or "test" in path.parts[-2]:
                continue
            target = folder / package / f"{size}-{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            size += len(text)
            if size > TEXT_BYTES:
                break
    return folder


def _timed_generation(model: LanguageModel) -> tuple[Generation, float]:
    """Generates twice: the first call compiles, the second is timed."""
    for _ in range(2):
        result = generate(model, PROMPT, NEW_TOKENS, stop_tokens=(), sampling=SAMPLING)
    return result, result.timings.tokens_per_second(NEW_TOKENS - 1)


def _row(
    name: str,
    model: LanguageModel,
    dense_nll: np.ndarray,
    windows: np.ndarray,
    result: Generation,
    rate: float,
) -> dict[str, Any]:
    report = compare(model.network, dense_nll, windows)
    return {
        "plan": name,
        "ranks": [[r.qk, r.v] for r in model.plan.layers],
        "kv_bytes_per_token": round(report.kv_bytes / CONTEXT),
        "kv_share": report.kv_bytes / report.dense_kv_bytes,
        "perplexity": report.perplexity,
        "increase": report.increase,
        "interval": report.interval,
        "tokens_per_second": rate,
        "text": result.completions[0].text,
    }


def _print(console: Console, rows: list[dict[str, Any]]) -> None:
    console.print(f"[bold]prompt[/bold] {PROMPT.strip()}")
    for row in rows[:: len(rows) - 1]:
        console.print(f"[bold]{row['plan']}[/bold]")
        console.print(row["text"], markup=False, highlight=False, style="dim")
    title = f"{_dtype()}, contexts of {CONTEXT} tokens, window of 128 and 4 sinks at full rank"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title)
    table.add_column("plan", no_wrap=True)
    for column in ("KV B/token", "of dense", "ppl", "increase", "95 % interval", "tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        low, high = row["interval"]
        table.add_row(
            row["plan"],
            f"{row['kv_bytes_per_token']:,.0f}",
            f"{row['kv_share']:.1%}",
            f"{row['perplexity']:.2f}",
            f"{row['increase']:+.1%}",
            f"{low:+.1%} {high:+.1%}",
            f"{row['tokens_per_second']:.0f}",
        )
    console.print(table)
    console.print("The last row goes too far on purpose, to show what it costs in perplexity.")
