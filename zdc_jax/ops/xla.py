"""Attention on truncated coordinates in plain XLA, for every device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from zdc_jax.axes import Array
from zdc_jax.ops.contract import einsum_f32
from zdc_jax.ops.shift import of_slots

_LOGITS_BYTES = {"cpu": 4 * 2**20, "gpu": 256 * 2**20}
"""Float32 logits of one block of queries, in bytes, by backend; other devices count as GPUs.

On a CPU they stay in its cache, which is several times faster.
"""


class NearKeys(NamedTuple):
    """Keys and values at full rank, in the order sinks, earlier window, queries' own tokens.

    Attributes:
      k: keys, [B, K, M, H] with M = sinks + window + T.
      v: values, [B, K, M, H].
      positions: position of each key, [B, M] int32; -1 for an absent key.
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
    block_scores: Float[Array, "B T N blocks"] | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Compute attention in plain XLA, for any rank, dtype, device and near set.

    Blocks of queries are processed one after another, so that logits take about `_LOGITS_BYTES`.

    Args:
      q: queries, at full rank if there are near keys; their first R coordinates score the far keys.
      k: first R coordinates of all keys; slot s has position s. Slots after a query's position are ignored.
      v: first Z coordinates of all values.
      positions: position of each query, consecutive within a sequence.
      scale: factor on the scores, 1/√H of the original head dimension.
      near: keys at full rank, whose last T entries are the queries' own tokens. None if all keys are far, or
        if near keys are attended to separately.
      sinks: number of sinks; without `near`, near keys are not attended to.
      window: size of the recent window.
      block_scores: what scaled scores gain in each block of positions (`zdc_jax.ops.shift`).

    Returns:
      The output, and the log-sum-exp of the scaled scores; zeros and -inf for a query without visible keys.
    """
    B, T, N, _ = q.shape
    past = 0 if near is None else near.k.shape[2] - T
    far = k.shape[2] if k.shape[3] else 0
    block = query_block(B * N * (far + past), T, own=0 if near is None else B * N)
    if near is not None:
        pad = -T % block
        near = NearKeys(
            jnp.pad(near.k, ((0, 0), (0, 0), (0, pad), (0, 0))),
            jnp.pad(near.v, ((0, 0), (0, 0), (0, pad), (0, 0))),
            jnp.pad(near.positions, ((0, 0), (0, pad)), constant_values=-1),
        )

    def run_block(q: Array, positions: Array, index: Array, *gains: Array) -> tuple[Array, Array]:
        own = None if near is None else _near_block(near, index[0, 0], past - window, window + q.shape[1])
        t, j = positions[:, :, None], jnp.arange(k.shape[2])
        parts = [_Part(k, v, ((j >= sinks) & (j <= t - window))[:, None], j)] if k.shape[3] else []
        if own is not None:
            j = own.positions[:, None, :]
            visible = (j >= 0) & (j <= t) & ((j < sinks) | (j > t - window))
            parts.append(_Part(own.k, own.v, visible[:, None], own.positions))
        return _attend(q, parts, scale, *gains)

    queries = jnp.broadcast_to(jnp.arange(T), (B, T))
    gains = [] if block_scores is None else [block_scores]
    return in_query_blocks(run_block, block, q, positions, queries, *gains)


def chosen_attention(
    q: Float[Array, "B T N R"],
    k: Float[Array, "B K S R"],
    v: Float[Array, "B K S Z"],
    visible: Bool[Array, "B K T S"],
    *,
    scale: float,
    slots: Int[Array, "..."] | None = None,
    block_scores: Float[Array, "B T N blocks"] | None = None,
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """Attend to the keys marked visible for each KV head, with all logits in memory at once.

    `block_scores` are those of `xla_attention`, for keys at positions `slots`, [S] or [B, K, S].

    Returns:
      The output and its log-sum-exp; zeros and -inf for a query without visible keys.
    """
    return _attend(q, [_Part(k, v, visible, slots)], scale, block_scores)


def in_query_blocks(
    attend: Callable[..., tuple[Array, Array]], block: int, *inputs: Shaped[Array, "B T *_"]
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """Run `attend`, which returns (output, log-sum-exp), on blocks of queries, one after another."""

    def run_block(*inputs: Array) -> tuple[Array, Array]:
        out, lse = attend(*inputs)
        return out, lse.swapaxes(1, 2)

    out, lse = by_query_blocks(run_block, block, *inputs)
    return out, lse.swapaxes(1, 2)


def by_query_blocks(compute: Callable[..., Any], block: int, *inputs: Shaped[Array, "B T *_"]) -> Any:
    """Run `compute(*inputs)` on blocks of queries, one after another; join its arrays [B, T, …].

    Inputs are zero-padded to whole blocks.
    """
    B, T = inputs[0].shape[:2]
    if block >= T:
        return compute(*inputs)
    pad = -T % block
    padded = [jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2))) for x in inputs]

    def run_block(index: Array) -> Any:
        return compute(*(jax.lax.dynamic_slice_in_dim(x, index * block, block, axis=1) for x in padded))

    blocks = jax.lax.map(run_block, jnp.arange((T + pad) // block))

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(B, T + pad, *x.shape[3:])[:, :T]

    return jax.tree.map(join, blocks)


def query_block(keys: int, queries: int, *, own: int = 0) -> int:
    """Return the number of queries per block whose logits, in all heads, fit `_LOGITS_BYTES`.

    The result is a power of two, at least 16, or `queries` if that is smaller.

    Args:
      keys: keys that every query of a block scores, in all heads and sequences.
      queries: number of all queries.
      own: further keys for each query of the block, in all heads and sequences.
    """
    most = _LOGITS_BYTES.get(jax.default_backend(), _LOGITS_BYTES["gpu"]) // 4
    block = 16
    while block < queries and 2 * block * (keys + 2 * block * own) <= most:
        block *= 2
    return min(queries, block)


def _near_block(near: NearKeys, start: Array, sinks: int, size: int) -> NearKeys:
    """Return the sinks and the `size` keys that can be near to queries from `start` on."""

    def cut(x: Array, axis: int) -> Array:
        head = jax.lax.slice_in_dim(x, 0, sinks, axis=axis)
        tail = jax.lax.dynamic_slice_in_dim(x, sinks + start, size, axis=axis)
        return jnp.concatenate([head, tail], axis=axis)

    return NearKeys(cut(near.k, 2), cut(near.v, 2), cut(near.positions, 1))


class _Part(NamedTuple):
    """Keys that share a softmax with other parts.

    Attributes:
      k: keys, [B, K, S, R].
      v: values, [B, K, S, Z].
      visible: which queries see which keys, [B, K or 1, T, S].
      slots: positions of the keys, [S], [B, S] or [B, K, S]; needed for block scores.
    """

    k: Array
    v: Array
    visible: Array
    slots: Array | None = None


def _attend(
    q: Array, parts: list[_Part], scale: float, block_scores: Array | None = None
) -> tuple[Array, Array]:
    """Compute one softmax over parts.

    The output has the width of the widest values; the log-sum-exp comes with it.
    """
    B, T, N, _ = q.shape
    K = parts[0].k.shape[1]
    q = q.reshape(B, T, K, N // K, -1)

    def compute_logits(part: _Part) -> Array:
        scores = scale * einsum_f32("BTKGR,BKSR->BKGTS", q[..., : part.k.shape[-1]], part.k)
        if block_scores is not None:
            assert part.slots is not None
            scores += of_slots(block_scores, part.slots, K)
        return jnp.where(part.visible[:, :, None], scores, jnp.finfo(jnp.float32).min)

    logits = [compute_logits(part) for part in parts]
    highest = jnp.stack([part.max(-1) for part in logits]).max(0)[..., None]
    weights = [
        jnp.where(part.visible[:, :, None], jnp.exp(scores - highest), 0.0)
        for scores, part in zip(logits, parts, strict=True)
    ]
    # The sum is at least 1, the share of the highest key, unless no key is visible.
    total = sum(part.sum(-1, keepdims=True) for part in weights)
    divisor = jnp.maximum(total, 1.0)
    width = max(part.v.shape[-1] for part in parts)
    shares = [
        einsum_f32("BKGTS,BKSZ->BTKGZ", (weight / divisor).astype(part.v.dtype), part.v)
        for weight, part in zip(weights, parts, strict=True)
    ]
    widened = [jnp.pad(share, [(0, 0)] * 4 + [(0, width - share.shape[-1])]) for share in shares]
    out = functools.reduce(jnp.add, widened)
    lse = (highest + jnp.log(total)).reshape(B, N, T)
    return out.reshape(B, T, N, width).astype(parts[0].v.dtype), lse
