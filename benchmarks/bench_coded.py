"""How fast is decoding from coded keys and values, beside cuDNN on all of them in bfloat16?

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python -m benchmarks.bench_coded

One new token a row, 32 query heads of 128 coordinates. Keys and values are random integers with random
reaches. Near tokens, a window of 512 and 4 sinks in 16 bits, are read by the decode kernel and counted in
every row. `whole`: all far tokens are read. Times are device times (CUPTI), all kernels of a step together;
the peer and the read bandwidth are measured in the same run. `error` is the larger relative error of the
first head of the first row and the last of the last, against float64 on the same integers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.bench_kernels import cudnn
from benchmarks.common import RESULTS, commit, write_result
from benchmarks.timing import device_ms, normal
from kernels_pallas import Plane, Ring, coded_attention, decode_attention, merge_partial
from zdc_jax.cache.fitted_integers import FittedIntegers

N, H, SINKS, WINDOW = 32, 128, 4, 512
SCALE = H**-0.5
HEADS = {"MHA": 32, "GQA-4": 8}
REACHES = (112, 128)
"""Codes of random reaches: 1/4 to 1."""
Coded = tuple[tuple[jax.Array, jax.Array], ...]
"""Levels and reach of planes."""


class Shape(NamedTuple):
    """Rows, and tokens of each."""

    B: int
    S: int


@dataclass(frozen=True)
class Options:
    """shapes: rows and tokens. keys, values: coordinates and bits of the planes."""

    shapes: tuple[Shape, ...] = (Shape(16, 32768), Shape(16, 131072), Shape(1, 131072))
    keys: tuple[tuple[int, int], ...] = ((128, 4),)
    values: tuple[int, int] = (128, 4)
    repeats: int = 7
    name: str = "coded-h200"
    results: Path = RESULTS


def read_bandwidth() -> float:
    """Bytes read per second by a sum of 4 GiB."""
    x = jax.random.bits(jax.random.key(0, impl="rbg"), (2**30,), jnp.uint32)
    return x.nbytes / (np.median(device_ms(lambda x: x.sum(dtype=jnp.uint32), x)) * 1e-3)


@partial(jax.jit, static_argnums=(1, 2))
def random_plane(key: jax.Array, tokens: tuple[int, ...], width: int) -> tuple[jax.Array, jax.Array]:
    """Levels of `width` bytes and reaches of random tokens."""
    levels, reach = jax.random.split(key)
    return (
        jax.random.bits(levels, (*tokens, width), jnp.uint8),
        jax.random.randint(reach, tokens, *REACHES).astype(jnp.uint8),
    )


def far_part(q: jax.Array, far: Coded, bits: tuple[int, ...], S: int) -> tuple[jax.Array, jax.Array]:
    """The whole store but sinks and window."""
    planes = [Plane(*pair, b) for pair, b in zip(far, bits, strict=True)]
    row = lambda value: jnp.full(q.shape[0], value, jnp.int32)
    return coded_attention(q, planes[:-1], planes[-1], row(SINKS), row(S - WINDOW), scale=SCALE)


def step(q: jax.Array, far: Coded, ring: Ring, *, bits: tuple[int, ...], S: int) -> jax.Array:
    """One token of each row: near and far tokens under one softmax, [B, N, H]."""
    B, K = ring.k.shape[:2]
    nothing = jnp.zeros((B, K, S, 0), q.dtype)
    near = decode_attention(
        q,
        nothing,
        nothing,
        jnp.full(B, S, jnp.int32),
        scale=SCALE,
        ring=ring,
        sinks=SINKS,
        window=WINDOW,
    )
    parts = [(o[:, None], lse[..., None]) for o, lse in (near, far_part(q, far, bits, S))]
    return merge_partial(parts)[0][:, 0]


def exact_head(
    b: int, n: int, q: jax.Array, far: Coded, ring: Ring, bits: tuple[int, ...], S: int
) -> np.ndarray:
    """One head in float64."""
    f64 = lambda x: np.asarray(x.astype(jnp.float32), np.float64)
    kv = n // (N // ring.k.shape[1])

    def read(pair: tuple[jax.Array, jax.Array], b_: int) -> np.ndarray:
        levels, reach = (x[b, kv] for x in pair)
        decoded = FittedIntegers(b_).decode(
            (levels[:, None], reach[:, None, None]), levels.shape[-1] * 8 // b_
        )
        return f64(decoded[:, 0])

    *keys, v = (read(pair, b_) for pair, b_ in zip(far, bits, strict=True))
    k, at = np.concatenate(keys, 1), np.arange(S)
    near, slots = (at < SINKS) | (at >= S - WINDOW), np.where(at < SINKS, WINDOW + at, at % WINDOW)
    k, v = (np.where(near[:, None], f64(r[b, kv])[slots], x) for r, x in zip(ring, (k, v), strict=True))
    scores = SCALE * k @ f64(q[b, n])
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ v


def row(heads: str, shape: Shape, options: Options, bandwidth: float) -> dict[str, Any]:
    """A shape beside its peer; what the peer needs is gone before the codes are made."""
    (B, S), K, kinds = shape, HEADS[heads], (*options.keys, options.values)
    q = normal(0, B, N, H)
    k, v = normal(1, B, S, K, H), normal(2, B, S, K, H)
    timed = partial(device_ms, iterations=options.repeats)
    peer = timed(lambda q, k, v: cudnn(q, k, v, causal=False), q[:, None], k, v)
    del k, v
    seeds = jax.random.split(jax.random.key(3, impl="rbg"), len(kinds))
    far = tuple(random_plane(key, (B, K, S), C * b // 8) for key, (C, b) in zip(seeds, kinds, strict=True))
    ring = Ring(normal(4, B, K, WINDOW + 8, H), normal(5, B, K, WINDOW + 8, H))
    bits = tuple(b for _, b in kinds)
    call = partial(step, bits=bits, S=S)
    times = timed(call, q, far, ring)
    found = np.asarray(jax.jit(call)(q, far, ring), np.float64)
    relative = lambda x, true: np.linalg.norm(x - true) / np.linalg.norm(true)
    wrong = max(
        relative(found[b, n], exact_head(b, n, q, far, ring, bits, S)) for b, n in ((0, 0), (B - 1, N - 1))
    )
    nbytes = sum(x.nbytes for x in jax.tree.leaves((far, ring)))
    ms = float(np.median(times))
    found_row = {
        "kind": "whole",
        "heads": heads,
        "B": B,
        "S": S,
        "plan": {"keys": options.keys, "values": options.values, "window": WINDOW, "sinks": SINKS},
        "ms": ms,
        "peer_ms": float(np.median(peer)),
        "speedup": float(np.median(peer)) / ms,
        "bandwidth": nbytes / (ms * 1e-3) / bandwidth,
        "error": wrong,
        "repeats": {"ms": times, "peer_ms": peer},
        "commit": commit(),
    }
    print({key: value for key, value in found_row.items() if key not in ("plan", "repeats")}, flush=True)
    return found_row


def rows(options: Options, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Of all shapes; one that does not run is said and left out."""
    for shape in options.shapes:
        for heads in HEADS:
            yield row(heads, shape, options, bandwidth)


def main(options: Options) -> None:
    """Writes one JSON, again after each row."""
    bandwidth, found = read_bandwidth(), []
    print(f"reading {bandwidth / 1e12:.2f} TB/s", flush=True)
    settings = {"read_bandwidth": bandwidth, "clock": "CUPTI"}
    for each in rows(options, bandwidth):
        found.append(each)
        path = write_result(options.name, settings, found, options.results)
    print(path)


if __name__ == "__main__":
    main(tyro.cli(Options))
