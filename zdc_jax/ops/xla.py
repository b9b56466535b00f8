"""Attention on truncated coordinates in plain XLA, for every device."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from kernels_pallas import Segment
from zdc_jax.axes import Array
from zdc_jax.ops.contract import einsum_f32

_LOGITS_BYTES = {"cpu": 4 * 2**20, "gpu": 256 * 2**20}
"""Float32 logits that one block of queries may take; on a CPU they stay in its cache (7 times faster). Other
devices are taken for GPUs."""


class NearKeys(NamedTuple):
    """Keys and values at full rank, in the order sinks, past window, queries' own tokens.

    k, v [B, K, M, H]; positions [B, M] int32, -1 for an absent key. M = sinks + window + T.
    """

    k: Array
    v: Array
    positions: Array


def xla_attention(
    q: Float[Array, "B T N Hq"],
    k: Float[Array, "B K S R"],
    v: Float[Array, "B K S Z"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    near: NearKeys | None,
    sinks: Int[Array, ""] | int,
    window: int,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Attention in plain XLA: any rank, dtype, device, near set. Also the log-sum-exp of scaled scores.

    Args:
      q: queries; with near keys at full rank, whose first R coordinates meet the far keys.
      k, v: first coordinates of all keys, slot = position; slots past a query's position are ignored.
      positions: position of each query in its row; consecutive within a row.
      scale: factor on the scores, 1/√H of the original head dim.
      near: full-rank keys, whose last T entries are the queries' own tokens; None where all keys are far, or
        where near ones are attended to apart.
      sinks, window: near set, in tokens; without `near` its keys are not seen.

    A query that sees no key gives zeros and a log-sum-exp of -inf.

    Blocks of queries go one after another, so that logits take about `_LOGITS_BYTES`.
    """
    B, T, N, _ = q.shape
    past = 0 if near is None else near.k.shape[2] - T
    far = k.shape[2] if k.shape[3] else 0
    block = query_block(B * N * (far + past), T, own=0 if near is None else B * N)
    pad = -T % block
    # Padded queries repeat the last position, so that they see keys and stay finite; they are cut off below.
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, pad)), mode="edge")
    if near is not None:
        near = NearKeys(
            jnp.pad(near.k, ((0, 0), (0, 0), (0, pad), (0, 0))),
            jnp.pad(near.v, ((0, 0), (0, 0), (0, pad), (0, 0))),
            jnp.pad(near.positions, ((0, 0), (0, pad)), constant_values=-1),
        )

    def one_block(index: Array) -> tuple[Array, Array]:
        start = index * block

        def take(x):
            return jax.lax.dynamic_slice_in_dim(x, start, block, axis=1)

        near_block = None if near is None else _near_block(near, start, past - window, window + block)
        return _xla_block(take(q), k, v, take(positions), scale, near_block, sinks, window)

    if block >= T:
        return one_block(jnp.int32(0))
    out, lse = jax.lax.map(one_block, jnp.arange((T + pad) // block))  # a leading axis of blocks
    out = jnp.moveaxis(out, 0, 1).reshape(B, T + pad, N, -1)[:, :T]
    return out, jnp.moveaxis(lse, 0, 2).reshape(B, N, T + pad)[:, :, :T]


def xla_segments(
    q: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    segments: Sequence[Segment],
    *,
    scale: float,
    sinks: int,
    window: int,
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """`zdc_jax.ops.attention.segment_attention` in plain XLA, block by block as in `xla_attention`."""
    B, T, N, _ = q.shape
    block = query_block(B * N * sum(segment.k.shape[2] for segment in segments), T)

    def one_block(q: Array, positions: Array) -> tuple[Array, Array]:
        t, parts = positions[:, :, None], []
        for k, v, held in segments:
            j = held[:, None]
            parts.append((k, v, ((j >= sinks) & (j >= 0) & (j <= t - window))[:, None]))
        return _attend(q, parts, scale)

    return in_query_blocks(one_block, block, q, positions)


def chosen_attention(
    q: Float[Array, "B T N R"],
    k: Float[Array, "B K S R"],
    v: Float[Array, "B K S Z"],
    visible: Bool[Array, "B K T S"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """Attention to the keys that a KV head's queries may see, all logits at once; and the log-sum-exp.

    A query that sees no key gives zeros and a log-sum-exp of -inf.
    """
    return _attend(q, [(k, v, visible)], scale)


def in_query_blocks(
    attend: Callable[..., tuple[Array, Array]], block: int, *of_queries: Shaped[Array, "B T *_"]
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """`attend(*of_queries)`, an attention with its log-sum-exp, on blocks of queries one after another."""

    def one_block(*of_queries: Array) -> tuple[Array, Array]:
        out, lse = attend(*of_queries)
        return out, lse.swapaxes(1, 2)

    out, lse = by_query_blocks(one_block, block, *of_queries)
    return out, lse.swapaxes(1, 2)


def by_query_blocks(found: Callable[..., Any], block: int, *of_queries: Shaped[Array, "B T *_"]) -> Any:
    """`found(*of_queries)`, a tree of arrays [B, T, …], on blocks of queries one after another.

    Those that fill up the last block are zeros.
    """
    B, T = of_queries[0].shape[:2]
    if block >= T:
        return found(*of_queries)
    pad = -T % block
    padded = [jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2))) for x in of_queries]

    def one_block(index: Array) -> Any:
        return found(*(jax.lax.dynamic_slice_in_dim(x, index * block, block, axis=1) for x in padded))

    blocks = jax.lax.map(one_block, jnp.arange((T + pad) // block))

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(B, T + pad, *x.shape[3:])[:, :T]

    return jax.tree.map(join, blocks)


def query_block(keys: int, queries: int, *, own: int = 0) -> int:
    """Return the number of queries whose logits together take about `_LOGITS_BYTES`.

    The number is a power of two, or `queries`.

    Args:
      keys: keys that every query sees, in all heads and sequences.
      queries: number of all queries.
      own: keys that each further query adds for all others, in all heads and sequences.
    """
    most = _LOGITS_BYTES.get(jax.default_backend(), _LOGITS_BYTES["gpu"]) // 4
    # The largest n for which n (keys + own n) <= most.
    block = int((math.sqrt(keys**2 + 4 * own * most) - keys) / (2 * own)) if own else most // keys
    return min(queries, 1 << max(4, block.bit_length() - 1))


def _near_block(near: NearKeys, start: Array, sinks: int, size: int) -> NearKeys:
    """The sinks and the `size` keys that queries from `start` on can be near to."""

    def cut(x: Array, axis: int) -> Array:
        head = jax.lax.slice_in_dim(x, 0, sinks, axis=axis)
        tail = jax.lax.dynamic_slice_in_dim(x, sinks + start, size, axis=axis)
        return jnp.concatenate([head, tail], axis=axis)

    return NearKeys(cut(near.k, 2), cut(near.v, 2), cut(near.positions, 1))


def _xla_block(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    scale: float,
    near: NearKeys | None,
    sinks: Array | int,
    window: int,
) -> tuple[Array, Array]:
    S, R = k.shape[2:]
    t = positions[:, :, None]
    j = jnp.arange(S)
    parts = [(k, v, ((j >= sinks) & (j <= t - window))[:, None])] if R else []
    if near is not None:
        j = near.positions[:, None, :]
        visible = (j >= 0) & (j <= t) & ((j < sinks) | (j > t - window))
        parts.append((near.k, near.v, visible[:, None]))
    return _attend(q, parts, scale)


def _attend(q: Array, parts: list[tuple[Array, Array, Array]], scale: float) -> tuple[Array, Array]:
    """One softmax over parts, each k [B, K, S, R], v [B, K, S, Z], visible [B, K or 1, T, S].

    Gives the result in the width of the widest values, and the log-sum-exp.
    """
    B, T, N, _ = q.shape
    K = parts[0][0].shape[1]
    q = q.reshape(B, T, K, N // K, -1)
    logits = [
        jnp.where(
            visible[:, :, None],
            scale * einsum_f32("BTKGR,BKSR->BKGTS", q[..., : key.shape[-1]], key),
            jnp.finfo(jnp.float32).min,
        )
        for key, _, visible in parts
    ]
    highest = jnp.stack([part.max(-1) for part in logits]).max(0)[..., None]
    weights = [
        jnp.where(visible[:, :, None], jnp.exp(part - highest), 0.0)
        for part, (_, _, visible) in zip(logits, parts, strict=True)
    ]
    # A sum is at least 1, the highest key's share, unless no key is visible.
    total = sum(part.sum(-1, keepdims=True) for part in weights)
    divisor = jnp.maximum(total, 1.0)
    width = max(value.shape[-1] for _, value, _ in parts)
    shares = [
        einsum_f32("BKGTS,BKSZ->BTKGZ", (part / divisor).astype(value.dtype), value)
        for part, (_, value, _) in zip(weights, parts, strict=True)
    ]
    widened = [jnp.pad(share, [(0, 0)] * 4 + [(0, width - share.shape[-1])]) for share in shares]
    out = functools.reduce(jnp.add, widened)
    lse = (highest + jnp.log(total)).reshape(B, N, T)
    return out.reshape(B, T, N, width).astype(parts[0][1].dtype), lse
