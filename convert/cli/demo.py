"""`zdc demo`: the whole path on one model, and a table of what it gave.

The checkpoint that ships with the package read Python code, and so do calibration and perplexity then; any
other model is given prose too. A passage is gone on with, or, by models made for chat, told in brief.
"""

import json
import shlex
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
from convert.cli.demo_text import CODE, PROSE, passage, write_text
from convert.conversion import convert, open_source
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.conversation.prompt import chat_prompt, chat_stop_tokens, opening
from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.errors import CheckpointError, ConversionError
from zdc_jax.evaluation.perplexity import compare, token_nll
from zdc_jax.files import whole_file
from zdc_jax.generation.api import generate
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import LanguageModel, load
from zdc_jax.planning.spectrum import plan_from_spectrum

CONTEXT = 1024
CALIBRATION_TOKENS = 16 * CONTEXT
HELDOUT_WINDOWS = 10
NEW_TOKENS = 48
SAMPLING = Sampling(temperature=0.7, top_p=0.9, seed=1)
REQUEST = "Say in two sentences what this text is about.\n\n"
"""To models that were made for chat, before the passage."""
BUDGETS = {"per layer 3/4": 0.75, "per layer 1/2": 0.5, "per layer 3/8": 0.375}
MARKER = ".zdc-demo"
"""A file in folders that the demo made, which it may write to again."""


def _dtype() -> str:
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def demo(output: Path, console: Console, source: Path | None = None) -> None:
    """Converts, calibrates, generates; prints plan, KV bytes per token, perplexity, tokens per second.

    Args:
      source: Hugging Face folder or GGUF file; default the checkpoint that ships.

    Raises:
      CheckpointError: `output` holds something and was not made by the demo.
      ConversionError: the source cannot be converted, or has too few positions.
    """
    began = time.perf_counter()
    path = source or demo_checkpoint.PATH
    if (most := open_source(path).config(_dtype()).max_positions) < CONTEXT:
        raise ConversionError(f"{path} has {most} positions, the demo needs {CONTEXT}")
    _claim(output)
    model_path = output / "model"
    checkpoint = convert(path, model_path, dtype=_dtype(), overwrite=True, progress=False)
    calibration_text, heldout_text = write_text(output / "text", CODE if source is None else PROSE)
    console.print(f"converted {checkpoint.config.num_layers} layers; calibrating")
    options = CalibrationOptions(tokens=CALIBRATION_TOKENS, context=CONTEXT, profile=False)
    basis = calibrate(model_path, [calibration_text], options, dtype=_dtype())
    rows = _measured(checkpoint, basis, heldout_text)
    _print(console, rows)
    report = {"basis": [basis.qk_kind, basis.vo_kind], "rows": rows}
    with whole_file(output / "report.json") as file:
        file.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"wrote {output / 'report.json'}; {time.perf_counter() - began:.0f} s in all")
    plan_flags = ["--budget", "0.75", "--window", "128", "--sinks", "4"]
    command = ["generate", str(model_path), rows[0]["prompt"].strip().splitlines()[-1]]
    if ChatTemplate.of(checkpoint) is not None:
        command = ["chat", str(model_path)]
    prompt = command[2] if command[0] == "generate" else None
    serving = ["serve", str(model_path), *plan_flags, "--max-model-len", str(CONTEXT)]
    for what, line in (
        ("next", shlex.join([*_program(), *command, *plan_flags])),
        ("or serve it", shlex.join([*_program(), *serving])),
        ("and ask it", shlex.join(["curl", *_question(prompt)])),
    ):
        console.out(f"{what}: {line}", highlight=False)


def _question(prompt: str | None) -> list[str]:
    """Arguments of curl: the prompt to be continued, or a message to a model that was made for chat."""
    kind, asked = "completions", dict[str, Any](prompt=prompt)
    if prompt is None:
        kind, asked = "chat/completions", {"messages": [{"role": "user", "content": "What is a cache?"}]}
    body = {"model": "model", **asked, "max_tokens": 40, "temperature": 0}
    url = f"http://127.0.0.1:8000/v1/{kind}"
    return [url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]


def _measured(checkpoint: Checkpoint, basis: Basis, heldout_text: Path) -> list[dict[str, Any]]:
    """A row for the unmodified model and for each of three plans."""
    heldout = CalibrationOptions(tokens=HELDOUT_WINDOWS * CONTEXT, context=CONTEXT)
    windows, _ = calibration_windows(checkpoint, [heldout_text], CONTEXT, heldout)
    text = passage(heldout_text)
    dense = load(checkpoint.path, dtype=_dtype())
    dense_nll = token_nll(dense.network, windows)
    rows = [_row("dense", dense, dense_nll, windows, text)]
    for name, budget in BUDGETS.items():
        plan = plan_from_spectrum(basis, budget=budget, window=128, sinks=4).within(checkpoint.config)
        model = load(checkpoint.path, plan, dtype=_dtype())
        rows.append(_row(name, model, dense_nll, windows, text))
    return rows


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


def _row(
    name: str, model: LanguageModel, dense_nll: np.ndarray, windows: np.ndarray, text: str
) -> dict[str, Any]:
    """Generates twice, for the first call compiles and the second is timed; and measures perplexity."""
    chats = model.chat_template is not None
    prompt = REQUEST + text if chats else text
    given = chat_prompt(model, opening(None, prompt)) if chats else prompt
    stop_tokens = chat_stop_tokens(model) if chats else ()
    for _ in range(2):
        result = generate(model, given, NEW_TOKENS, stop_tokens=stop_tokens, sampling=SAMPLING)
    (completion,) = result.completions
    report = compare(model.network, dense_nll, windows)
    return {
        "plan": name,
        "ranks": [[r.qk, r.v] for r in model.plan.layers],
        "kv_bytes_per_token": round(report.kv_bytes / CONTEXT),
        "kv_share": report.kv_bytes / report.dense_kv_bytes,
        "perplexity": report.perplexity,
        "increase": report.increase,
        "interval": report.interval,
        "tokens_per_second": result.timings.tokens_per_second(len(completion.tokens) - 1),
        "prompt": prompt,
        "text": completion.text,
    }


def _print(console: Console, rows: list[dict[str, Any]]) -> None:
    prompt = rows[0]["prompt"]
    console.print(f"[bold]prompt[/bold], {len(prompt):,} characters")
    console.print(f"{prompt[:200].strip()} …", markup=False, highlight=False, style="dim")
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
