"""Token importance: softmax denominators, and attention weights summed per key (compared in ZDC §5.2)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.ops.contract import einsum_f32


def token_importance(
    lse: Float[Array, "B N T"], visible: Int[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
    """Return log Σ_heads Σ_keys exp(score) of each query token, in float32.

    This is a monotone function of the paper's importance. The log-sum-exp is a by-product of attention, so
    the cost is one reduction over heads.

    Args:
      lse: log-sum-exp of the scaled scores.
      visible: number of keys that each query sees. Later tokens sum over more keys; with `visible`, the mean
        over keys replaces the sum, which removes that trend.
    """
    importance = logsumexp(lse.astype(jnp.float32), axis=1)
    return importance if visible is None else importance - jnp.log(visible.astype(jnp.float32))


def column_sums(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    lse: Float[Array, "B N T"],
    *,
    scale: float,
    window: int | None = None,
    block: int = 256,
) -> Float[Array, "B T"]:
    """Return the attention that each token receives as a key, summed over heads and queries, in float32.

    Eviction methods use this importance (ZDC §5.2 compares with it). See `received_attention` for arguments.
    """
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    return received_attention(q, k, lse, positions, scale=scale, window=window, block=block).sum(1)


@partial(jax.jit, static_argnames=("scale", "window", "block"))
def received_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    lse: Float[Array, "B N T"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    block: int = 256,
) -> Float[Array, "B K S"]:
    """Return the attention that each key receives, in float32.

    Attention is summed over queries and over the query heads of each KV head. Weights are recomputed, `block`
    queries at a time, from the scores and their log-sum-exp.

    Args:
      q: queries.
      k: keys at positions 0 … S-1.
      lse: log-sum-exp of the scaled scores; a query with inf is ignored.
      positions: position of each query.
      scale: factor on the scores.
      window: number of keys that a query sees, itself included; None means all keys before it.
      block: queries computed at a time.
    """
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    block = min(block, T)
    pad = -T % block
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(B, -1, block, K, N // K, H)
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, pad)), constant_values=jnp.inf).reshape(B, K, N // K, -1, block)
    positions = jnp.pad(positions, ((0, 0), (0, pad))).reshape(B, -1, block)

    def add(total: Array, index: Array) -> tuple[Array, None]:
        logits = scale * einsum_f32("BTKGH,BSKH->BKGTS", q[:, index], k)
        t = positions[:, index, :, None]
        weights = jnp.exp(logits - lse[:, :, :, index, :, None])
        seen = jnp.arange(S) <= t
        if window is not None:
            seen &= jnp.arange(S) > t - window
        return total + jnp.where(seen[:, None, None], weights, 0).sum((2, 3)), None

    total, _ = jax.lax.scan(add, jnp.zeros((B, K, S), jnp.float32), jnp.arange(q.shape[1]))
    return total
