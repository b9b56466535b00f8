"""How fast is decoding from coded keys and values, beside cuDNN on all of them in bfloat16?

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python -m benchmarks.bench_coded

One new token a row, 32 query heads of 128 coordinates. Keys and values are random integers with random
reaches. Near tokens, a window of 512 and 4 sinks in 16 bits, are read by the decode kernel and counted in
every row. `whole`: all far tokens are read, in 4 bits. `bit planes`: so are those of 6 and 3 bits. `chosen`:
an index of 32 coordinates scores all, and each KV head reads 1024 of them. Times are device times (CUPTI),
all kernels of a step together; `delay` is what scanning and selecting take of it, timed by themselves. The
peer and the read bandwidth are measured in the same run; of ours the median counts, of the peer the fastest.
`error` is the larger relative error of the first head of the first row and the last of the last, against
float64 on the same integers and the same choice.

`encode`: keys and values of a prompt of 8192 tokens, the kernel alone, its bytes beside those that a copy
moves in that time. `prompt chunk`: 1024 new tokens and their far ones behind 31,744, all in 4 bits, as the
product reads them; the peer is the same attention to bfloat16. `prompt chunk chosen`: the same new tokens, of
which each reads 1024 far ones by the index, beside the same peer; `xla_ms` is what XLA takes, and `agreement`
how much of what kernels choose it chooses, too. `new tokens`: queries, keys and values turned, coded and
stored in one launch; the peer turns, then codes, then puts into the ring. `selection`: 1024 scores of each
row; the peer is XLA's.
"""

import itertools
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
from benchmarks.coded_rows import (
    SELECTIONS,
    chosen_chunk_row,
    chunk_row,
    encode_row,
    new_tokens_row,
    selection_row,
)
from benchmarks.coded_shapes import (
    HEADS,
    PLANS,
    SCALE,
    SINKS,
    WINDOW,
    Coded,
    H,
    N,
    Plan,
    planes,
    random_tokens,
    span,
)
from benchmarks.common import RESULTS, commit, write_result
from benchmarks.timing import copy_bandwidth, device_ms, normal
from kernels_pallas import Ring, coded_parts, decode_parts, index_scores, largest, merged_at_once
from zdc_jax.cache.fitted_integers import FittedIntegers


class Shape(NamedTuple):
    """Rows, and tokens of each."""

    B: int
    S: int


OF_HEADS = ("encode", "prompt chunk", "prompt chunk chosen")
ROWS = 8
"""Of new tokens."""
KINDS = (*OF_HEADS, "new tokens", "selection", *PLANS)


@dataclass(frozen=True)
class Options:
    """shapes: of decoding, rows and tokens. kinds: of `KINDS`."""

    shapes: tuple[Shape, ...] = (Shape(16, 32768), Shape(16, 131072), Shape(1, 131072))
    kinds: tuple[str, ...] = KINDS
    repeats: int = 7
    name: str = "coded-h200"
    results: Path = RESULTS


def read_bandwidth() -> float:
    """Bytes read per second by a sum of 4 GiB."""
    x = jax.random.bits(jax.random.key(0, impl="rbg"), (2**30,), jnp.uint32)
    return x.nbytes / (np.median(device_ms(lambda x: x.sum(dtype=jnp.uint32), x)) * 1e-3)


def choose(q: jax.Array, far: Coded, begin: jax.Array, end: jax.Array, *, plan: Plan) -> jax.Array:
    """Slots that each KV head reads."""
    index = planes(far, plan)[0]
    scores, _ = index_scores(q[..., : index.width], index, begin, end, scale=SCALE)
    return largest(scores, begin, end, k=plan.read)


def step(q: jax.Array, far: Coded, ring: Ring, begin: jax.Array, end: jax.Array, *, plan: Plan) -> jax.Array:
    """One token of each row: near and far tokens under one softmax, [B, N, H]; begin and end: see `span`."""
    B, K, S = far[0][1].shape
    nothing, lengths = jnp.zeros((B, K, S, 0), q.dtype), end + WINDOW
    near = decode_parts(q, nothing, nothing, lengths, scale=SCALE, ring=ring, sinks=SINKS, window=WINDOW)
    slots = choose(q, far, begin, end, plan=plan) if plan.read else None
    *keys, values = planes(far, plan)
    found = coded_parts(q, keys, values, begin, end, scale=SCALE, slots=slots)
    return merged_at_once([near, found], N // K, q.dtype)[0]


class Head(NamedTuple):
    """One query head of one row, for the truth."""

    b: int
    n: int

    def exact(self, q: jax.Array, far: Coded, ring: Ring, slots: Any, *, plan: Plan, S: int) -> np.ndarray:
        """Its result in float64."""

        def f64(x):
            return np.asarray(x.astype(jnp.float32), np.float64)

        kv = self.n // (N // ring.k.shape[1])

        def read(pair: tuple[jax.Array, jax.Array], bits: int) -> np.ndarray:
            levels, reach = (x[self.b, kv] for x in pair)
            code, width = FittedIntegers(bits), levels.shape[-1] * 8 // bits
            return f64(code.decode((levels[:, None], reach[:, None, None]), width)[:, 0])

        *keys, v = (read(pair, bits) for pair, bits in zip(far, plan.bits, strict=True))
        k, at = np.concatenate(keys, 1), np.arange(S)
        near = (at < SINKS) | (at >= S - WINDOW)
        rows = np.where(at < SINKS, WINDOW + at, at % WINDOW)
        k, v = (
            np.where(near[:, None], f64(r[self.b, kv])[rows], x) for r, x in zip(ring, (k, v), strict=True)
        )
        seen = np.ones(S, bool) if slots is None else near | np.isin(at, np.asarray(slots[self.b, kv]))
        scores = np.where(seen, SCALE * k @ f64(q[self.b, self.n]), -np.inf)
        weights = np.exp(scores - scores.max())
        return weights / weights.sum() @ v


def peer_times(shape: Shape, K: int, repeats: int) -> list[float]:
    """Of cuDNN on all tokens; its arrays are gone afterwards."""
    B, S = shape
    q, k, v = normal(0, B, 1, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)
    return device_ms(lambda q, k, v: cudnn(q, k, v, causal=False), q, k, v, iterations=repeats)


def row(kind: str, heads: str, shape: Shape, peer: list[float], repeats: int, rate: float) -> dict[str, Any]:
    """One plan at one shape."""
    (B, S), K, plan = shape, HEADS[heads], PLANS[kind]
    far = random_tokens(plan, B, K, S)
    q, ring = normal(0, B, N, H), Ring(normal(4, B, K, WINDOW + 8, H), normal(5, B, K, WINDOW + 8, H))
    call, chooses, ends = partial(step, plan=plan), partial(choose, plan=plan), span(B, S)
    times = device_ms(call, q, far, ring, *ends, iterations=repeats)
    delay = device_ms(chooses, q, far, *ends, iterations=repeats) if plan.read else [0.0]
    found = jax.jit(call)(q, far, ring, *ends)
    slots = jax.jit(chooses)(q, far, *ends) if plan.read else None
    wrong = []
    for head in (Head(0, 0), Head(B - 1, N - 1)):
        true = head.exact(q, far, ring, slots, plan=plan, S=S)
        wrong.append(
            np.linalg.norm(np.asarray(found[head.b, head.n], np.float64) - true) / np.linalg.norm(true)
        )
    read = plan.read / S if plan.read else 1.0
    stored = [sum(x.nbytes for x in pair) for pair in far]
    index = stored[0] if plan.read else 0
    nbytes = index + read * sum(stored) + sum(x.nbytes for x in ring)
    ms, peer_ms = float(np.median(times)), min(peer)
    return {
        "kind": kind,
        "heads": heads,
        "B": B,
        "S": S,
        "plan": plan._asdict() | {"window": WINDOW, "sinks": SINKS},
        "ms": ms,
        "delay": float(np.median(delay)),
        "peer_ms": peer_ms,
        "speedup": peer_ms / ms,
        "bandwidth": nbytes / (ms * 1e-3) / rate,
        "error": max(wrong),
        "repeats": {"ms": times, "peer_ms": peer, "delay": delay},
        "commit": commit(),
    }


def rows(options: Options, reading: float, copying: float) -> Iterator[dict[str, Any]]:
    """Of all kinds but decoding, and of decoding at all shapes, its kinds beside the same peer."""
    makers = partial(encode_row, rate=copying), chunk_row, chosen_chunk_row
    for (kind, make), heads in itertools.product(zip(OF_HEADS, makers, strict=True), HEADS):
        if kind in options.kinds:
            yield make(heads, options.repeats)
    for heads in HEADS if "new tokens" in options.kinds else ():
        yield new_tokens_row(heads, ROWS, options.repeats)
    for scores in SELECTIONS if "selection" in options.kinds else ():
        yield selection_row(scores, options.repeats)
    decoding = [kind for kind in options.kinds if kind in PLANS]
    for shape, (heads, K) in itertools.product(options.shapes if decoding else (), HEADS.items()):
        peer = peer_times(shape, K, options.repeats)
        for kind in decoding:
            yield row(kind, heads, shape, peer, options.repeats, reading)


def main(options: Options) -> None:
    """Writes one JSON, again after each row."""
    if unknown := set(options.kinds) - {*KINDS}:
        raise SystemExit(f"kinds={sorted(unknown)} must be of {KINDS}")
    reading, copying, found = read_bandwidth(), copy_bandwidth(), []
    print(f"reading {reading / 1e12:.2f} TB/s, copying {copying / 1e12:.2f}", flush=True)
    for each in rows(options, reading, copying):
        print({name: value for name, value in each.items() if name not in ("plan", "repeats")}, flush=True)
        found.append(each)
        config = {"read_bandwidth": reading, "copy_bandwidth": copying}
        path = write_result(options.name, config, found, options.results)
    print(path)


if __name__ == "__main__":
    main(tyro.cli(Options))
