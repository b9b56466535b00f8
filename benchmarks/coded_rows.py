"""Rows of `bench_coded` beside those of decoding: coding a prompt, pieces of a prompt, and selecting."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.coded_shapes import (
    HEADS,
    PLANS,
    SCALE,
    SINKS,
    WINDOW,
    Coded,
    H,
    N,
    planes,
    random_tokens,
    span,
)
from benchmarks.common import commit
from benchmarks.timing import device_ms, kernel_times, normal
from kernels_pallas import Stored, Turning, encode, largest, post_rope, turn_and_store
from zdc_jax.cache.choosing import FarTokens
from zdc_jax.cache.coded_choosing import CodedChoosing
from zdc_jax.cache.coded_store import CodedStore
from zdc_jax.cache.fitted_integers import FittedIntegers
from zdc_jax.cache.prefix_ring import put_ring
from zdc_jax.cache.spec import Call

PROMPT = 8192
BEHIND, CHUNK = 31744, 1024
"""Tokens that are there, and new ones."""
COUNT = 1024
"""Scores that are selected of a row."""
XLA_REPEATS = 2
"""Of what takes many times as long as kernels."""


class Scores(NamedTuple):
    """Rows B·K of S scores."""

    B: int
    K: int
    S: int


SELECTIONS = Scores(16, 8, 32768), Scores(16, 32, 32768), Scores(1, 8, 131072)


def put(k: jax.Array, v: jax.Array, empty: Coded, start: jax.Array) -> Any:
    """A store of plan `chosen` with the keys and values of a prompt."""
    index, rest, values = planes(empty, PLANS["chosen"])
    return encode([k, v], [[index, rest], [values]], start, start + k.shape[1])


def encode_row(heads: str, repeats: int, rate: float) -> dict[str, Any]:
    """Keys and values of a prompt, with an index, into an empty store; the kernel alone. rate: of a copy."""
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
    """One new token of each row turned, coded and put into store and ring: in one launch, and one after the
    other."""
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

    def at_once(held: Any, *new: jax.Array) -> Any:
        empty, rings = held
        index, rest, values = planes(empty, plan)
        stored = Stored([index, rest], rings[0]), Stored([values], rings[1])
        q, keys, values = turn_and_store(*(x[:, 0] for x in new), turning, *stored, start, start + 1, **near)
        written = tuple(plane[:2] for plane in (*keys.planes, *values.planes))
        return (written, [keys.ring, values.ring]), q

    def turned(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = [x.swapaxes(0, 1) for x in (q, k)]  # A tile is of one row's tokens.
        q, k, _ = post_rope(*rows, *(x[None] for x in turning[:2]), *bases, qk_rank=H, keep_tail=False)
        return q.swapaxes(0, 1), k.transpose(2, 0, 1, 3)

    def apart(held: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        (empty, rings), (q, k) = held, turned(q, k)
        at = near | {"positions": start[:, None], "end": start + 1}
        rings = [put_ring(ring, x=x, **at) for ring, x in zip(rings, (k, v), strict=True)]
        written = tuple(plane[:2] for each in put(k, v, empty, start) for plane in each)
        return (written, rings), q

    times, peer = (_in_place(f, (empty, rings), (q, k, v), repeats) for f in (at_once, apart))
    turning_times = device_ms(turned, q, k, iterations=repeats)
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


def _in_place(f: Any, held: Any, given: tuple[jax.Array, ...], repeats: int) -> list[float]:
    """Milliseconds of all kernels of f(held, *given), which gives what is held next and other things."""
    call, held = jax.jit(f, donate_argnums=0), jax.tree.map(jnp.copy, held)
    held, _ = call(held, *given)

    def run() -> Any:
        nonlocal held
        held, found = call(held, *given)
        return found

    return [sum(ms for _, ms in kernel_times(run)) for _ in range(repeats)]


def whole_store(heads: str) -> CodedStore:
    """The product's store of plan `whole`."""
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
    """A piece of a prompt and its far tokens, decoded for it, beside the same numbers held in bfloat16."""
    K, S, plan = HEADS[heads], BEHIND + CHUNK, PLANS["whole"]
    store, call = whole_store(heads), Call(SCALE, "pallas")
    far = tuple(
        (levels[..., None, :], reach[..., None, None]) for levels, reach in random_tokens(plan, 1, K, S)
    )
    q, positions = normal(0, 1, CHUNK, N, H), BEHIND + jnp.arange(CHUNK, dtype=jnp.int32)[None]

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
    """The product's store of plan `chosen`."""
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
    """One query head at one place of a piece, for the truth."""

    t: int
    n: int

    def error(self, o: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> float:
        """Of o [1, T, N, H], relative to float64 on k, v [1, K, S, H] in its `slots` [1, T, K, n]."""

        def f64(x):
            return np.asarray(x.astype(jnp.float32), np.float64)

        kv = self.n // (N // k.shape[1])
        at = slots[0, self.t, kv]
        scores = SCALE * f64(k[0, kv, at]) @ f64(q[0, self.t, self.n])
        weights = np.exp(scores - scores.max())
        true = weights / weights.sum() @ f64(v[0, kv, at])
        return float(np.linalg.norm(f64(o[0, self.t, self.n]) - true) / np.linalg.norm(true))

    def agreement(self, store: CodedChoosing, far: FarTokens, q: jax.Array, slots: jax.Array) -> float:
        """Share of its slots that XLA chooses, too, which does not round queries."""
        here, kv = slice(self.t, self.t + 1), self.n // (N // store.num_kv_heads)
        positions = jnp.full((1, 1), BEHIND + self.t, jnp.int32)
        chosen = store.chosen(far, q[:, here], positions, Call(SCALE, "xla"))[0, 0, kv]
        return float(np.isin(slots[0, self.t, kv], chosen).mean())


SAMPLED = Query(0, 0), Query(517, N // 2), Query(CHUNK - 1, N - 1)


def chosen_chunk_row(heads: str, repeats: int) -> dict[str, Any]:
    """A piece of a prompt whose tokens each choose what they read, beside attention to all in bfloat16.

    error, agreement: the worst of `SAMPLED`, see `Query`. xla_ms: of the same call on XLA, which reads all.
    """
    K, S, plan, store = HEADS[heads], BEHIND + CHUNK, PLANS["chosen"], choosing_store(heads)
    index, k, v = ((levels, reach[..., None]) for levels, reach in random_tokens(plan, 1, K, S))
    far = FarTokens(k, v, index)
    q, positions = normal(0, 1, CHUNK, N, H), BEHIND + jnp.arange(CHUNK, dtype=jnp.int32)[None]
    given, on_kernels = (far, q, positions), Call(SCALE, "pallas")

    def attend(far, q, positions):
        return store.attend_far(far, q, positions, on_kernels)

    # What a leader hands on, alone: its attention is dropped by the compiler.
    leader = replace(store, leads=True)

    def choose(far, q, positions):
        return leader.far_part(far, q, None, positions, on_kernels, None)[2]

    def on_xla(far, q, positions):
        return store.attend_far(far, q, positions, Call(SCALE, "xla"))

    def exact(k, v, q, positions):
        return store.attend_rows(q, k, v, positions, on_kernels)

    times, delay = (device_ms(call, *given, iterations=repeats) for call in (attend, choose))
    rows = jax.jit(store.all_rows)(far)
    peer = device_ms(exact, *rows, q, positions, iterations=repeats)
    masked = device_ms(on_xla, *given, iterations=XLA_REPEATS)
    (o, _), slots = jax.jit(attend)(*given), jax.jit(choose)(*given)
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
    """XLA's selection of slots begin ≤ j < end, of equal scores any."""
    at = jnp.arange(scores.shape[-1])
    counts = (at >= begin[:, None, None]) & (at < end[:, None, None])
    return jax.lax.top_k(jnp.where(counts, scores, -jnp.inf), COUNT, is_stable=False)[1]


def selection_row(shape: Scores, repeats: int) -> dict[str, Any]:
    """The largest scores of all rows, by the kernel and by XLA; those of few rows stay in the GPU's cache."""
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
