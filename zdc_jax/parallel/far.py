"""Attention of tokens divided over a mesh on keys of all tokens: who gets which of them, and how.

`ulysses`, as any `FarAttention`, takes what one device holds, q [B, t, N, R], k [B, t, K, R], v [B, t, K, Z],
and gives its o [B, t, N, Z] and, where near attention is to be merged with it, its log-sum-exp [B, N, t].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp

from zdc_jax.axes import Array
from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.ops.attention import Implementation, far_attention, self_attention
from zdc_jax.parallel.exchange import gather_head_groups, head_groups, scatter_head_groups
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.parallel.payload import NATIVE, Format, Formats


@dataclass(frozen=True)
class FarKeys:
    """Which keys are far (all, where sinks and window are 0), and how attention on them is computed.

    formats: how they travel. of_plan: whether the near set is that of a plan. If not, near keys have as many
    coordinates as far ones, and their halo travels as `formats.halo`.
    """

    scale: float
    sinks: int
    window: int
    implementation: Implementation | None
    formats: Formats = NATIVE
    of_plan: bool = True

    @classmethod
    def of(
        cls,
        q: Array,
        v: Array,
        spec: PrefixRing,
        *,
        scale: float,
        implementation: Implementation | None,
        formats: Formats = NATIVE,
    ) -> Self:
        """Of tokens divided over `sequence`, q [B, t, N, H], v [B, t, K, H]; inside `jax.shard_map`.

        Sinks and window of `spec` count where q or v is wider than what it keeps of far keys; elsewhere all
        are far, or those of `formats` count.
        """
        length = q.shape[1] * jax.lax.axis_size(SEQUENCE)
        of_plan, near = near_set(spec, formats, (q.shape[-1], v.shape[-1]), length)
        return cls(scale, *near, implementation, formats, of_plan)

    @property
    def halo(self) -> tuple[Format, Format]:
        """How near keys and values come from devices before."""
        return NATIVE.halo if self.of_plan else self.formats.halo

    @property
    def are_all(self) -> bool:
        """Whether no near set is left out."""
        return not (self.sinks or self.window)

    def attend_to(self, q: Array, k: Array, v: Array) -> tuple[Array, Array | None]:
        """Of all tokens of some heads on themselves; with the log-sum-exp where near keys are left out."""
        if self.are_all:
            o, _ = self_attention(q, k, v, scale=self.scale, implementation=self.implementation)
            return o, None
        return self.attend(q, k, v)

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


def near_set(
    spec: PrefixRing, formats: Formats, widths: tuple[int, int], length: int
) -> tuple[bool, tuple[int, int]]:
    """Whether a plan says which of `length` tokens are near, and how many: sinks and window.

    It does where q and v have more coordinates, `widths`, than far keys. Elsewhere the formats say it, or the
    plan where it has more: one of all coordinates may have a window.
    """
    own = spec.near(length)
    if any(own) and (widths[0] > spec.R or widths[1] > spec.Z):
        return True, own
    if not any(formats.near):
        return False, (0, 0)
    sinks, window = (min(max(pair), length) for pair in zip(formats.near, own, strict=True))
    return False, (sinks, window)


Exchanged = tuple[Array, Array]
"""k [B, T, K/U, R] and v [B, T, K/U, Z] of all tokens for the heads of one device, as they arrived."""
Near = tuple[Array, Array]
"""Near attention of one device's tokens, o [B, t, N, Z] and log-sum-exp [B, N, t]."""
FarAttention = Callable[
    [Array, Array, Array, FarKeys, Near | None], tuple[Array, Array | None, Exchanged | None]
]
"""Takes q, k, v at the width that far keys count with, and near attention, to be done while they travel.
Gives o and its log-sum-exp, which may be None where all keys are far; and what a cache by head can keep, None
where nothing of that form has arrived."""


def ulysses(
    q: Array, k: Array, v: Array, keys: FarKeys, near: Near | None
) -> tuple[Array, Array | None, Exchanged]:
    """Heads for tokens and back, by all-to-alls (DeepSpeed-Ulysses, with what is truncated: ZDC §5.3).

    Heads go in two groups where each device has an even number: the second comes while the first is attended
    to, and what the first gives goes back beside the second; near attention is beside the coming of the
    first (ours). Only the way back of the second group is waited for.
    """
    sent, groups = keys.formats, head_groups(k.shape[2], jax.lax.axis_size(SEQUENCE))
    arrived = scatter_head_groups((q, k, v), SEQUENCE, (sent.q, sent.k, sent.v), groups, beside=near)
    o, lse = gather_head_groups([keys.attend_to(*each) for each in arrived], SEQUENCE, sent.o, sent.lse)
    k, v = (jnp.concatenate(each, 2) for each in zip(*(kv for _, *kv in arrived), strict=True))
    return o, lse, (k, v)
