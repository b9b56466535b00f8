"""Attention of tokens divided over a mesh on keys of all tokens: who gets which of them, and how.

`ulysses`, as any `FarAttention`, takes what one device holds, q [B, t, N, R], k [B, t, K, R], v [B, t, K, Z],
and gives its o [B, t, N, Z] and, where near attention is to be merged with it, its log-sum-exp [B, N, t].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import jax

from zdc_jax.axes import Array
from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.ops.attention import Implementation, far_attention, self_attention
from zdc_jax.parallel.exchange import gather_heads, gather_heads_and_lse, scatter_heads
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.parallel.payload import Scales


@dataclass(frozen=True)
class FarKeys:
    """Which keys are far (all, where sinks and window are 0), and how attention on them is computed."""

    scale: float
    sinks: int
    window: int
    implementation: Implementation | None

    @classmethod
    def of(
        cls,
        q: Array,
        v: Array,
        spec: PrefixRing,
        *,
        scale: float,
        implementation: Implementation | None,
    ) -> Self:
        """Of tokens divided over `sequence`, q [B, t, N, H], v [B, t, K, H]; inside `jax.shard_map`.

        Sinks and window count where q or v is wider than what `spec` keeps of far keys; else all are far.
        """
        near = q.shape[-1] > spec.R or v.shape[-1] > spec.Z
        length = q.shape[1] * jax.lax.axis_size(SEQUENCE) if near else 0
        return cls(scale, *spec.near(length), implementation)

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


Exchanged = tuple[Array, Array]
"""k [B, T, K/U, R] and v [B, T, K/U, Z] of all tokens for the heads of one device, as they arrived."""
FarAttention = Callable[[Array, Array, Array, FarKeys], tuple[Array, Array | None, Exchanged | None]]
"""Takes q, k, v at the width that far keys count with. Gives o and its log-sum-exp, which may be None where
all keys are far; and what a cache by head can keep, None where nothing of that form has arrived."""


def ulysses(
    q: Array, k: Array, v: Array, keys: FarKeys, scales: Scales | None = None
) -> tuple[Array, Array | None, Exchanged]:
    """Heads for tokens and back, two all-to-alls (DeepSpeed-Ulysses, with what is truncated: ZDC §5.3)."""
    q, k, v = scatter_heads((q, k, v), SEQUENCE, scales)
    scale = None if scales is None else scales.v
    if keys.are_all:
        o, _ = self_attention(q, k, v, scale=keys.scale, implementation=keys.implementation)
        return gather_heads(o, SEQUENCE, scale), None, (k, v)
    return *gather_heads_and_lse(*keys.attend(q, k, v), SEQUENCE, scale), (k, v)
