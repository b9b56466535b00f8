"""Time to first token and time per output token of `generate`, compared with vLLM.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m benchmarks.model.bench_generate \
        --plan benchmarks/plans/qwen2.5-coder-1.5b-8192.json --lengths 8192 32768 131072

Sides: `ours-16` (16-bit cache), `ours-plan` (a plan), `vllm-16` and `vllm-fp8` (vLLM with a 16-bit and a
float8 cache). Each side runs in a process of its own, one after another on the same GPU. With `--shape` the
weights are random, and the plan of another model is transferred to the shape. With `--model` the weights
are those of a converted folder; vLLM then runs random weights of `--config`, a Hugging Face config.json of
the same shape.

The first call of each shape compiles and is not counted. Our times are those of `Generation.timings`. The
times of vLLM are the request metrics of `LLM.generate`: from arrival to the first token, and from the first
to the last token. No side shares prefixes between calls. `fits` is the number of sequences whose caches the
memory holds, and `bytes` the share of the bytes of a 16-bit cache.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import tyro

from benchmarks.common import RESULTS, as_text, commit, environment
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.files import whole_file

Side = Literal["ours-16", "ours-plan", "vllm-16", "vllm-fp8"]
MEMORY_SHARE = 0.95
"""Share of the GPU's memory that each side may use."""
STEP_SHARE = 0.03
"""Share of the free memory that `fits` leaves to what a step needs besides the cache."""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      lengths: prompt lengths, in tokens.
      sequences: batch sizes; a batch that does not fit is skipped.
      tokens: output tokens after the first one.
      layers: layers of the shape, fewer for a trial.
      worker: side to run in this process; internal.
    """

    shape: str = "llama-3-8b"
    model: Path | None = None
    config: Path | None = None
    plan: Path | None = None
    sides: tuple[Side, ...] = get_args(Side)
    lengths: tuple[int, ...] = (8192, 32768, 131072)
    sequences: tuple[int, ...] = (1,)
    tokens: int = 64
    repeats: int = 5
    layers: int | None = None
    name: str = "generate-8b-shape-h200"
    results: Path = RESULTS
    worker: Side | None = None


Row = dict[str, Any]
MARK = "@@"
"""Beginning of the lines that a worker prints for its parent."""


def draw_prompts(*, sequences: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return prompts of random token ids."""
    rng = np.random.default_rng(seed)
    return rng.integers(3, vocabulary, size=(sequences, length)).tolist()


def run_ours(side: Side, options: Options) -> None:
    """Time `zdc_jax.generate` on one side and print a row for each length and batch."""
    from benchmarks.model.models import fits, load_side
    from zdc_jax.generation.api import generate
    from zdc_jax.plan import CompressionPlan

    send("environment", environment())
    model = load_side(
        shape=options.shape,
        folder=options.model,
        plan=options.plan if side == "ours-plan" else None,
        layers=options.layers,
    )
    full = CompressionPlan.full(model.config)
    for length in options.lengths:
        most = fits(model.plan, tokens=length + options.tokens, share=1 - STEP_SHARE)
        share = model.plan.bytes(length) / full.bytes(length)
        for sequences in options.sequences:
            row = {"side": side, "tokens": length, "sequences": sequences, "fits": most, "bytes": share}
            if sequences > most:
                send("row", row)
                continue
            timings = []
            for seed in range(options.repeats + 1):
                prompts = draw_prompts(
                    sequences=sequences, length=length, vocabulary=model.config.vocab_size, seed=seed
                )
                began = time.perf_counter()
                result = generate(model, prompts, max_new_tokens=options.tokens + 1, stop_tokens=())
                wall = time.perf_counter() - began
                timings.append((result.timings, wall))
            counts = [len(completion.tokens) - 1 for completion in result.completions]
            send(
                "row",
                row
                | {
                    "first_token": [timing.prefill for timing, _ in timings[1:]],
                    "token": [timing.decode / max(counts) for timing, _ in timings[1:]],
                    "wall": [wall for _, wall in timings[1:]],
                    "first_call": timings[0][1],
                    "compile": timings[0][0].compile,
                },
            )


def run_vllm(side: Side, options: Options) -> None:
    """Time vLLM on one side and print a row for each length and batch."""
    import torch
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    from benchmarks.model.models import write_config

    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    send("environment", {"device": torch.cuda.get_device_name(), "commit": commit(), "versions": versions})
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = write_config(options.shape, Path(folder), layers=options.layers, config=options.config)
        longest = max(options.lengths) + options.tokens + 1
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            kv_cache_dtype="fp8" if side == "vllm-fp8" else "auto",
            max_model_len=longest,
            max_num_seqs=max(*options.sequences, 8),
            gpu_memory_utilization=MEMORY_SHARE,
            enable_prefix_caching=False,
            disable_log_stats=False,
        )
    cache = llm.llm_engine.vllm_config.cache_config
    slots = cache.num_gpu_blocks * cache.block_size
    sampling = SamplingParams(
        temperature=0.0, max_tokens=options.tokens + 1, ignore_eos=True, detokenize=False
    )
    for length in options.lengths:
        for sequences in options.sequences:
            fitting = slots // (length + options.tokens + 1)
            row = {"side": side, "tokens": length, "sequences": sequences, "fits": fitting}
            if sequences > fitting:
                send("row", row)
                continue
            first, token, walls = [], [], []
            for seed in range(options.repeats + 1):
                prompts = draw_prompts(sequences=sequences, length=length, vocabulary=vocabulary, seed=seed)
                began = time.perf_counter()
                outputs = llm.generate(
                    [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False
                )
                walls.append(time.perf_counter() - began)
                metrics = [output.metrics for output in outputs]
                first.append(max(each.first_token_latency for each in metrics))
                last = max(each.last_token_ts for each in metrics)
                token.append((last - max(each.first_token_ts for each in metrics)) / options.tokens)
            send("row", row | {"first_token": first[1:], "token": token[1:], "wall": walls[1:]})


def send(kind: str, value: dict[str, Any]) -> None:
    """Print a value for the process that started this one."""
    print(MARK, json.dumps([kind, value]), flush=True)


def run_side(side: Side, run: dict[str, Any], path: Path) -> int:
    """Run one side in a process of its own, write each of its rows, and return its exit status."""
    assert __spec__ is not None
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--worker", side]
    run["results"] = [row for row in run["results"] if row["side"] != side]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                store(side, run, *json.loads(line.removeprefix(MARK)))
                with whole_file(path) as file:
                    file.write_text(as_text(run))
    return process.returncode


def store(side: Side, run: dict[str, Any], kind: str, value: dict[str, Any]) -> None:
    """Print what a side has sent, and put it into the results of the run."""
    if kind == "row":
        print(describe(value), flush=True)
        run["results"].append(value | {"repeats": len(value.get("first_token", ())), "commit": commit()})
    else:
        print(f"{side}: {value}", flush=True)
        run["environments"][side], run["device"] = value, value["device"]


def describe(row: Row) -> str:
    """Return a row as one line of text, with medians in milliseconds."""
    head = f"{row['side']}: {row['sequences']} x {row['tokens']} tokens, {row['fits']} fit"
    if "first_token" not in row:
        return f"{head}; not run"
    first, token = (1e3 * np.array(row[name]) for name in ("first_token", "token"))
    return (
        f"{head}; TTFT {np.median(first):.1f} ms ({first.min():.1f}-{first.max():.1f}), "
        f"TPOT {np.median(token):.2f} ms ({token.min():.2f}-{token.max():.2f})"
    )


def main(options: Options) -> None:
    """Run all sides and write their rows, after each row.

    Raises:
      SystemExit: an option does not fit the others, or a side failed.
    """
    if options.worker is not None:
        (run_vllm if options.worker.startswith("vllm") else run_ours)(options.worker, options)
        return
    check_options(options)
    failed = []
    path = options.results / f"{options.name}.json"
    run = json.loads(path.read_text()) if path.exists() else {"environments": {}, "results": []}
    run |= {"benchmark": options.name, "config": list_settings(options), "devices": 1, "commit": commit()}
    options.results.mkdir(parents=True, exist_ok=True)
    for side in options.sides:
        status = run_side(side, run, path)
        failed += [f"{side} ended with exit status {status}"] if status else []
    print(path)
    if failed:
        raise SystemExit(f"some rows are missing: {', '.join(failed)}")


def check_options(options: Options) -> None:
    """Raise `SystemExit` if an option does not fit the others."""
    if "ours-plan" in options.sides and options.plan is None:
        raise SystemExit("--sides ours-plan: no plan was given; add --plan PLAN.json, or name other --sides")
    if options.model is None:
        return
    positions, longest = Checkpoint.open(options.model).config.max_positions, max(options.lengths)
    if longest > (most := positions - options.tokens - 1):
        raise SystemExit(
            f"--lengths {longest}: the model has {positions:,} positions; with --tokens {options.tokens}, "
            f"prompts have at most {most:,} tokens"
        )


def list_settings(options: Options) -> dict[str, Any]:
    """Return the options that belong to the results; a real model has no use for the shape."""
    left_out = ("worker", "results", *(("shape",) if options.model else ()))
    settings = {name: value for name, value in asdict(options).items() if name not in left_out}
    return settings | {name: str(settings[name]) for name in ("model", "config", "plan") if settings[name]}


if __name__ == "__main__":
    main(tyro.cli(Options))
