"""Attention of tokens divided over a mesh on keys of all tokens: who gets which of them, and how.

Each function takes what one device holds, q [B, t, N, R], k [B, t, K, R], v [B, t, K, Z], and gives its o
[B, t, N, Z] and, where near attention is to be merged with it, its log-sum-exp [B, N, t].
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.ops.attention import Implementation, far_attention, self_attention
from zdc_jax.parallel.exchange import gather_heads, gather_heads_and_lse, moved, scatter_heads
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.parallel.payload import Scales


@dataclass(frozen=True)
class Keys:
    """Which keys are far (all, where sinks and window are 0), and how attention on them is computed."""

    scale: float
    sinks: int
    window: int
    implementation: Implementation | None

    @property
    def are_all(self) -> bool:
        """Whether no near set is left out."""
        return not (self.sinks or self.window)

    def attend(
        self, q: Array, k: Array, v: Array, start: Array | int = 0, first: Array | int = 0
    ) -> tuple[Array, Array]:
        """`far_attention` of queries from position `start` on keys from position `first` on."""
        return far_attention(
            q,
            k,
            v,
            start - first,
            scale=self.scale,
            sinks=self.sinks and self.sinks - first,
            window=self.window,
            implementation=self.implementation,
        )


FarAttention = Callable[[Array, Array, Array, Keys], tuple[Array, Array | None]]


Keep = Callable[[Array, Array], None]
"""Is given k [B, T, K/U, R] and v [B, T, K/U, Z] of all tokens for the heads of this device."""


def ulysses(
    q: Array, k: Array, v: Array, keys: Keys, keep: Keep | None = None, scales: Scales | None = None
) -> tuple[Array, Array | None]:
    """Heads for tokens and back, two all-to-alls (DeepSpeed-Ulysses, with what is truncated: ZDC §5.3)."""
    q, k, v = scatter_heads((q, k, v), SEQUENCE, scales)
    scale = None if scales is None else scales.v
    if keep is not None:
        keep(k, v)
    if keys.are_all:
        o, _ = self_attention(q, k, v, scale=keys.scale, implementation=keys.implementation)
        return gather_heads(o, SEQUENCE, scale), None
    return gather_heads_and_lse(*keys.attend(q, k, v), SEQUENCE, scale)


def all_gather(q: Array, k: Array, v: Array, keys: Keys) -> tuple[Array, Array | None]:
    """Keys and values of all tokens on every device, queries stay (Megatron-LM's context parallelism)."""
    gather = lambda x: jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True)
    both = moved(gather, jnp.concatenate([k, v], -1))
    k, v = jnp.split(both, [k.shape[-1]], axis=-1)
    return keys.attend(q, k, v, jax.lax.axis_index(SEQUENCE) * q.shape[1])


def ring(q: Array, k: Array, v: Array, keys: Keys) -> tuple[Array, Array | None]:
    """Keys and values go round, partial results are merged in float32 (Ring Attention, Liu et al., 2023).

    Tokens are divided in order, so that the last device has most to do; keys later than all queries of a
    device pass it by.
    """
    U, me = jax.lax.axis_size(SEQUENCE), jax.lax.axis_index(SEQUENCE)
    onward = [(source, (source + 1) % U) for source in range(U)]
    (B, t, N, R), Z = q.shape, v.shape[-1]
    unseen = jnp.zeros((B, t, N, Z), jnp.float32), jnp.full((B, N, t), -jnp.inf, jnp.float32)
    result, both = unseen, jnp.concatenate([k, v], -1)
    for distance in range(U):
        source = (me - distance) % U

        def attend(both: Array, source: Array = source) -> tuple[Array, Array]:
            o, lse = keys.attend(q, both[..., :R], both[..., R:], me * t, source * t)
            return o.astype(jnp.float32), lse

        part = jax.lax.cond(source <= me, attend, lambda _: unseen, both)
        result = merge_partial([result, part])
        if distance < U - 1:
            both = moved(lambda x: jax.lax.ppermute(x, SEQUENCE, onward), both)
    return result[0].astype(v.dtype), result[1]
