"""How important is a token? By softmax denominators, and by the sums of weights (ZDC §5.2 compares them)."""

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
    """log Σ_heads Σ_keys exp(score) of each query token, float32: the paper's importance, monotone in it.

    lse comes with attention, so that this costs a reduction over heads. A token later in the sequence sums
    over more keys. With `visible`, how many each query sees, that trend is taken off: the mean instead of
    the sum over keys (ours).
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
    """Attention that each token receives as a key, summed over heads and queries, float32.

    The importance that eviction methods use (ZDC §5.2 compares with it); otherwise as `received_attention`.
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
    """Attention that each key receives, summed over queries and the query heads of its KV head, float32.

    All weights are computed once more, `block` queries at a time, from the scores and their log-sum-exp.
    Keys stand at positions 0 … S-1. A query whose log-sum-exp is inf counts for nothing. `window`: keys that
    a query sees, itself included; None: all before it.
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
