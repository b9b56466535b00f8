"""Which tile sizes are fastest on this card? Writes `kernels_pallas/tuned/<device>.json`.

    python -m benchmarks.tune_kernels

Times every candidate at widths that plans use, and keeps the fastest beside all raw times. Kernels take the
table's config where widths and device match, else their default rule.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.common import environment
from benchmarks.timing import device_ms, normal
from kernels_pallas import DecodeConfig, PrefillConfig, Ring, Trailing, decode_attention, prefill_attention
from kernels_pallas import decode as decode_kernel
from kernels_pallas.tuning import FOLDER, file_of

N, S = 32, 8192
ONE_RANK = [(128, 128), (96, 96), (64, 128), (64, 96), (48, 96), (64, 64), (32, 64)]
TWO_RANKS = [(32, 64, 128), (64, 96, 128), (16, 32, 64)]
PREFILL = [
    PrefillConfig(128, 2, 3, overlap=False),
    PrefillConfig(128, 2, 3, overlap=True),
    PrefillConfig(128, 2, 2, overlap=True),
    PrefillConfig(128, 3, 3, overlap=False),
    PrefillConfig(64, 3, 3, overlap=True),
]
DECODE = [(64, 2), (64, 3), (64, 4), (128, 2)]


@dataclass(frozen=True)
class Options:
    """`folder` of the table."""

    folder: Path = FOLDER


def fastest(
    widths: dict[str, int], candidates: list[Any], time: Callable[[Any], list[float]]
) -> dict[str, Any]:
    """The entry of these widths: config of the lowest median, and every candidate's times in ms."""
    seen = []
    for config in candidates:
        try:
            seen.append((float(np.median(times := time(config))), asdict(config), times))
        except ValueError as refusal:  # Too much shared memory.
            print(widths, config, str(refusal)[:80], flush=True)
    best = min(seen, key=lambda entry: entry[0])
    print(widths, best[1], f"{best[0]:.3f} ms", flush=True)
    return {"widths": widths, "config": best[1], "ms": [{"config": c, "times": t} for _, c, t in seen]}


def prefill() -> Iterator[dict[str, Any]]:
    """Causal prompts of 8192 tokens, 32 heads."""
    for R, Z in ONE_RANK:
        arrays = normal(0, 1, S, N, R), normal(1, 1, N, S, R), normal(2, 1, N, S, Z)
        time = lambda config, arrays=arrays: device_ms(
            lambda q, k, v: prefill_attention(q, k, v, scale=0.1, config=config)[0], *arrays, iterations=5
        )
        yield fastest({"R": R, "Z": Z, "H": R, "HV": Z}, PREFILL, time)
    for R, Z, H in TWO_RANKS:
        tails = normal(3, 1, N, S, H - R), normal(4, 1, N, S, H - Z)
        trailing = Trailing(*tails, jnp.zeros(1, jnp.int32), *(x[:, :, :8] for x in tails))
        arrays = normal(0, 1, S, N, H), normal(1, 1, N, S, R), normal(2, 1, N, S, Z), trailing
        time = lambda config, arrays=arrays: device_ms(
            lambda q, k, v, t: prefill_attention(
                q, k, v, scale=0.1, trailing=t, sinks=4, window=512, config=config
            )[0],
            *arrays,
            iterations=5,
        )
        yield fastest({"R": R, "Z": Z, "H": H, "HV": H}, PREFILL, time)


def decode() -> Iterator[dict[str, Any]]:
    """16 rows of 8192 tokens, 32 heads; the number of parts stays the rule's, which knows the batch."""
    B = 16
    lengths = jnp.full(B, S, jnp.int32)
    for R, Z, H in [(R, Z, 0) for R, Z in ((128, 128), (64, 96), (32, 64))] + TWO_RANKS:
        arrays = normal(0, B, N, H or R), normal(1, B, N, S, R), normal(2, B, N, S, Z)
        ring = Ring(normal(3, B, N, 520, H - R), normal(4, B, N, 520, H - Z)) if H else None
        near = {"sinks": 4, "window": 512} if H else {}
        rule = decode_kernel.default_config(B * N, S, R, near.get("window", 0))
        candidates = [DecodeConfig(block, stages, rule.splits, rule.near_splits) for block, stages in DECODE]
        time = lambda config, arrays=arrays, ring=ring, near=near: device_ms(
            lambda q, k, v, ring: decode_attention(
                q, k, v, lengths, scale=0.1, ring=ring, config=config, **near
            )[0],
            *arrays,
            ring,
            iterations=5,
        )
        yield fastest({"R": R, "Z": Z, "H": H or R}, candidates, time)


def main() -> None:
    """Measures both kernels and writes the table."""
    folder = tyro.cli(Options, description=__doc__).folder
    table = {**environment(), "prefill": list(prefill()), "decode": list(decode())}
    path = folder / file_of(jax.devices()[0].device_kind).name
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
