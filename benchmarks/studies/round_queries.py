"""Errors of scores when queries of a real model are rounded as the kernel for quantized keys rounds them.

    python -m benchmarks.studies.round_queries FOLDER

The kernel reads queries as bfloat16, and rounds them to 15 bits of the largest coordinate of a head. It does
so for the first quarter of the coordinates and for the others apart, as presets divide them.

Instead of a calibrated basis and shift, keys leave out the mean of their block, and the basis of a KV head
has the principal axes of these remainders. Scores are those of all earlier keys, in float64, times 1/√H.
Text is the documentation that Python ships. The model needs a converted folder, but no calibration.
"""

import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Float

from benchmarks.common import RESULTS, commit, write_result
from kernels_pallas.quantized.warp_layout import LARGEST_QUERY
from zdc_jax.loading import load
from zdc_jax.model.observe import Seen, observe
from zdc_jax.ops.shift import BLOCK

TOPIC = "typesseq"


@dataclass(frozen=True)
class Options:
    """Options of the study.

    Attributes:
      folder: converted folder.
      tokens: tokens of the text, a multiple of 64.
      results: folder of the result file.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    tokens: int = 512
    results: Path = RESULTS


def see_heads(seen: Seen) -> tuple[Any, Any]:
    """Return queries and unrounded keys of a layer."""
    return seen.q, seen.exact_k


def measure_head(
    q: Float[np.ndarray, "T H"], k: Float[np.ndarray, "T H"], axes: Float[np.ndarray, "H H"]
) -> dict[str, float]:
    """Return the largest and the root mean square errors of scores by both roundings."""
    T, H = q.shape
    q, k = q @ axes, k @ axes
    stored = np.asarray(jnp.asarray(q, jnp.bfloat16), np.float64)
    whole = np.concatenate([round_plane(x) for x in np.split(stored, [H // 4], axis=1)], axis=1)
    is_earlier = np.tril(np.ones((T, T), bool))
    errors = {"bfloat16": stored - q, "fifteen_bits": whole - stored}
    found = {name: np.abs((x @ k.T)[is_earlier]) / H**0.5 for name, x in errors.items()}
    largest = {f"{name}_max": float(x.max()) for name, x in found.items()}
    return largest | {f"{name}_rms": float(np.sqrt((x * x).mean())) for name, x in found.items()}


def round_plane(x: Float[np.ndarray, "T C"]) -> Float[np.ndarray, "T C"]:
    """Round coordinates to 15 bits of the largest one of each token."""
    step = np.maximum(np.abs(x).max(1, keepdims=True), 1e-30) / LARGEST_QUERY
    return np.round(x / step) * step


def leave_out_mean(k: Float[np.ndarray, "T H"]) -> Float[np.ndarray, "T H"]:
    """Return keys without the mean of their block of positions."""
    blocks = k.reshape(-1, BLOCK, k.shape[1])
    return (blocks - blocks.mean(1, keepdims=True)).reshape(k.shape)


def main(options: Options) -> None:
    """Print the errors of the worst heads, and write those of all heads to one JSON file."""
    model = load(options.folder, dtype="float32")
    ids = model.tokenizer.encode(pydoc_data.topics.topics[TOPIC]).ids[: options.tokens]
    if not ids or len(ids) % BLOCK:
        raise SystemExit(f"--tokens {options.tokens}: must be a multiple of {BLOCK} up to those of the text")
    rows, at = [], commit()
    for layer, (q, k) in enumerate(observe(model.network, jnp.asarray([ids], jnp.int32), see_heads)):
        q, k = (np.asarray(x[0], np.float64) for x in (q, k))
        groups = q.shape[1] // k.shape[1]
        for kv in range(k.shape[1]):
            rest = leave_out_mean(k[:, kv])
            axes = np.linalg.eigh(rest.T @ rest)[1][:, ::-1]
            for head in range(kv * groups, (kv + 1) * groups):
                errors = measure_head(q[:, head], rest, axes)
                rows.append({"layer": layer, "head": head, **errors, "commit": at})
    for name in ("bfloat16_max", "bfloat16_rms", "fifteen_bits_max", "fifteen_bits_rms"):
        print(f"{name}: at most {max(row[name] for row in rows):.5f}")
    more = sum(row["fifteen_bits_rms"] > row["bfloat16_rms"] for row in rows)
    print(f"15 bits add more than bfloat16 in {more} of {len(rows)} heads")
    settings = {"model": options.folder.name, "tokens": options.tokens, "text": TOPIC}
    print(write_result(f"round-queries-{options.folder.name}", settings, rows, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
