"""Plain, slow, obvious semantics of every kernel, for tests."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


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
) -> Float[Array, "B T N H"]:
    """Two-rank causal attention with whole score matrices; queries are the last T of the S positions.

    Near pairs, j < sinks or t - window < j ≤ t, use all H coordinates; the other pairs j ≤ t use the first
    `qk_rank` for scores and the first `v_rank` for values, the rest of whose output is zero. `qk_rank=0`
    means that far keys are not seen at all. Computed in the inputs' dtype; give float64 for truth.
    """
    (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    t = jnp.arange(S - T, S)[:, None]
    j = jnp.arange(S)
    near = (j <= t) & ((j < sinks) | (j > t - window))
    far = (j <= t) & ~near & (qk_rank > 0)
    score = lambda rank: scale * jnp.einsum("BTNH,BSNH->BNTS", q[..., :rank], k[..., :rank])
    logits = jnp.where(near, score(H), jnp.where(far, score(qk_rank), -jnp.inf))
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    kept = jnp.where(jnp.arange(H) < v_rank, v, 0)
    return jnp.einsum("BNTS,BSNH->BTNH", jnp.where(near, weights, 0), v) + jnp.einsum(
        "BNTS,BSNH->BTNH", jnp.where(far, weights, 0), kept
    )
