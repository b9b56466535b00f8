"""Ulysses that truncates late: all coordinates are exchanged, as by methods that compress only the cache."""

from zdc_jax.axes import Array
from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.ops.attention import Implementation, self_attention
from zdc_jax.parallel.attention import widened
from zdc_jax.parallel.exchange import gather_heads, scatter_heads
from zdc_jax.parallel.far import FarKeys
from zdc_jax.parallel.mesh import SEQUENCE


def late_ulysses(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    spec: PrefixRing,
    implementation: Implementation | None = None,
) -> tuple[Array, None]:
    """As `sharded_attention`, in its shapes: near attention too is computed by head, behind the exchange.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    keys = FarKeys.of(q, v, spec, scale=scale, implementation=implementation)
    width = v.shape[-1]
    q, k, v = scatter_heads((q, k, v), SEQUENCE)
    if keys.are_all:
        q, k, v = q[..., : spec.R], k[..., : spec.R], v[..., : spec.Z]
    o, _ = self_attention(
        q,
        k,
        v,
        scale=keys.scale,
        qk_rank=spec.R,
        v_rank=spec.Z,
        sinks=keys.sinks,
        window=keys.window,
        implementation=keys.implementation,
    )
    return gather_heads(widened(o, width), SEQUENCE), None
