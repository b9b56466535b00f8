"""Benchmark of kernels for quantized caches against cuDNN on all keys and values in bfloat16.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python -m benchmarks.kernels.bench_coded

Each row decodes one new token of each sequence with 32 query heads of 128 coordinates. Keys and values are
random integers with random scales. The decode kernel reads the recent tokens (window 512 and 4 sinks in 16
bits), which every row includes. Kinds of rows:

- `whole`: all older tokens are read, in 4 bits.
- `bit planes`: all older tokens are read, in 6 and 3 bits.
- `chosen`: an index of 32 coordinates scores all older tokens, and each KV head reads 1,024 of them.
- `encode`: a prompt of 8,192 tokens is quantized; `bandwidth` is relative to a copy.
- `prompt chunk`: 1,024 new tokens attend to 31,744 older ones in 4 bits; the peer has the same in bfloat16.
- `prompt chunk chosen`: each of the new tokens reads 1,024 older ones; `xla_ms` is the time on XLA, and
  `agreement` the share of tokens that XLA chooses too.
- `new tokens`: queries, keys and values are rotated, quantized and stored in one launch; the peer uses
  several.
- `selection`: 1,024 scores of each row are selected; the peer is XLA.

Times are device times (CUPTI) of all kernels of a step. `delay` is the part of scanning and selecting, timed
alone. Ours is a median, the peer's time is its fastest. `error` is relative to float64 on the same integers
and the same choice, the larger of two heads.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, write_result
from benchmarks.kernels.bench_kernels import cudnn
from benchmarks.kernels.timing import copy_bandwidth, device_ms, kernel_times, normal
from kernels_pallas import (
    CodedPass,
    Plane,
    Ring,
    Stored,
    Turning,
    coded_parts,
    decode_parts,
    encode,
    index_scores,
    join_heads,
    largest,
    merged_at_once,
    post_rope,
    turn_and_store,
)
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.specs.choosing import FarTokens
from zdc_jax.cache.specs.coded_choosing import CodedChoosing
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.prefix_ring import put_ring
from zdc_jax.cache.specs.spec import Call

N, H, SINKS, WINDOW = 32, 128, 4, 512
SCALE = H**-0.5
HEADS = {"MHA": 32, "GQA-4": 8}
SCALE_BYTES = (112, 128)
"""Bounds of random 8-bit scales, which mean 1/4 to 1."""
Coded = tuple[tuple[jax.Array, jax.Array], ...]
"""Levels and scales of planes."""


class Plan(NamedTuple):
    """Plan of one layer.

    Attributes:
      keys: coordinates and bits of each plane of keys.
      values: coordinates and bits of values.
      read: tokens that the first plane chooses; 0 for all.
    """

    keys: tuple[tuple[int, int], ...]
    values: tuple[int, int]
    read: int = 0

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits of all planes."""
        return tuple(bits for _, bits in (*self.keys, self.values))

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of the levels of one token, for each plane."""
        return tuple(C * bits // 8 for C, bits in (*self.keys, self.values))


PLANS = {
    "whole": Plan(keys=((H, 4),), values=(H, 4)),
    "bit planes": Plan(keys=((32, 6), (H - 32, 3)), values=(H, 3)),
    "chosen": Plan(keys=((32, 4), (H - 32, 4)), values=(H, 4), read=1024),
}


@partial(jax.jit, static_argnums=(1, 2))
def random_plane(key: jax.Array, tokens: tuple[int, ...], width: int) -> tuple[jax.Array, jax.Array]:
    """Return levels of `width` bytes and scales of random tokens."""
    levels, scale = jax.random.split(key)
    return (
        jax.random.bits(levels, (*tokens, width), jnp.uint8),
        jax.random.randint(scale, tokens, *SCALE_BYTES).astype(jnp.uint8),
    )


def random_tokens(plan: Plan, B: int, K: int, S: int) -> Coded:
    """Return all planes of S random tokens of B sequences and K heads."""
    seeds = jax.random.split(jax.random.key(3, impl="rbg"), len(plan.bits))
    return tuple(random_plane(seed, (B, K, S), width) for seed, width in zip(seeds, plan.nbytes, strict=True))


def planes(far: Coded, plan: Plan) -> list[Plane]:
    """Return the planes of keys, then of values."""
    return [Plane(*pair, bits) for pair, bits in zip(far, plan.bits, strict=True)]


def span(B: int, S: int) -> tuple[jax.Array, jax.Array]:
    """Return the first slot and the end of the older tokens of each sequence."""
    return jnp.full(B, SINKS, jnp.int32), jnp.full(B, S - WINDOW, jnp.int32)


PROMPT = 8192
EARLIER, CHUNK = 31744, 1024
"""Tokens in the cache, and new ones."""
COUNT = 1024
"""Scores selected from each row."""
XLA_REPEATS = 2
"""Repeats of calls that take many times as long as kernels."""


class Scores(NamedTuple):
    """B·K rows of S scores."""

    B: int
    K: int
    S: int


SELECTIONS = Scores(16, 8, 32768), Scores(16, 32, 32768), Scores(1, 8, 131072)


def put(k: jax.Array, v: jax.Array, empty: Coded, start: jax.Array) -> Any:
    """Quantize keys and values of a prompt into an empty store of plan `chosen`."""
    index, rest, values = planes(empty, PLANS["chosen"])
    return encode([k, v], [[index, rest], [values]], start, start + k.shape[1])


def encode_row(heads: str, repeats: int, rate: float) -> dict[str, Any]:
    """Time the kernel that quantizes a prompt with an index into an empty store; `rate` is that of a copy."""
    K, plan, T = HEADS[heads], PLANS["chosen"], PROMPT

    def zeros(*shape):
        return jnp.zeros((1, K, T, *shape), jnp.uint8)

    empty = tuple((zeros(width), zeros()) for width in plan.nbytes)
    k, v, start = normal(0, 1, T, K, H), normal(1, 1, T, K, H), jnp.zeros(1, jnp.int32)
    call = jax.jit(put)
    jax.block_until_ready(call(k, v, empty, start))

    def run():
        return [call(k, v, empty, start) for _ in range(repeats)]

    times = [ms for name, ms in kernel_times(run) if "zdc_encode" in name]
    ms, nbytes = float(np.median(times)), k.nbytes + v.nbytes + sum(x.nbytes for pair in empty for x in pair)
    return {
        "kind": "encode",
        "heads": heads,
        "B": 1,
        "S": T,
        "plan": plan._asdict(),
        "ms": ms,
        "bandwidth": nbytes / (ms * 1e-3) / rate,
        "repeats": {"ms": times},
        "commit": commit(),
    }


def new_tokens_row(heads: str, B: int, repeats: int) -> dict[str, Any]:
    """Time one new token of each sequence, rotated, quantized and stored in one launch and in several."""
    K, plan, start = HEADS[heads], PLANS["chosen"], jnp.full(B, WINDOW, jnp.int32)

    def zeros(*shape):
        return jnp.zeros((B, K, WINDOW + 128, *shape), jnp.uint8)

    empty = tuple((zeros(width), zeros()) for width in plan.nbytes)
    q, (k, v) = normal(0, B, 1, N, H), (normal(i, B, 1, K, H) for i in (1, 2))
    angles = start[:, None] * 1e4 ** -jnp.arange(0, 1, 2 / H)
    bases = [jnp.linalg.qr(normal(i, K, H, H, dtype=jnp.float32))[0].astype(jnp.float16) for i in (3, 4)]
    turning = Turning(jnp.cos(angles), jnp.sin(angles), *bases)
    rings = [normal(i, B, K, WINDOW + 8, H) for i in (5, 6)]
    near = {"sinks": SINKS, "window": WINDOW}

    def at_once(state: Any, *new: jax.Array) -> Any:
        empty, rings = state
        index, rest, values = planes(empty, plan)
        stored = Stored([index, rest], rings[0]), Stored([values], rings[1])
        heads = join_heads(*(x[:, 0] for x in new))
        q, keys, values = turn_and_store(heads, turning, *stored, start, start + 1, **near)
        written = tuple((plane.levels, plane.reach) for plane in (*keys.planes, *values.planes))
        return (written, [keys.ring, values.ring]), q.plain

    def rotate(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = [x.swapaxes(0, 1) for x in (q, k)]  # A tile holds tokens of one sequence.
        q, k = post_rope(*rows, *(x[None] for x in turning[:2]), *bases)
        return q.swapaxes(0, 1), k.transpose(2, 0, 1, 3)

    def apart(state: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        (empty, rings), (q, k) = state, rotate(q, k)
        at = near | {"positions": start[:, None], "end": start + 1}
        rings = [put_ring(ring, x=x, **at) for ring, x in zip(rings, (k, v), strict=True)]
        written = tuple((plane.levels, plane.reach) for each in put(k, v, empty, start) for plane in each)
        return (written, rings), q

    times, peer = (_in_place(f, (empty, rings), (q, k, v), repeats) for f in (at_once, apart))
    turning_times = device_ms(rotate, q, k, iterations=repeats)
    return {
        "kind": "new tokens",
        "heads": heads,
        "B": B,
        "plan": plan._asdict(),
        "ms": float(np.median(times)),
        "peer_ms": min(peer),
        "turning_ms": min(turning_times),
        "repeats": {"ms": times, "peer_ms": peer, "turning_ms": turning_times},
        "commit": commit(),
    }


def _in_place(f: Any, state: Any, inputs: tuple[jax.Array, ...], repeats: int) -> list[float]:
    """Return milliseconds of all kernels of `f(state, *inputs)`, which returns the next state first."""
    call, state = jax.jit(f, donate_argnums=0), jax.tree.map(jnp.copy, state)
    state, _ = call(state, *inputs)

    def run() -> Any:
        nonlocal state
        state, output = call(state, *inputs)
        return output

    return [sum(ms for _, ms in kernel_times(run)) for _ in range(repeats)]


def whole_store(heads: str) -> CodedStore:
    """Return the library's store of plan `whole`."""
    (_, bits_k), (_, bits_v) = *PLANS["whole"].keys, PLANS["whole"].values
    return CodedStore(
        num_kv_heads=HEADS[heads],
        head_dim=H,
        dtype="bfloat16",
        R=H,
        Z=H,
        sinks=SINKS,
        window=WINDOW,
        key_code=FittedIntegers(bits_k),
        value_code=FittedIntegers(bits_v),
    )


def chunk_row(heads: str, repeats: int) -> dict[str, Any]:
    """Time a prompt chunk on quantized older tokens, and on the same values in bfloat16."""
    K, S, plan = HEADS[heads], EARLIER + CHUNK, PLANS["whole"]
    store, call = whole_store(heads), Call(SCALE, "pallas")
    far = tuple(
        (levels[..., None, :], scale[..., None, None]) for levels, scale in random_tokens(plan, 1, K, S)
    )
    q, positions = normal(0, 1, CHUNK, N, H), EARLIER + jnp.arange(CHUNK, dtype=jnp.int32)[None]

    def coded(far, q, positions):
        return store.attend_far(far, q, positions, call)

    def exact(k, v, q, positions):
        return store.attend_rows(q, k, v, positions, call)

    times = device_ms(coded, far, q, positions, iterations=repeats)
    peer = device_ms(exact, *jax.jit(store.read)(far), q, positions, iterations=repeats)
    ms, peer_ms = float(np.median(times)), min(peer)
    return {
        "kind": "prompt chunk",
        "heads": heads,
        "B": 1,
        "T": CHUNK,
        "S": S,
        "plan": plan._asdict() | {"window": WINDOW, "sinks": SINKS},
        "ms": ms,
        "peer_ms": peer_ms,
        "cost": ms / peer_ms,
        "repeats": {"ms": times, "peer_ms": peer},
        "commit": commit(),
    }


def choosing_store(heads: str) -> CodedChoosing:
    """Return the library's store of plan `chosen`."""
    plan = PLANS["chosen"]
    (index, index_bits), (_, bits_k), (_, bits_v) = *plan.keys, plan.values
    return CodedChoosing(
        num_kv_heads=HEADS[heads],
        head_dim=H,
        dtype="bfloat16",
        R=H,
        Z=H,
        sinks=SINKS,
        window=WINDOW,
        index=index,
        index_code=FittedIntegers(index_bits),
        key_code=FittedIntegers(bits_k),
        value_code=FittedIntegers(bits_v),
        read=plan.read,
    )


class Query(NamedTuple):
    """One query head at one position of a chunk, to be checked."""

    t: int
    n: int

    def error(self, o: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> float:
        """Return the relative error of o [1, T, N, H] on k, v [1, K, S, H] in `slots` [1, T, K, n]."""

        def f64(x):
            return np.asarray(x.astype(jnp.float32), np.float64)

        kv = self.n // (N // k.shape[1])
        at = slots[0, self.t, kv]
        scores = SCALE * f64(k[0, kv, at]) @ f64(q[0, self.t, self.n])
        weights = np.exp(scores - scores.max())
        true = weights / weights.sum() @ f64(v[0, kv, at])
        return float(np.linalg.norm(f64(o[0, self.t, self.n]) - true) / np.linalg.norm(true))

    def agreement(self, store: CodedChoosing, far: FarTokens, q: jax.Array, slots: jax.Array) -> float:
        """Return the share of its slots that XLA also chooses; XLA does not round queries."""
        here, kv = slice(self.t, self.t + 1), self.n // (N // store.num_kv_heads)
        positions = jnp.full((1, 1), EARLIER + self.t, jnp.int32)
        chosen = store.chosen(far, q[:, here], positions, Call(SCALE, "xla"))[0, 0, kv]
        return float(np.isin(slots[0, self.t, kv], chosen).mean())


SAMPLED = Query(0, 0), Query(517, N // 2), Query(CHUNK - 1, N - 1)


def chosen_chunk_row(heads: str, repeats: int) -> dict[str, Any]:
    """Time a prompt chunk in which each token chooses what it reads, and attention to all tokens in bfloat16.

    `error` and `agreement` are the worst of `SAMPLED`. `xla_ms` is the time of the same call on XLA.
    """
    K, S, plan, store = HEADS[heads], EARLIER + CHUNK, PLANS["chosen"], choosing_store(heads)
    index, k, v = ((levels, scale[..., None]) for levels, scale in random_tokens(plan, 1, K, S))
    far = FarTokens(k, v, index)
    q, positions = normal(0, 1, CHUNK, N, H), EARLIER + jnp.arange(CHUNK, dtype=jnp.int32)[None]
    inputs, on_kernels = (far, q, positions), Call(SCALE, "pallas")

    def attend(far, q, positions):
        return store.attend_far(far, q, positions, on_kernels)

    # The choice alone: the compiler drops the attention of a leading layer.
    leader = replace(store, leads=True)

    def choose(far, q, positions):
        return leader.far_part(far, q, None, positions, on_kernels, None)[2]

    def on_xla(far, q, positions):
        return store.attend_far(far, q, positions, Call(SCALE, "xla"))

    def exact(k, v, q, positions):
        return store.attend_rows(q, k, v, positions, on_kernels)

    times, delay = (device_ms(call, *inputs, iterations=repeats) for call in (attend, choose))
    rows = jax.jit(store.all_rows)(far)
    peer = device_ms(exact, *rows, q, positions, iterations=repeats)
    masked = device_ms(on_xla, *inputs, iterations=XLA_REPEATS)
    (o, _), slots = jax.jit(attend)(*inputs), jax.jit(choose)(*inputs)
    ms, peer_ms = float(np.median(times)), min(peer)
    return {
        "kind": "prompt chunk chosen",
        "heads": heads,
        "B": 1,
        "T": CHUNK,
        "S": S,
        "plan": plan._asdict() | {"window": WINDOW, "sinks": SINKS},
        "ms": ms,
        "delay": float(np.median(delay)),
        "peer_ms": peer_ms,
        "xla_ms": min(masked),
        "cost": ms / peer_ms,
        "error": max(each.error(o, q, *rows, slots) for each in SAMPLED),
        "agreement": min(each.agreement(store, far, q, slots) for each in SAMPLED),
        "repeats": {"ms": times, "peer_ms": peer, "delay": delay, "xla_ms": masked},
        "commit": commit(),
    }


def by_xla(scores: jax.Array, begin: jax.Array, end: jax.Array) -> jax.Array:
    """Select slots begin ≤ j < end by XLA; ties fall anywhere."""
    at = jnp.arange(scores.shape[-1])
    counts = (at >= begin[:, None, None]) & (at < end[:, None, None])
    return jax.lax.top_k(jnp.where(counts, scores, -jnp.inf), COUNT, is_stable=False)[1]


def selection_row(shape: Scores, repeats: int) -> dict[str, Any]:
    """Time the selection of the largest scores by the kernel and by XLA; few rows stay in the GPU's cache."""
    scores, ends = normal(0, *shape, dtype=jnp.float32), span(shape.B, shape.S)

    def ours(scores, begin, end):
        return largest(scores, begin, end, k=COUNT)

    times = device_ms(ours, scores, *ends, iterations=repeats)
    peer = device_ms(by_xla, scores, *ends, iterations=repeats)
    ms, peer_ms = float(np.median(times)), min(peer)
    return {
        "kind": "selection",
        **shape._asdict(),
        "k": COUNT,
        "ms": ms,
        "peer_ms": peer_ms,
        "speedup": peer_ms / ms,
        "repeats": {"ms": times, "peer_ms": peer},
        "commit": commit(),
    }


class Shape(NamedTuple):
    """Sequences, and tokens of each."""

    B: int
    S: int


OF_HEADS = ("encode", "prompt chunk", "prompt chunk chosen")
ROWS = 8
"""Sequences of the rows `new tokens`."""
KINDS = (*OF_HEADS, "new tokens", "selection", *PLANS)


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      shapes: sequences and tokens of decoding.
      kinds: kinds of rows to run, from `KINDS`.
    """

    shapes: tuple[Shape, ...] = (Shape(16, 32768), Shape(16, 131072), Shape(1, 131072))
    kinds: tuple[str, ...] = KINDS
    repeats: int = 7
    name: str = "coded-h200"
    results: Path = RESULTS


def read_bandwidth() -> float:
    """Return bytes read per second by a sum of 4 GiB."""
    x = jax.random.bits(jax.random.key(0, impl="rbg"), (2**30,), jnp.uint32)
    return x.nbytes / (np.median(device_ms(lambda x: x.sum(dtype=jnp.uint32), x)) * 1e-3)


def choose(q: jax.Array, far: Coded, begin: jax.Array, end: jax.Array, *, plan: Plan) -> jax.Array:
    """Return the slots that each KV head reads."""
    index = planes(far, plan)[0]
    scores, _ = index_scores(q[..., : index.width], index, begin, end, scale=SCALE)
    return largest(scores, begin, end, k=plan.read)


def step(q: jax.Array, far: Coded, ring: Ring, begin: jax.Array, end: jax.Array, *, plan: Plan) -> jax.Array:
    """Attend with one token a sequence to recent and older tokens under one softmax: [B, N, H]."""
    B, K, S = far[0][1].shape
    nothing, lengths = jnp.zeros((B, K, S, 0), q.dtype), end + WINDOW
    near = decode_parts(q, nothing, nothing, lengths, scale=SCALE, ring=ring, sinks=SINKS, window=WINDOW)
    slots = choose(q, far, begin, end, plan=plan) if plan.read else None
    *keys, values = planes(far, plan)
    (older,) = coded_parts([CodedPass(q, keys, values, begin, end, slots)], scale=SCALE)
    return merged_at_once([near, older], N // K, q.dtype)[0]


class Head(NamedTuple):
    """One query head of one sequence, to be checked."""

    b: int
    n: int

    def exact(self, q: jax.Array, far: Coded, ring: Ring, slots: Any, *, plan: Plan, S: int) -> np.ndarray:
        """Return the result of the head in float64."""

        def f64(x):
            return np.asarray(x.astype(jnp.float32), np.float64)

        kv = self.n // (N // ring.k.shape[1])

        def read(pair: tuple[jax.Array, jax.Array], bits: int) -> np.ndarray:
            levels, scale = (x[self.b, kv] for x in pair)
            code, width = FittedIntegers(bits), levels.shape[-1] * 8 // bits
            return f64(code.decode((levels[:, None], scale[:, None, None]), width)[:, 0])

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
    """Return times of cuDNN on all tokens; its arrays are freed afterwards."""
    B, S = shape
    q, k, v = normal(0, B, 1, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)
    return device_ms(lambda q, k, v: cudnn(q, k, v, causal=False), q, k, v, iterations=repeats)


def row(kind: str, heads: str, shape: Shape, peer: list[float], repeats: int, rate: float) -> dict[str, Any]:
    """Time one plan at one shape."""
    (B, S), K, plan = shape, HEADS[heads], PLANS[kind]
    far = random_tokens(plan, B, K, S)
    q, ring = normal(0, B, N, H), Ring(normal(4, B, K, WINDOW + 8, H), normal(5, B, K, WINDOW + 8, H))
    call, chooses, ends = partial(step, plan=plan), partial(choose, plan=plan), span(B, S)
    times = device_ms(call, q, far, ring, *ends, iterations=repeats)
    delay = device_ms(chooses, q, far, *ends, iterations=repeats) if plan.read else [0.0]
    output = jax.jit(call)(q, far, ring, *ends)
    slots = jax.jit(chooses)(q, far, *ends) if plan.read else None
    wrong = []
    for head in (Head(0, 0), Head(B - 1, N - 1)):
        true = head.exact(q, far, ring, slots, plan=plan, S=S)
        wrong.append(
            np.linalg.norm(np.asarray(output[head.b, head.n], np.float64) - true) / np.linalg.norm(true)
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
    """Yield rows of all kinds; kinds of decoding share one measurement of the peer at each shape."""
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
    """Write one JSON file, again after each row."""
    if unknown := set(options.kinds) - {*KINDS}:
        raise SystemExit(f"kinds={sorted(unknown)} must be of {KINDS}")
    reading, copying, finished = read_bandwidth(), copy_bandwidth(), []
    print(f"reading {reading / 1e12:.2f} TB/s, copying {copying / 1e12:.2f}", flush=True)
    for each in rows(options, reading, copying):
        print({name: value for name, value in each.items() if name not in ("plan", "repeats")}, flush=True)
        finished.append(each)
        config = {"read_bandwidth": reading, "copy_bandwidth": copying}
        path = write_result(options.name, config, finished, options.results)
    print(path)


if __name__ == "__main__":
    main(tyro.cli(Options))
