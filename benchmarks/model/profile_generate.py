"""Profile of `generate`: device time by kind of kernel, number of kernels, and time in which the GPU waits.

    python -m benchmarks.model.profile_generate MODEL --plan 3bit --lengths 8000 --sequences 1 8

Each length and batch is timed first, without a profiler: seconds to the first token and per output token.
Then two calls are traced: one that generates a single token, which is the profile of the prompt, and one
that generates `--tokens` more. What the second adds is divided by its tokens. `waits_ms` is the time between
the first and the last kernel in which none ran, such as while the host prepared the next launch;
`longest_waits` has them by the kernel that ended them.

The loop over tokens is one CUDA graph, whose kernels a trace does not show. To see them, set
`XLA_FLAGS=--xla_gpu_enable_command_buffer=`, which makes tokens slower.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, write_result
from benchmarks.model.bench_generate import draw_prompts
from benchmarks.traces import Kernel, busy_ns, trace_kernels, waits_ns
from zdc_jax.generation.api import generate
from zdc_jax.loading import LanguageModel, load
from zdc_jax.presets import resolve_plan

KINDS = {
    "attention of prompts": "zdc_prefill",
    "attention of tokens": "zdc_coded_decode|zdc_decode|zdc_merge",
    "choice of tokens to read": "zdc_coded_scan|zdc_largest",
    "rotation and quantization": "zdc_post_rope|zdc_encode|zdc_turn_and_store",
    "dequantization": "zdc_dequantise",
    "block scores": "zdc_score_blocks",
    "matrix products": "gemm|nvjet|cutlass|cublas|splitK|triton_dot|^dot",
    "copies": "[Mm]emcpy|[Mm]emset|copy|transpose|concatenate|dynamic_update_slice",
}
"""Patterns of kernel names by kind; the first that matches counts."""
OTHER = "other fusions"
LONGEST = 25
"""Kernels that are listed one by one."""


@dataclass(frozen=True)
class Options:
    """Options of the profile.

    Attributes:
      model: converted folder.
      plan: preset or file of a plan; 16 bits by default.
      lengths: tokens of each prompt.
      sequences: numbers of prompts in a call.
      tokens: output tokens after the first one.
      chunk: most prompt tokens of one call; default as `generate` chooses.
      repeats: timed calls without the profiler.
    """

    model: Annotated[Path, tyro.conf.Positional]
    plan: str = "none"
    lengths: tuple[int, ...] = (8000,)
    sequences: tuple[int, ...] = (1,)
    tokens: int = 32
    chunk: int | None = None
    repeats: int = 5
    name: str = "profile-generate"
    results: Path = RESULTS


def profile_call(
    model: LanguageModel, *, length: int, sequences: int, tokens: int, chunk: int | None, repeats: int
) -> dict[str, Any]:
    """Time and trace `generate` for random prompts; return a row of results."""
    vocabulary = model.config.vocab_size

    def call(more: int, seed: int = 0) -> Callable[[], Any]:
        prompts = draw_prompts(sequences=sequences, length=length, vocabulary=vocabulary, seed=seed)
        return lambda: generate(model, prompts, more + 1, stop_tokens=(), prefill_chunk=chunk)

    first = [call(more)().timings for more in (0, tokens)]
    timings = [call(tokens, 1 + seed)().timings for seed in range(repeats)]
    prompt, whole = (summarize(trace_kernels(call(more))) for more in (0, tokens))
    return {
        "tokens": length,
        "sequences": sequences,
        "chunk": chunk,
        "first_token": [each.prefill for each in timings],
        "token": [each.decode / tokens for each in timings],
        "compile": sum(each.compile for each in first),
        "prompt": prompt,
        "each_token": divide_difference(whole, prompt, tokens),
    }


def summarize(kernels: list[Kernel]) -> dict[str, Any]:
    """Return milliseconds and number of kernels by kind, and the longest kernels by name and operation."""
    kinds: defaultdict[str, float] = defaultdict(float)
    longest: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for kernel, wait in zip(kernels, waits_ns(kernels), strict=True):
        kinds[find_kind(kernel)] += 1e-6 * kernel.duration
        part = f"{kernel.name} {shorten(kernel.operation)}".strip()
        longest[part] += kernel.duration
        waits[part] += wait
        counts[part] += 1

    def most(spent: Counter[str]) -> list[dict[str, Any]]:
        return [
            {"part": part, "ms": 1e-6 * ns, "kernels": counts[part]}
            for part, ns in spent.most_common(LONGEST)
        ]

    return {
        "busy_ms": 1e-6 * busy_ns(kernels),
        "waits_ms": 1e-6 * sum(waits.values()),
        "kernels": len(kernels),
        "kinds_ms": dict(kinds),
        "longest": most(longest),
        "longest_waits": most(waits),
    }


def find_kind(kernel: Kernel) -> str:
    """Return the kind of a kernel by its name and its operation."""
    text = f"{kernel.name} {kernel.operation.rpartition('/')[2]}"
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, text)), OTHER)


def shorten(operation: str) -> str:
    """Return the last parts of an operation's path, without the wrappers that JAX adds."""
    wrappers = re.compile(r"jit\(|while|body|closed_call|call_exported")
    parts = [part for part in operation.split("/") if not wrappers.match(part)]
    return "/".join(parts[-3:])


def divide_difference(whole: dict[str, Any], part: dict[str, Any], count: int) -> dict[str, Any]:
    """Return what `whole` has more than `part`, divided by `count`."""
    kinds = {
        kind: (spent - part["kinds_ms"].get(kind, 0.0)) / count for kind, spent in whole["kinds_ms"].items()
    }
    totals = {name: (whole[name] - part[name]) / count for name in ("busy_ms", "waits_ms", "kernels")}
    return totals | {"kinds_ms": kinds}


def describe(row: dict[str, Any]) -> str:
    """Return a row as text."""
    first, token = (1e3 * np.array(row[name]) for name in ("first_token", "token"))
    lines = [
        f"{row['sequences']} x {row['tokens']} tokens, chunks of {row['chunk'] or 'default size'}: "
        f"TTFT {np.median(first):.1f} ms ({first.min():.1f}-{first.max():.1f}), "
        f"TPOT {np.median(token):.3f} ms ({token.min():.3f}-{token.max():.3f}), "
        f"compiled in {row['compile']:.0f} s"
    ]
    for title, name in (("prompt", "prompt"), ("each token", "each_token")):
        part = row[name]
        lines.append(
            f"  {title}: busy {part['busy_ms']:.3f} ms, waits {part['waits_ms']:.3f} ms, "
            f"{part['kernels']:.0f} kernels"
        )
        kinds = sorted(part["kinds_ms"].items(), key=lambda item: -item[1])
        lines += [f"    {spent:9.3f} ms  {kind}" for kind, spent in kinds]
    lines += [
        f"    {each['ms']:9.3f} ms {each['kernels']:6d}  {each['part']}" for each in row["prompt"]["longest"]
    ]
    return "\n".join(lines)


def main(options: Options) -> None:
    """Print a profile for each length and batch, and write one JSON file."""
    model = load(options.model, resolve_plan(options.plan, options.model))
    rows = []
    for length in options.lengths:
        for sequences in options.sequences:
            row = profile_call(
                model,
                length=length,
                sequences=sequences,
                tokens=options.tokens,
                chunk=options.chunk,
                repeats=options.repeats,
            )
            rows.append({"plan": options.plan, **row, "commit": commit()})
            print(describe(row), flush=True)
    settings = {"model": options.model.name, "plan": options.plan, "tokens": options.tokens}
    print(write_result(options.name, settings, rows, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options))
