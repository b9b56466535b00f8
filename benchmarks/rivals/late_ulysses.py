"""Ulysses that truncates late: all coordinates are exchanged, as by methods that compress only the cache."""

from zdc_jax.axes import Array
from zdc_jax.ops.attention import Implementation, self_attention
from zdc_jax.parallel.attention import widened
from zdc_jax.parallel.exchange import gather_heads, scatter_heads
from zdc_jax.parallel.far import FarKeys
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.plan import LayerRanks


def late_ulysses(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    ranks: LayerRanks,
    sinks: int,
    window: int,
    implementation: Implementation | None = None,
) -> Array:
    """As `sharded_attention`, in its shapes: near attention too is computed by head, behind the exchange.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    keys = FarKeys.of(q, v, ranks, scale=scale, sinks=sinks, window=window, implementation=implementation)
    width = v.shape[-1]
    q, k, v = scatter_heads((q, k, v), SEQUENCE)
    if keys.are_all:
        q, k, v = q[..., : ranks.qk], k[..., : ranks.qk], v[..., : ranks.v]
    o, _ = self_attention(
        q,
        k,
        v,
        scale=keys.scale,
        qk_rank=ranks.qk,
        v_rank=ranks.v,
        sinks=keys.sinks,
        window=keys.window,
        implementation=keys.implementation,
    )
    return gather_heads(widened(o, width), SEQUENCE)
