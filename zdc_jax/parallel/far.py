"""Far attention of tokens divided over a mesh: the exchange of heads for tokens, and its interface.

A `FarAttention` such as `ulysses` takes one device's q [B, t, N, R], k [B, t, K, R] and v [B, t, K, Z]. It
returns o [B, t, N, Z] and, to merge with near attention, its log-sum-exp [B, N, t].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from zdc_jax.axes import Array
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.ops.attention import Implementation, far_attention, self_attention
from zdc_jax.ops.shift import ShiftedQueries
from zdc_jax.parallel.exchange import gather_head_groups, head_groups, scatter_head_groups
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.parallel.payload import AS_IS, NATIVE, Format, Formats


@dataclass(frozen=True)
class FarKeys:
    """Choice of the far keys, and the attention on them. All keys are far if sinks and window are 0.

    Attributes:
      scale: factor on the scores.
      sinks: number of sinks.
      window: size of the recent window.
      implementation: of attention; None chooses.
      formats: formats of the exchange.
      of_plan: whether the near set is the plan's. Otherwise near keys have as many coordinates as far keys,
        and their halo is sent in `formats.halo`.
      shift: queries for the scores that keys without their mean lack, of the device's tokens; or None.
    """

    scale: float
    sinks: int
    window: int
    implementation: Implementation | None
    formats: Formats = NATIVE
    of_plan: bool = True
    shift: ShiftedQueries | None = None

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
        shift: ShiftedQueries | None = None,
    ) -> Self:
        """Create from the arrays of one device's tokens; inside `jax.shard_map`.

        The near set of `spec` applies if q or v is wider than the far keys that `spec` keeps. Otherwise all
        keys are far, or the near set of `formats` applies.

        Args:
          q: queries [B, t, N, H], tokens divided over `sequence`.
          v: values [B, t, K, H].
          spec: ranks of far keys, and the near set.
          scale: factor on the scores.
          implementation: of attention; None chooses.
          formats: formats of the exchange.
          shift: as in the attributes.
        """
        length = q.shape[1] * jax.lax.axis_size(SEQUENCE)
        of_plan, near = near_set(spec, formats, (q.shape[-1], v.shape[-1]), length)
        return cls(scale, *near, implementation, formats, of_plan, shift)

    @property
    def halo(self) -> tuple[Format, Format]:
        """Formats of near keys and values sent by preceding devices."""
        return NATIVE.halo if self.of_plan else self.formats.halo

    @property
    def are_all(self) -> bool:
        """Whether all keys are far."""
        return not (self.sinks or self.window)

    @property
    def sent(self) -> tuple[Array, ...]:
        """Arrays by query head that travel with the queries: those of the shift, if there is one."""
        return () if self.shift is None else (self.shift.products,)

    def attend_to(self, q: Array, k: Array, v: Array, *sent: Array) -> tuple[Array, Array | None]:
        """Attend within all tokens of some heads; `sent` are the arrays of `sent` as they arrived.

        Returns:
          The output, and its log-sum-exp if near keys are left out, else None.
        """
        scores = block_scores_of(self.shift, sent, self.scale)
        if self.are_all:
            options: dict[str, Any] = {"scale": self.scale, "implementation": self.implementation}
            return self_attention(q, k, v, block_scores=scores, **options)[0], None
        return self.attend(q, k, v, block_scores=scores)

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        start: Array | int = 0,
        first: Array | int = 0,
        block_scores: Array | None = None,
    ) -> tuple[Array, Array]:
        """Compute `far_attention` of queries from position `start` on, to keys from position `first` on."""
        return far_attention(
            q,
            k,
            v,
            start - first,
            scale=self.scale,
            sinks=self.sinks and self.sinks - first,
            window=self.window,
            implementation=self.implementation,
            block_scores=block_scores,
        )


def block_scores_of(shift: ShiftedQueries | None, sent: Sequence[Array], scale: float) -> Array | None:
    """Return the block scores of all queries of some heads, whose products with the mean were exchanged.

    Args:
      shift: shift of the device's own tokens, or None.
      sent: products [B, T, n, H] of all tokens as they arrived; empty without a shift.
      scale: factor on the scores.
    """
    if shift is None:
        return None
    (products,) = sent
    return shift.scores_of_heads(products, scale)


def near_set(
    spec: PrefixRing, formats: Formats, widths: tuple[int, int], length: int
) -> tuple[bool, tuple[int, int]]:
    """Return whether the plan defines the near set of `length` tokens, and its sinks and window.

    The plan defines it if q and v have more coordinates, `widths`, than far keys. Otherwise the formats do,
    with the plan's sinks and window as lower bounds: a plan at full rank may also have a window.
    """
    own = spec.near(length)
    if any(own) and (widths[0] > spec.R or widths[1] > spec.Z):
        return True, own
    if not any(formats.near):
        return False, (0, 0)
    sinks, window = (min(max(pair), length) for pair in zip(formats.near, own, strict=True))
    return False, (sinks, window)


Exchanged = tuple[Array, Array]
"""Keys k [B, T, K/U, R] and values v [B, T, K/U, Z] of all tokens for one device's heads, as they arrived."""
Near = tuple[Array, Array]
"""Near attention of one device's tokens: o [B, t, N, Z] and log-sum-exp [B, N, t]."""
FarAttention = Callable[
    [Array, Array, Array, FarKeys, Near | None], tuple[Array, Array | None, Exchanged | None]
]
"""Function of q, k and v at the width of far keys, and of near attention to compute during the exchange.

It returns o; its log-sum-exp, which may be None if all keys are far; and the keys and values that a cache by
head can store, or None.
"""


def ulysses(
    q: Array, k: Array, v: Array, keys: FarKeys, near: Near | None
) -> tuple[Array, Array | None, Exchanged]:
    """Exchange tokens for heads and back by all-to-alls (DeepSpeed-Ulysses, with truncated arrays: ZDC §5.3).

    Heads travel in two groups if each device has an even number of KV heads (ours). Near attention overlaps
    the arrival of the first group. Attention on the first group overlaps the arrival of the second, whose
    attention overlaps the first group's return. Only the return of the second group is exposed.
    """
    formats, groups = keys.formats, head_groups(k.shape[2], jax.lax.axis_size(SEQUENCE))
    arrived = scatter_head_groups(
        (q, k, v, *keys.sent),
        SEQUENCE,
        (formats.q, formats.k, formats.v, *[AS_IS] * len(keys.sent)),
        groups,
        overlapped=near,
    )
    attended = [keys.attend_to(*qkv) for qkv in arrived]
    o, lse = gather_head_groups(attended, SEQUENCE, formats.o, formats.lse)
    k, v = (jnp.concatenate(each, 2) for each in zip(*(each[1:3] for each in arrived), strict=True))
    return o, lse, (k, v)
