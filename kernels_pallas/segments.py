"""Attention over token classes: keys of each class stored contiguously, at ranks of their own (paper, §5.2).

One pass of the prefill or the decode kernel a class, causal by position with whole blocks skipped, and the
partial results merged by their log-sum-exp: one softmax over all classes.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import Shaped
from kernels_pallas.decode import decode_attention
from kernels_pallas.decode_inputs import check_decode
from kernels_pallas.prefill import prefill_attention
from kernels_pallas.prefill_inputs import check_prefill


class Segment(NamedTuple):
    """Keys of one class: k [B, K, S, R], v [B, K, S, Z], positions [B, S] int32, negative for an empty slot.

    Positions may come in any order; roughly ascending ones are fastest.
    """

    k: Array
    v: Array
    positions: Array


def segment_attention(
    q: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    segments: Sequence[Segment],
    *,
    scale: float,
    sinks: int = 0,
    window: int = 0,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Causal attention of queries (of any class, in any order) at `positions` over the keys of all segments.

    Scores with a segment's keys use the first R coordinates of q, so H is at least the largest R; values of
    narrower segments count as zero beyond their Z, and Hv is the largest Z. With `sinks` or `window`, in
    tokens, only far keys are seen, sinks ≤ j ≤ t - window. Also gives the natural log-sum-exp, and as
    `prefill_attention` does zeros and -inf for queries that see no key. T = 1 runs on `decode_attention`.
    Raises as these do, and ValueError where there is no segment.
    """
    check_segments(q, positions, segments)
    seen_to = positions - window

    def attend(segment: Segment) -> tuple[Array, Array]:
        k, v, held = segment
        held = jnp.where(held >= sinks, held, -1)
        if q.shape[1] > 1:
            return prefill_attention(q, k, v, scale=scale, positions=(seen_to, held))
        one, lengths = _one(q, seen_to, k)
        o, lse = decode_attention(one, k, v, lengths, scale=scale, positions=held)
        return o[:, None], lse[..., None]

    return merge_partial([attend(segment) for segment in segments])


def _one(q: Array, seen_to: Array, k: Array) -> tuple[Array, Array]:
    """What `decode_attention` takes of one query a row: its first R coordinates, and its length."""
    return q[:, 0, :, : k.shape[-1]], seen_to[:, 0] + 1


def check_segments(q: Shaped, positions: Shaped, segments: Sequence[Segment]) -> None:
    """Raises what `segment_attention` says it raises, for any of the segments."""
    common.check_shape("q", q, (None,) * 4, "B, T, N, H")
    common.check_sizes(T=q.shape[1])
    common.check_integers("positions", positions, q.shape[:2], "B, T")
    if not segments:
        raise ValueError(f"segments={segments}: must be at least one")
    for k, v, held in segments:
        if q.shape[1] > 1:
            check_prefill(q, k, v, positions=(positions, held))
        else:
            one, lengths = jax.eval_shape(_one, q, positions, k)
            check_decode(one, k, v, lengths, positions=held)


def merge_partial(
    parts: Sequence[tuple[Float[Array, "B T N _"], Float[Array, "B N T"]]],
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Partial results over disjoint keys as one, in float32; narrower ones are zero-padded to the widest.

    A part that saw no key (zeros, log-sum-exp -inf) counts for nothing, also when all parts are such.
    """
    width = max(o.shape[-1] for o, _ in parts)
    # Not stacked: that would be a launch of its own.
    highest = functools.reduce(jnp.maximum, (lse for _, lse in parts))
    weights = [jnp.exp(lse - jnp.where(jnp.isfinite(highest), highest, 0.0)) for _, lse in parts]
    total = functools.reduce(jnp.add, weights)

    def share(weight):
        return (weight / jnp.where(total > 0, total, 1.0)).swapaxes(1, 2)[..., None]

    def pad(o):
        return jnp.pad(o.astype(jnp.float32), [(0, 0)] * 3 + [(0, width - o.shape[-1])])

    merged = sum(pad(o) * share(weight) for (o, _), weight in zip(parts, weights, strict=True))
    return jnp.asarray(merged, parts[0][0].dtype), jnp.log(total) + jnp.where(total > 0, highest, 0.0)
