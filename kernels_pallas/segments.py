"""Attention over token classes: keys of each class stored contiguously, at ranks of their own (paper, §5.2).

One pass of the prefill kernel a class, causal by position with whole blocks skipped, and the partial results
merged by their log-sum-exp: one softmax over all classes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from kernels_pallas.prefill import PrefillConfig, prefill_attention


class Segment(NamedTuple):
    """Keys of one class: k [B, K, S, R], v [B, K, S, Z], positions [B, S] int32, ascending in each row."""

    k: Array
    v: Array
    positions: Array


def segment_attention(
    q: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    segments: Sequence[Segment],
    *,
    scale: float,
    config: PrefillConfig | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Causal attention of queries (of any one class) at ascending `positions` over the keys of all segments.

    Scores with a segment's keys use the first R coordinates of q, so H is at least the largest R; values of
    narrower segments count as zero beyond their Z, and Hv is the largest Z. Also gives the natural
    log-sum-exp. Raises as `prefill_attention` does.
    """
    parts = [
        prefill_attention(q, s.k, s.v, scale=scale, positions=(positions, s.positions), config=config)
        for s in segments
    ]
    return merge_partial(parts)


def merge_partial(
    parts: Sequence[tuple[Float[Array, "B T N _"], Float[Array, "B N T"]]],
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Partial results over disjoint keys as one, in float32; narrower ones are zero-padded to the widest.

    A part that saw no key (zeros, log-sum-exp -inf) counts for nothing, also when all parts are such.
    """
    width = max(o.shape[-1] for o, _ in parts)
    stacked = jnp.stack([lse for _, lse in parts])
    highest = jnp.max(stacked, 0)
    weights = jnp.exp(stacked - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = weights.sum(0)
    share = jnp.moveaxis(weights / jnp.where(total > 0, total, 1.0), 2, 3)[..., None]  # [P, B, T, N, 1]
    pad = lambda o: jnp.pad(o.astype(jnp.float32), [(0, 0)] * 3 + [(0, width - o.shape[-1])])
    merged = sum(pad(o) * s for (o, _), s in zip(parts, share, strict=True))
    return jnp.asarray(merged, parts[0][0].dtype), jnp.log(total) + jnp.where(total > 0, highest, 0.0)
