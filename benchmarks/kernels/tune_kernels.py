"""Search for the fastest tile sizes on this card; writes `kernels_pallas/tuned/<device>.json`.

    python -m benchmarks.kernels.tune_kernels
    python -m benchmarks.kernels.tune_kernels --only coded_decode

Candidates alternate at widths that plans use. The table keeps the fastest one and all raw times. Kernels take
the config of the table where widths and device match, and their default rule elsewhere.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.common import commit, environment
from benchmarks.kernels import bench_coded as coded
from benchmarks.kernels.timing import in_turns, normal
from kernels_pallas import (
    CodedConfig,
    CodedPass,
    DecodeConfig,
    PrefillConfig,
    Ring,
    Trailing,
    coded_parts,
    decode_parts,
    merged,
    prefill_attention,
)
from kernels_pallas.quantized.inputs import default_config as coded_rule
from kernels_pallas.tuning import FOLDER, file_of
from zdc_jax.files import whole_file

N, S = 32, 8192
PROMPT = 16384
ONE_RANK = [(128, 128), (64, 96), (32, 64), (64, 64), (48, 96), (32, 96), (96, 128), (64, 128), (96, 96)]
TWO_RANKS = [(32, 64, 128), (64, 96, 128), (16, 32, 64)]
DECODE = [(64, 2), (64, 3), (64, 4), (128, 2)]
CODED = [
    *(coded.Plan(((coded.H, bits),), (coded.H, bits)) for bits in (2, 3, 4, 8)),
    coded.PLANS["bit planes"],
    coded.PLANS["chosen"],
]
STAGES = (2, 3, 4)
"""Pipeline stages of quantized keys and values; a list of slots has none."""
Kernel = Literal["prefill", "decode", "coded_decode"]


@dataclass(frozen=True)
class Options:
    """Options of the search.

    Attributes:
      folder: folder of the table.
      only: kernels to tune, all by default; entries of other kernels stay.
    """

    folder: Path = FOLDER
    only: tuple[Kernel, ...] = ()


def fastest(
    widths: dict[str, int],
    candidates: list[Any],
    run: Callable[..., Any],
    args: tuple[Any, ...],
    others: Sequence[Any] = (),
) -> dict[str, Any]:
    """Return the table entry of these widths: the fastest config, and all times.

    Args:
      run: the kernel on `args`, with the config as keyword.
      others: configs that are timed and not chosen.
    """
    programs = {}
    for config in (*candidates, *others):
        try:
            programs[config] = jax.jit(partial(run, config=config)).lower(*args).compile(), args
        except ValueError as refusal:  # The config needs too much shared memory.
            print(widths, config, str(refusal)[:80], flush=True)
    times = in_turns(programs)
    ms = {config: float(np.median(each)) for config, each in times.items()}
    best = min((config for config in candidates if config in ms), key=lambda config: ms[config])
    print(widths, best, f"{ms[best]:.3f} ms", flush=True)
    listed = [{"config": asdict(config), "times": each} for config, each in times.items()]
    return {"widths": widths, "config": asdict(best), "ms": listed, "commit": commit()}


def prefill_candidates(Z: int) -> list[PrefillConfig]:
    """Return configs of one block after another, of alternating warpgroups, and of overlapped blocks."""
    overlapped = ((128, 2), (128, 3)) if Z <= 64 else ((64, 3), (64, 4))
    return [
        PrefillConfig(128, 2, 3),
        *(PrefillConfig(128, 2, 3, turns=columns) for columns in (64, 80, 96)),
        *(PrefillConfig(*each, 3, overlap=True) for each in overlapped),
    ]


def prefill() -> Iterator[dict[str, Any]]:
    """Time causal prompts of 16,384 tokens, 32 heads."""
    for R, Z in ONE_RANK:
        arrays = normal(0, 1, PROMPT, N, R), normal(1, 1, N, PROMPT, R), normal(2, 1, N, PROMPT, Z)
        run = partial(prefill_attention, scale=0.1)
        yield fastest({"R": R, "Z": Z, "H": R, "HV": Z}, prefill_candidates(Z), run, arrays)
    for R, Z, H in TWO_RANKS:
        tails = normal(3, 1, N, PROMPT, H - R), normal(4, 1, N, PROMPT, H - Z)
        trailing = Trailing(*tails, jnp.zeros(1, jnp.int32), *(x[:, :, :8] for x in tails))
        far = normal(1, 1, N, PROMPT, R), normal(2, 1, N, PROMPT, Z)
        arrays = normal(0, 1, PROMPT, N, H), *far, trailing

        def run(q, k, v, trailing, config):
            return prefill_attention(
                q, k, v, scale=0.1, trailing=trailing, sinks=4, window=512, config=config
            )

        yield fastest({"R": R, "Z": Z, "H": H, "HV": H}, prefill_candidates(Z), run, arrays)


def decode() -> Iterator[dict[str, Any]]:
    """Time 16 sequences of 8,192 tokens, 32 heads; the number of splits stays that of the rule."""
    B = 16
    lengths = jnp.full(B, S, jnp.int32)
    for R, Z, H in [(R, Z, 0) for R, Z in ((128, 128), (64, 96), (32, 64))] + TWO_RANKS:
        arrays = normal(0, B, N, H or R), normal(1, B, N, S, R), normal(2, B, N, S, Z)
        ring = Ring(normal(3, B, N, 520, H - R), normal(4, B, N, 520, H - Z)) if H else None
        near = {"sinks": 4, "window": 512} if H else {}
        rule = decode_inputs.default_config(B * N, S, R, near.get("window", 0))
        candidates = [DecodeConfig(block, stages, rule.splits, rule.near_splits) for block, stages in DECODE]

        def run(q, k, v, lengths, ring, config, near=near):
            parts = decode_parts(q, k, v, lengths, scale=0.1, ring=ring, config=config, **near)
            return merged(parts, 1, q.dtype)

        yield fastest({"R": R, "Z": Z, "H": H or R}, candidates, run, (*arrays, lengths, ring))


def coded_decode() -> Iterator[dict[str, Any]]:
    """Time 16 sequences of 32,768 quantized tokens, 8 KV heads of four queries.

    The number of splits stays that of the rule; other numbers are timed for comparison.
    """
    B, K, tokens = 16, 8, 32768
    for plan in CODED:
        rule = coded_rule(B * K, tokens, plan.read)
        stages = STAGES[:1] if plan.read else STAGES

        def of_parts(splits, stages=stages, rule=rule):
            return [replace(rule, stages=each, splits=splits) for each in stages]

        others = [*of_parts(max(1, rule.splits // 2)), *of_parts(2 * rule.splits)]
        widths = {"C": coded.H, "Z": coded.H, "bytes": sum(plan.nbytes), "chosen": plan.read}
        yield fastest(widths, of_parts(rule.splits), *coded_call(plan, B, K, tokens), others)


def coded_call(plan: coded.Plan, B: int, K: int, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function that runs a config, and its arguments; only older tokens, all of them or a list."""
    q, far = normal(0, B, coded.N, coded.H), coded.random_tokens(plan, B, K, tokens)
    ends, slots = coded.span(B, tokens), None
    if plan.read:
        slots = jax.random.randint(jax.random.key(1), (B, K, plan.read), 0, tokens).sort()

    def attend(q: jax.Array, far: coded.Coded, slots: jax.Array | None, *, config: CodedConfig) -> jax.Array:
        *keys, values = coded.planes(far, plan)
        older = CodedPass(q, keys, values, *ends, slots=slots, config=config)
        (parts,) = coded_parts([older], scale=0.1)
        return merged(parts, coded.N // K, q.dtype)[0]

    return attend, (q, far, slots)


KERNELS: dict[Kernel, Callable[[], Iterator[dict[str, Any]]]] = {
    "prefill": prefill,
    "decode": decode,
    "coded_decode": coded_decode,
}


def main(options: Options) -> None:
    """Measure the kernels and write the table; entries that stay keep the record of their own run."""
    path = options.folder / file_of(jax.devices()[0].device_kind).name
    table = json.loads(path.read_text()) if options.only and path.exists() else environment()
    table |= {kernel: list(KERNELS[kernel]()) for kernel in options.only or KERNELS}
    options.folder.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write_text(json.dumps(table, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
