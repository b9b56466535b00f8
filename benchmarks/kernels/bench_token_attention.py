"""Benchmark of the attention of new tokens to near and far tokens in one launch, and of its merging.

    python -m benchmarks.kernels.bench_token_attention

Far tokens are in pages of 128, near ones in a ring of a window of 512 and 4 sinks, in 8 bits. Scores of both
gain a number in each block of 64 positions, as with the shift of keys. Levels and scales are random. Times
are those of the two kernels by CUPTI, medians in µs.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, write_result
from benchmarks.kernels.bench_coded import SCALE, SINKS, WINDOW, H, Plan, random_plane
from benchmarks.kernels.timing import kernel_times
from kernels_pallas import CodedPass, Plane, coded_parts, merged_at_once

PAGE, SLOTS, BLOCK = 128, 520, 64
FORMS = {
    "3bit": Plan(keys=((32, 5), (96, 3)), values=(H, 3)),
    "4bit": Plan(keys=((32, 4), (96, 4)), values=(H, 4)),
    "8bit": Plan(keys=((32, 8), (96, 8)), values=(H, 8)),
    "keys of 5 and 2 bits, values of 3": Plan(keys=((32, 5), (96, 2)), values=(H, 3)),
    "keys of 4 and 2 bits, values of 2": Plan(keys=((32, 4), (96, 2)), values=(H, 2)),
}
KERNELS = {"attention": "zdc_coded_decode", "merge": "zdc_merge"}
LLAMA, QWEN = (32, 8), (12, 2)
"""Query and KV heads of Llama-3-8B and of Qwen2.5-1.5B."""


class Case(NamedTuple):
    """One row: a form, query and KV heads, sequences, and tokens of each."""

    form: str
    heads: tuple[int, int]
    sequences: int
    tokens: int


CASES = [
    *(Case("3bit", LLAMA, 1, tokens) for tokens in (16_000, 128_000)),
    *(Case("3bit", LLAMA, 16, tokens) for tokens in (1_300, 16_000)),
    *(Case("3bit", LLAMA, count, tokens) for count in (32, 64) for tokens in (1_300, 8_000)),
    Case("3bit", QWEN, 1, 8_000),
    Case("3bit", QWEN, 16, 1_300),
    Case("keys of 5 and 2 bits, values of 3", QWEN, 16, 16_000),
    *(Case(form, LLAMA, 16, 16_000) for form in FORMS if form != "3bit"),
    Case("4bit", LLAMA, 1, 128_000),
]


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      repeats: timed launches of each case.
      name: name of the result file.
      results: folder of the result file.
    """

    repeats: int = 10
    name: str = "token-attention"
    results: Path = RESULTS


def build_case(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function that attends and merges, and its arguments."""
    plan, (N, K), B, S = FORMS[case.form], case.heads, case.sequences, case.tokens
    each = -(-S // PAGE)
    table = 1 + np.random.default_rng(0).permutation(B * each).reshape(B, each).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), len(plan.nbytes) + 3)
    far = [
        random_plane(key, (B * each + 1, K, PAGE), size) for key, size in zip(keys, plan.nbytes, strict=False)
    ]
    near = [random_plane(key, (B, K, SLOTS), H) for key in keys[-3:-1]]
    q = jax.random.normal(keys[-1], (B, N, H), jnp.bfloat16)
    gains = jnp.zeros((B, N, each * PAGE // BLOCK), jnp.float32)

    def attend(q: Any, gains: Any, far: Any, near: Any, table: Any) -> Any:
        def row(x: int) -> jax.Array:
            return jnp.full(B, x, jnp.int32)

        stored = [Plane(*pair, bits) for pair, bits in zip(far, plan.bits, strict=True)]
        ring = [Plane(*pair, 8) for pair in near]
        passes = [
            CodedPass(
                q,
                stored[:-1],
                stored[-1],
                row(SINKS),
                row(S - WINDOW),
                block_table=table,
                gains=gains,
            ),
            CodedPass(q, ring[:1], ring[1], row(0), row(S), gains=gains, ring=(SINKS, WINDOW)),
        ]
        return merged_at_once(coded_parts(passes, scale=SCALE), N // K, q.dtype)

    return jax.jit(attend), (q, gains, far, near, jnp.asarray(table))


def measure_case(case: Case, repeats: int) -> dict[str, Any]:
    """Return the row of one case."""
    attend, args = build_case(case)
    times = defaultdict(list)
    jax.block_until_ready(attend(*args))
    for _ in range(2 + repeats):
        for name, ms in kernel_times(lambda: attend(*args)):
            times[next((key for key, part in KERNELS.items() if part in name), "others")].append(1e3 * ms)
    figures = {key: float(np.median(times[key][2:])) for key in KERNELS}
    return {**case._asdict(), **figures, "repeats": repeats, "commit": commit()}


def main(options: Options) -> None:
    """Write one JSON file, again after each row."""
    finished: list[dict[str, Any]] = []
    for case in CASES:
        finished.append(measure_case(case, options.repeats))
        print(finished[-1], flush=True)
        path = write_result(options.name, {"near": [SINKS, WINDOW], "page": PAGE}, finished, options.results)
    print(path)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
