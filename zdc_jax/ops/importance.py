"""Token importance: softmax denominators, and attention weights summed per key."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.ops.contract import einsum_f32


def token_importance(lse: Float[Array, "B N T"]) -> Float[Array, "B T"]:
    """Return log Σ_heads Σ_keys exp(score) of each query token, in float32.

    This is a monotone function of the paper's importance. The log-sum-exp is a by-product of attention, so
    the cost is one reduction over heads.

    Args:
      lse: log-sum-exp of the scaled scores.
    """
    return logsumexp(lse.astype(jnp.float32), axis=1)


@partial(jax.jit, static_argnames=("scale", "block"))
def received_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    lse: Float[Array, "B N T"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
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
        return total + jnp.where((jnp.arange(S) <= t)[:, None, None], weights, 0).sum((2, 3)), None

    total, _ = jax.lax.scan(add, jnp.zeros((B, K, S), jnp.float32), jnp.arange(q.shape[1]))
    return total
