"""Benchmark of the attention kernels against the limits of the card and against their best peers.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.8 python -m benchmarks.kernels.bench_kernels

The script prints the ceilings of the card first. Times are device times (CUPTI). Peers run in the same
process: cuDNN through JAX, and JAX's own kernel. PyTorch and FlashAttention-3 run in processes of their own,
timed by CUDA events. The bytes of a row with a cache are the bytes that it must read.

Rows with an `error` were checked in the same run on the tensors that are timed: prefill and decode against
float64, the epilogue against XLA. `error` is the relative error of the worst head and row, in the norm of the
head's coordinates. Prefill samples queries of the prompt; decode checks the first and the last sequence.
`tests/kernels` checks the numbers of paged and segment rows, which have times only.

    … --flash-attention-3 vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so

adds FlashAttention-3 from the library in vLLM's wheel. The row of a peer that fails gives the reason.

The JSON file is written again after each section; other sections stay. `ceilings` are those of the last run,
and the bounds of a row are those of its own run.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, earlier, write_result
from benchmarks.kernels.flash_attention_3 import Call
from benchmarks.kernels.timing import (
    copy_bandwidth,
    device_ms,
    flash_attention_3,
    matmul_rate,
    normal,
    torch_attention,
)
from kernels_pallas import Ring, Trailing, decode_parts, merged, post_rope, prefill_attention
from zdc_jax.methods.token_classes.attention import Segment, segment_attention

Section = Literal["prefill", "two-rank", "window", "decode", "epilogue", "segments"]
SECTIONS: tuple[Section, ...] = ("prefill", "two-rank", "window", "decode", "epilogue", "segments")
MULTIPROCESSORS, EXP_PER_CLOCK, CLOCK = 132, 16, 1.755e9
N, H = 32, 128
PREFILL_RANKS = [(128, 128), (96, 96), (64, 128), (64, 96), (48, 96), (64, 64), (32, 64)]
RISING = [(128, 128), (64, 96)]
"""Ranks that are also timed in the worst case."""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      sections: sections to run.
      flash_attention_3: the library `_vllm_fa3_C.abi3.so` of vLLM's wheel; without it its rows are left out.
      name: name of the result file.
    """

    sections: tuple[Section, ...] = SECTIONS
    flash_attention_3: Path | None = None
    name: str = "kernels-h200"
    results: Path = RESULTS


@dataclass(frozen=True)
class Ceilings:
    """Limits measured on this card: bytes per second of a copy, operations per second of a matrix product."""

    copy: float
    matmul: float

    def bounds(self, *, flops: float, exps: float, nbytes: float) -> dict[str, float]:
        """Return the milliseconds that each resource alone would take; exponentials at nominal rate."""
        return {
            "tensor": 1e3 * flops / self.matmul,
            "exp": 1e3 * exps / (MULTIPROCESSORS * EXP_PER_CLOCK * CLOCK),
            "bandwidth": 1e3 * nbytes / self.copy,
        }


Row = dict[str, Any]


def row(
    name: str, times: list[float], peer: list[float] | None, bounds: dict[str, float], **more: Any
) -> Row:
    """Return one measurement as a row, and print it."""
    ms = float(np.median(times))
    limit = max(bounds, key=lambda bound: bounds[bound])
    out: Row = {"name": name, "ms": ms, "times": times, "bounds": bounds, "limit": limit}
    out["of_limit"] = bounds[limit] / ms
    text = f"{name:44} {ms:8.3f} ms  {100 * out['of_limit']:4.0f} % of {limit}"
    if peer is not None:
        out["speedup"] = float(np.median(peer)) / ms
        text += f"  {out['speedup']:5.2f}x"
    out |= more
    print(text + "".join(f"  {key}={value:.2g}" for key, value in more.items()), flush=True)
    return out


def refused(name: str, why: str) -> Row:
    """Return the row of a peer that did not run, and print it."""
    print(f"{name:44} refused: {why[:200]}", flush=True)
    return {"name": name, "refused": why[:200]}


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, window: int | None = None) -> jax.Array:
    """Compute full-rank attention [B, T, N, H] by cuDNN.

    Args:
      window: the number of newest tokens that a query sees, itself included.
    """
    return jax.nn.dot_product_attention(
        q, k, v, scale=H**-0.5, is_causal=causal, implementation="cudnn",
        local_window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip


def flash_rows(
    library: Path | None, name: str, peer: list[float], bounds: dict[str, float], **call: Any
) -> Iterator[Row]:
    """Yield the row of FlashAttention-3; none without its library."""
    if library is None:
        return
    name, answer = f"flash-attention-3 {name}", flash_attention_3(Call(library, heads=N, **call))
    if "refused" in answer:
        yield refused(name, answer["refused"])
    else:
        yield row(name, answer["times"], peer, bounds, error=answer["error"]) | {"torch": answer["torch"]}


def exact_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: list[int], tail: Any, sinks: int, window: int
) -> np.ndarray:
    """Return the float64 output [B, positions, N, Hv].

    Args:
      q: queries [B, positions, N, Hq].
      k: keys [B, K, S, R]. Older keys of width 0 are not seen.
      v: values [B, K, S, Z].
      tail: further coordinates of recent keys and values, [B, K, S, ·] each, or None.
    """
    (B, P, N, _), K = q.shape, k.shape[1]
    q, *keys = jax.device_get((q.reshape(B, P, K, N // K, -1), k, v, *(tail or ())))
    heads = [
        exact_head(q[b, :, head], *(x[b, head] for x in keys), at=positions, sinks=sinks, window=window)
        for b, head in itertools.product(range(B), range(K))
    ]
    return np.stack(heads).reshape(B, K, P, N // K, -1).swapaxes(1, 2).reshape(B, P, N, -1)


def exact_head(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *tail: np.ndarray, at: list[int], sinks: int, window: int
) -> np.ndarray:
    """Return the output of one KV head: q [positions, G, Hq], k [S, R], v [S, Z], tail [S, ·] each."""
    q, k, v, *tail = (np.asarray(x, np.float64) for x in (q, k, v, *tail))
    j, t = np.arange(len(k)), np.array(at)[:, None, None]
    near = (j < sinks) | (j > t - window)
    scores, values = q[..., : k.shape[1]] @ k.T, [(v, 1.0)]
    if tail:
        scores = scores + np.where(near, q[..., k.shape[1] :] @ tail[0].T, 0)
        values.append((tail[1], near))
    seen = (j <= t) & (near | (k.shape[1] > 0))
    scores = np.where(seen, H**-0.5 * scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.concatenate([(weights * mask) @ x for x, mask in values], -1)


def error(out: jax.Array, exact: np.ndarray) -> float:
    """Return the relative error of the worst head and row, in the norm of its coordinates; both [..., Z]."""
    size = functools.partial(np.linalg.norm, axis=-1)
    return float((size(np.asarray(out, np.float64) - exact) / size(exact)).max())


def prefill(ceilings: Ceilings, library: Path | None) -> Iterator[Row]:
    """Time whole prompts at one rank: one KV head for each query head, and groups of four."""
    yield from prefill_heads(ceilings, library, 32, PREFILL_RANKS)
    yield from prefill_heads(ceilings, library, 8, [(128, 128), (64, 96)])


def prefill_heads(
    ceilings: Ceilings, library: Path | None, K: int, ranks: list[tuple[int, int]]
) -> Iterator[Row]:
    """Time causal prompts of 16,384 tokens with K KV heads; the peer is cuDNN at 128 coordinates."""
    S, positions = 16384, [0, 1, 777, 8191, 16383]
    at = rows_at(positions)
    pairs = N * S * (S + 1) / 2

    def bounds(R, Z):
        return ceilings.bounds(flops=2 * (R + Z) * pairs, exps=pairs, nbytes=2.0 * S * (N + K) * (R + Z))

    peers = {}
    for width in (128, 64):
        q, k, v = normal(0, 1, S, N, width), normal(1, 1, S, K, width), normal(2, 1, S, K, width)
        peers[width] = device_ms(lambda q, k, v: cudnn(q, k, v, causal=True), q, k, v)
        shape = f"H={width} K={K}"
        yield row(f"cudnn {shape}", peers[width], None, bounds(width, width))
        asked = {"tokens": S, "kv_heads": K, "head_dim": width}
        yield from flash_rows(library, shape, peers[128], bounds(width, width), **asked)
    if K == N:
        yield from jax_kernel(S, bounds(H, H), peers[128])
        yield {"name": "torch H=128", **torch_attention(S, N, H)}

    def f(q, k, v):
        return prefill_attention(q, k, v, scale=H**-0.5)[0]

    for (R, Z), rise in [*((pair, False) for pair in ranks), *((pair, True) for pair in RISING if K == N)]:
        q, k, v = normal(0, 1, S, N, R), normal(1, 1, K, S, R), normal(2, 1, K, S, Z)
        q, k = rising(q, k) if rise else (q, k)
        wrong = error(at(jax.jit(f)(q, k, v)), exact_rows(at(q), k, v, positions, None, 0, 0))
        times = device_ms(f, q, k, v)
        rate = 2 * (R + Z) * pairs / np.median(times) * 1e-9
        name = f"prefill ({R},{Z}) K={K}" + ", rising" * rise
        yield row(name, times, peers[128], bounds(R, Z), error=wrong, tflops=rate)


def rising(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return queries and keys whose scores rise: weights grow 2^16 times in 64 keys, the worst case.

    Every block raises every running maximum. The first coordinates of q [B, T, N, R] and k [B, K, S, R] are
    replaced.
    """
    ramp = (jnp.arange(k.shape[2]) / 4).astype(k.dtype)
    return q.at[..., 0].set(H**0.5 * math.log(2)), k.at[..., 0].set(ramp)


def jax_kernel(S: int, bounds: dict[str, float], peer: list[float]) -> Iterator[Row]:
    """Time JAX's own FlashAttention-3 kernel, if it accepts the call."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    q, k, v = (normal(i, 1, S, N, H, dtype=jnp.float16) for i in range(3))  # The kernel refuses bfloat16.
    config = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)
    try:
        times = device_ms(lambda q, k, v: attention_mgpu.attention(q, k, v, config), q, k, v)
    except (ValueError, NotImplementedError, AssertionError) as refusal:
        yield refused("jax attention_mgpu", str(refusal))
        return
    yield row("jax attention_mgpu H=128", times, peer, bounds)


def two_rank(ceilings: Ceilings, library: Path | None) -> Iterator[Row]:
    """Time a window of 512 and 4 sinks at full rank over older tokens at two ranks, and those ranks alone."""
    S = 32768
    q, *full = (normal(i, 1, S, N, H) for i in range(3))
    peer = device_ms(lambda q, k, v: cudnn(q, k, v, causal=True), q, *full)
    pairs = N * S * (S + 1) / 2
    whole = ceilings.bounds(flops=4 * H * pairs, exps=pairs, nbytes=0.0)
    yield row("cudnn H=128 S=32768", peer, None, whole)
    yield from flash_rows(library, "H=128 S=32768", peer, whole, tokens=S)
    del full
    for R, Z in ((32, 64), (64, 96)):
        yield from two_rank_shape(ceilings, q, R, Z, peer)


def two_rank_shape(ceilings: Ceilings, q: jax.Array, R: int, Z: int, peer: list[float]) -> Iterator[Row]:
    """Time one pair of ranks alone and with recent keys; `over_alone` is the ratio of the times."""
    S, window, sinks, positions = q.shape[1], 512, 4, [0, 600, 20000, 32767]
    pairs, near = N * S * (S + 1) / 2, N * S * (window + sinks)

    def bounds(extra):
        return ceilings.bounds(
            flops=2 * (R + Z) * pairs + extra * 2 * (2 * H - R - Z) * near,
            exps=pairs,
            nbytes=2.0 * S * N * 4 * H,
        )

    k, v = normal(1, 1, N, S, R), normal(2, 1, N, S, Z)

    def far(q, k, v):
        return prefill_attention(q, k, v, scale=H**-0.5)[0]

    alone = device_ms(far, q[..., :R], k, v)
    yield row(f"({R},{Z}) alone S={S}", alone, peer, bounds(0))
    tails = normal(3, 1, N, S, H - R), normal(4, 1, N, S, H - Z)

    def both(q, k, v, tails):
        return prefill_attention(
            q, k, v, scale=H**-0.5, sinks=sinks, window=window,
            trailing=Trailing(*tails, jnp.zeros(1, jnp.int32), *(x[:, :, :8] for x in tails)),
        )[0]  # fmt: skip

    at = rows_at(positions)
    exact = exact_rows(at(q), k, v, positions, tails, sinks, window)
    wrong = error(at(jax.jit(both)(q, k, v, tails)), exact)
    times = device_ms(both, q, k, v, tails)
    over = float(np.median(times) / np.median(alone))
    yield row(f"two ranks, window 512, far ({R},{Z})", times, peer, bounds(1), error=wrong, over_alone=over)


def window_alone(ceilings: Ceilings, library: Path | None) -> Iterator[Row]:
    """Time layers without older tokens: window 512 and 4 sinks at full rank; cuDNN sees all tokens."""
    for S in (16384, 131072):
        yield from window_shape(ceilings, library, S)
    yield decode_window(ceilings, 16, 8192)


def window_shape(ceilings: Ceilings, library: Path | None, S: int) -> Iterator[Row]:
    """Time our kernel with a window, and cuDNN and FlashAttention-3 with the same window but without sinks.

    `over_windowed` is our time over that of cuDNN's window.
    """
    sinks, window, positions = 4, 512, [0, 600, S // 2, S - 1]

    def bounds(keys):
        return ceilings.bounds(flops=4 * H * N * S * keys, exps=N * S * keys, nbytes=2.0 * S * N * 4 * H)

    q, k, v = (normal(i, 1, S, N, H) for i in range(3))
    peer = device_ms(lambda q, k, v: cudnn(q, k, v, causal=True), q, k, v)
    yield (windowed := cudnn_window(q, k, v, window, peer, bounds(window)))
    yield from flash_rows(library, f"window 512 S={S}", peer, bounds(window), tokens=S, window=window)
    k, v = (normal(i, 1, N, S, H) for i in (1, 2))

    def f(q, k, v):
        return prefill_attention(
            q, k[..., :0], v[..., :0], scale=H**-0.5, sinks=sinks, window=window,
            trailing=Trailing(k, v, jnp.zeros(1, jnp.int32), k[:, :, :8], v[:, :, :8]),
        )[0]  # fmt: skip

    at = rows_at(positions)
    exact = exact_rows(at(q), k[..., :0], v[..., :0], positions, (k, v), sinks, window)
    more = {"error": error(at(jax.jit(f)(q, k, v)), exact)}
    times = device_ms(f, q, k, v)
    if "ms" in windowed:
        more["over_windowed"] = float(np.median(times)) / windowed["ms"]
    yield row(f"window 512 alone S={S}", times, peer, bounds(window + sinks), **more)


def cudnn_window(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int, peer: list[float], bounds: dict[str, float]
) -> Row:
    """Time cuDNN's own window, if it accepts the call; q, k, v [1, S, N, H]."""
    S = q.shape[1]
    name, positions = f"cudnn window {window} S={S}", [0, window, S // 2, S - 1]
    at = rows_at(positions)
    f = functools.partial(cudnn, causal=True, window=window)
    try:
        got = at(jax.jit(f)(q, k, v))
        times = device_ms(f, q, k, v)
    except (ValueError, RuntimeError) as refusal:
        return refused(name, str(refusal))
    k, v = (x.swapaxes(1, 2) for x in (k, v))
    exact = exact_rows(at(q), k[..., :0], v[..., :0], positions, (k, v), 0, window)
    return row(name, times, peer, bounds, error=error(got, exact))


def decode_window(ceilings: Ceilings, B: int, S: int) -> Row:
    """Time one token a sequence on the ring alone."""
    near = {"sinks": 4, "window": 512}
    q, k, v = normal(0, B, 1, N, H), normal(1, B, S, N, H), normal(2, B, S, N, H)
    peer = device_ms(lambda q, k, v: cudnn(q, k, v, causal=False), q, k, v)
    ring = normal(3, B, N, 520, H), normal(4, B, N, 520, H)
    absent = jnp.zeros((B, N, S, 0), jnp.bfloat16)
    f = functools.partial(one_token, lengths=jnp.full(B, S, jnp.int32), **near)
    bounds = {"bandwidth": 1e3 * sum(x.nbytes for x in ring) / ceilings.copy}
    wrong = decode_error(f, q[:, 0], absent, absent, ring, **near)
    times = device_ms(f, q[:, 0], absent, absent, ring)
    return row(f"decode window 512 alone B={B} S={S} K={N}", times, peer, bounds, error=wrong)


def decode(ceilings: Ceilings) -> Iterator[Row]:
    """Time one token a sequence on caches of several gigabytes."""
    for B, S, K in ((16, 8192, 32), (16, 8192, 8), (1, 131072, 8), (64, 4096, 8)):
        yield from decode_shape(ceilings, B, S, K)


def decode_shape(ceilings: Ceilings, B: int, S: int, K: int) -> Iterator[Row]:
    """Time one rank and two ranks, contiguous and once paged; cuDNN reads as many tokens at full rank."""
    lengths, shape = jnp.full(B, S, jnp.int32), f"B={B} S={S} K={K}"

    def bounds(nbytes):
        return {"bandwidth": 1e3 * nbytes / ceilings.copy}

    q, k, v = normal(0, B, 1, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)
    peer = device_ms(lambda q, k, v: cudnn(q, k, v, causal=False), q, k, v)
    yield row(f"cudnn decode {shape}", peer, None, bounds(k.nbytes + v.nbytes))
    for R, Z, window in ((128, 128, 0), (64, 96, 0), (32, 64, 512)):
        q, k, v = normal(0, B, N, H if window else R), normal(1, B, K, S, R), normal(2, B, K, S, Z)
        ring = (normal(3, B, K, window + 8, H - R), normal(4, B, K, window + 8, H - Z)) if window else None
        near = {"sinks": 4, "window": window} if window else {"sinks": 0, "window": 0}
        f = functools.partial(one_token, lengths=lengths, **near)
        need = sum(x.nbytes for x in jax.tree.leaves((k, v, ring)))
        name = f"decode ({R},{Z}){' ring 512' if window else ''} {shape}"
        wrong = decode_error(f, q, k, v, ring, **near)
        yield row(name, device_ms(f, q, k, v, ring), peer, bounds(need), error=wrong)
        if (B, K, R) == (16, 8, 64):
            table = jnp.arange(B * S // PAGE, dtype=jnp.int32).reshape(B, -1)
            paged = functools.partial(f, block_table=table)
            yield row(f"{name} paged", device_ms(paged, q, pages(k), pages(v), None), peer, bounds(need))


PAGE = 128


def one_token(q: Any, k: Any, v: Any, ring: Any, **options: Any) -> jax.Array:
    """Return the output of the decode kernel."""
    parts = decode_parts(q, k, v, scale=H**-0.5, ring=None if ring is None else Ring(*ring), **options)
    return merged(parts, q.shape[1] // k.shape[1], q.dtype)[0]


def pages(x: jax.Array) -> jax.Array:
    """Return [B, K, S, R] as [pages, K, page size, R]."""
    B, K, S, R = x.shape
    return x.reshape(B, K, S // PAGE, PAGE, R).swapaxes(1, 2).reshape(-1, K, PAGE, R)


def decode_error(
    f: Callable[..., jax.Array], q: Any, k: Any, v: Any, ring: Any, sinks: int, window: int
) -> float:
    """Return the error of the first and the last sequence, with the ring ordered by position."""
    S, rows, tail = k.shape[2], np.array(sorted({0, len(q) - 1})), None
    if ring is not None:
        j = np.arange(S)
        slots = np.where(j < sinks, window + j, j % window)
        tail = [x[rows][:, :, slots] for x in ring]
    exact = exact_rows(q[rows, None], k[rows], v[rows], [S - 1], tail, sinks, window)
    return error(jax.jit(f)(q, k, v, ring)[rows], exact[:, 0])


def epilogue(ceilings: Ceilings) -> Iterator[Row]:
    """Time rotary embedding, basis and truncation of projected q and k, into the layout of the cache."""
    for K, C in ((32, 128), (32, 64), (8, 128)):
        yield epilogue_shape(ceilings, K, C)


def epilogue_shape(ceilings: Ceilings, K: int, C: int) -> Row:
    """Time 8,192 tokens with C coordinates kept."""
    T = 8192
    q, k = normal(0, 1, T, N, H), normal(1, 1, T, K, H)
    angles = jax.random.uniform(jax.random.key(2), (1, T, H // 2), maxval=6.28)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = (normal(seed, K, H, C) * H**-0.5 for seed in (3, 4))

    def plain(q, k, cos, sin, a, b):
        return (turn(q, cos, sin, a), turn(k, cos, sin, b).swapaxes(1, 2))

    args = q, k, cos, sin, a, b
    got, want = jax.jit(post_rope)(*args)[0], jax.jit(plain)(*args)[0]
    need = (q.nbytes + k.nbytes) * (1 + C / H) + cos.nbytes + sin.nbytes
    bounds = {"bandwidth": 1e3 * need / ceilings.copy}
    wrong = error(got, np.asarray(want, np.float64))
    return row(
        f"post_rope K={K} C={C}", device_ms(post_rope, *args), device_ms(plain, *args), bounds, error=wrong
    )


def segments(ceilings: Ceilings) -> Iterator[Row]:
    """Time attention with half of 16,384 tokens at (64, 96) and half at (32, 64)."""
    S = 16384
    order = jax.random.permutation(jax.random.key(9), S).astype(jnp.int32)
    halves = jnp.sort(order[: S // 2])[None], jnp.sort(order[S // 2 :])[None]
    ranks = (64, 96), (32, 64)
    keys = [
        Segment(normal(1, 1, N, S // 2, R), normal(2, 1, N, S // 2, Z), where)
        for (R, Z), where in zip(ranks, halves, strict=True)
    ]
    q = normal(0, 2, 1, S // 2, N, 64)
    options: Any = {"scale": H**-0.5, "sinks": 0, "window": 0, "implementation": "pallas"}

    def both(q, keys):
        return [segment_attention(q[i], keys[i].positions, keys, **options)[0] for i in range(2)]

    wide = normal(3, 1, S, N, H)
    peer = device_ms(lambda q: cudnn(q, q, q, causal=True), wide)
    pairs = N * S * (S + 1) / 2
    bounds = ceilings.bounds(flops=2 * (160 + 96) / 2 * pairs, exps=pairs, nbytes=0.0)
    yield row("classes (64,96) and (32,64), halves", device_ms(both, q, keys), peer, bounds)
    del wide
    yield class_decode(ceilings, 16, 8192)


def class_decode(ceilings: Ceilings, B: int, S: int) -> Row:
    """Time one token a sequence, half of its keys at (64, 96) and half at (32, 64)."""
    q, where = normal(0, B, 1, N, 64), jnp.arange(S, dtype=jnp.int32).reshape(-1, 2).T
    keys = [
        Segment(normal(1, B, N, S // 2, R), normal(2, B, N, S // 2, Z), jnp.broadcast_to(slots, (B, S // 2)))
        for (R, Z), slots in zip(((64, 96), (32, 64)), where, strict=True)
    ]
    last = jnp.full((B, 1), S - 1, jnp.int32)
    options: Any = {"scale": H**-0.5, "sinks": 0, "window": 0, "implementation": "pallas"}

    def f(q, keys):
        return segment_attention(q, last, keys, **options)[0]

    wide = normal(3, B, 1, N, H), normal(4, B, S, N, H), normal(5, B, S, N, H)
    peer = device_ms(lambda q, k, v: cudnn(q, k, v, causal=False), *wide)
    bounds = {"bandwidth": 1e3 * sum(x.nbytes for x in jax.tree.leaves(keys)) / ceilings.copy}
    return row(f"decode classes (64,96) and (32,64) B={B} S={S}", device_ms(f, q, keys), peer, bounds)


def rows_at(positions: Sequence[int]) -> Callable[[jax.Array], jax.Array]:
    """Return a function that selects rows [B, positions, ...] of an array [B, S, ...]."""
    return operator.itemgetter((slice(None), jnp.array(positions)))


def turn(x: jax.Array, cos: jax.Array, sin: jax.Array, rotation: jax.Array) -> jax.Array:
    """Apply rotary embedding and basis in XLA: x [B, T, N, H], rotation [K, H, C]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
    groups = rotated.reshape(*x.shape[:2], rotation.shape[0], -1, x.shape[-1])
    return jnp.einsum("BTKGH,KHR->BTKGR", groups, rotation).reshape(*x.shape[:3], -1)


def main(options: Options) -> None:
    """Run the sections and write one JSON file, again after each section."""
    settings = {"sections": SECTIONS}  # The settings of a whole file.
    results: dict[str, Any] = earlier(options.results / f"{options.name}.json", settings) or {}
    ceilings = Ceilings(copy_bandwidth(), matmul_rate())
    print(
        f"copy {ceilings.copy / 1e12:.2f} TB/s, bf16 product {ceilings.matmul / 1e12:.0f} TFLOP/s", flush=True
    )
    functions: dict[Section, Callable[[Ceilings], Iterator[Row]]] = {
        "prefill": functools.partial(prefill, library=options.flash_attention_3),
        "two-rank": functools.partial(two_rank, library=options.flash_attention_3),
        "window": functools.partial(window_alone, library=options.flash_attention_3),
        "decode": decode,
        "epilogue": epilogue,
        "segments": segments,
    }
    results["ceilings"] = asdict(ceilings)
    for section in options.sections:
        results[section] = [row | {"commit": commit()} for row in functions[section](ceilings)]
        print(write_result(options.name, settings, results, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
