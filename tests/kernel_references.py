"""Plain and slow definitions of what the kernels compute."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from kernels_pallas.select.largest import LAST, _keys


def attention_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    qk_rank: int,
    v_rank: int,
    sinks: int = 0,
    window: int = 0,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Compute two-rank causal attention with whole score matrices; queries are the last T of the S positions.

    Near pairs, j < sinks or t - window < j ≤ t, use all H coordinates. Other pairs j ≤ t use the first
    `qk_rank` coordinates for scores and the first `v_rank` for values; further values count as zero. With
    `qk_rank=0` far keys are not attended to. The computation is in the inputs' dtype: pass float64 for exact
    results.

    Returns:
      The output, and the log-sum-exp of the scores.
    """
    (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    t = jnp.arange(S - T, S)[:, None]
    j = jnp.arange(S)
    near = (j <= t) & ((j < sinks) | (j > t - window))
    far = (j <= t) & ~near & (qk_rank > 0)

    def score(rank):
        return scale * jnp.einsum("BTNH,BSNH->BNTS", q[..., :rank], k[..., :rank])

    logits = jnp.where(near, score(H), jnp.where(far, score(qk_rank), -jnp.inf))
    highest = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - highest)
    total = weights.sum(-1, keepdims=True)
    weights /= total
    kept = jnp.where(jnp.arange(H) < v_rank, v, 0)
    o = jnp.einsum("BNTS,BSNH->BTNH", jnp.where(near, weights, 0), v) + jnp.einsum(
        "BNTS,BSNH->BTNH", jnp.where(far, weights, 0), kept
    )
    return o, (highest + jnp.log(total))[..., 0]


def joined_prefill_reference(
    q, k, v, *, scale, starts, lengths, needed_from, window, keys, near, block_scores
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Compute `prefill_attention` to far keys and to near keys in arrays of their own, for whole keys.

    Like the kernel it leaves out queries before those that are needed, but not only whole tiles of them.
    """
    assert (keys, near.sink_k, block_scores) == ("far", None, None)
    (B, T, N, H), K = q.shape, k.shape[1]
    t = (starts[:, None] + jnp.arange(T))[:, :, None]
    far_seen = jnp.arange(k.shape[2]) <= t - window
    # Keys that no query sees may have any values.
    k, v = (jnp.where(far_seen.any(1)[:, None, :, None], x, 0) for x in (k, v))
    j = (near.start[:, None] + jnp.arange(near.k.shape[2]))[:, None]
    seen = jnp.concatenate([far_seen, (j > t - window) & (j <= t)], 2) & (t < lengths[:, None, None])
    both_k, both_v = (jnp.concatenate(pair, 2).astype(jnp.float32) for pair in ((k, near.k), (v, near.v)))
    group = q.astype(jnp.float32).reshape(B, T, K, N // K, H)
    scores = scale * jnp.einsum("btkgh,bksh->bkgts", group, both_k)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    o = jnp.einsum("bkgts,bksh->btkgh", weights, both_v).reshape(q.shape)
    if needed_from is not None:
        o = jnp.where((t >= needed_from[:, None, None])[..., None], o, 0)
    return o.astype(q.dtype), lse.reshape(B, N, T)


def post_rope_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    angles_cos: Float[Array, "B T H/2"],
    angles_sin: Float[Array, "B T H/2"],
    q_rotation: Float[Array, "K H C"],
    k_rotation: Float[Array, "K H C"],
) -> tuple[Float[Array, "B T N C"], Float[Array, "B K T C"]]:
    """Apply RoPE on pairs (i, i + H/2), then each KV head's rotation.

    The rotary embedding is computed in at least float32 and rounded to q's dtype, as are the results. Pass
    float64 for exact results.

    Returns:
      Rotated queries and keys.
    """
    B, T, N, H = q.shape

    def turn(x: Array) -> Array:
        cos, sin = angles_cos[:, :, None], angles_sin[:, :, None]
        low, high = jnp.split(x.astype(jnp.promote_types(x.dtype, cos.dtype)), 2, axis=-1)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)

    groups = turn(q).reshape(B, T, k.shape[2], -1, H)
    rotated = jnp.einsum("BTKGH,KHC->BTKGC", groups, q_rotation).reshape(B, T, N, -1).astype(q.dtype)
    keys = jnp.einsum("BTKH,KHC->BKTC", turn(k), k_rotation).astype(k.dtype)
    return rotated, keys


def largest_reference(
    scores: Float[Array, "B K S"], begin: Int[Array, " B"], end: Int[Array, " B"], *, k: int
) -> Int[Array, "B K k"]:
    """Compute `largest` by sorting, for any S and k, on any device."""
    S = scores.shape[-1]
    j = jnp.arange(S)
    counts = (j >= begin[:, None]) & (j < end[:, None])
    order = jnp.argsort(jnp.where(counts[:, None], _keys(scores), LAST), axis=-1)
    order = jnp.pad(order, ((0, 0), (0, 0), (0, max(k - S, 0))))[..., :k]
    wanted = jnp.clip(end, 0, S) - jnp.clip(begin, 0, S)
    return jnp.sort(jnp.where(jnp.arange(k) < wanted[:, None, None], order, S), axis=-1)
