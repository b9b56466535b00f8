"""Attention over token classes, whose keys are stored contiguously with ranks of their own (ZDC §5.2).

Each class is one pass of the prefill or decode kernel, causal by position, with whole blocks skipped. The
partial results are merged by their log-sum-exp into one softmax over all classes.
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
from kernels_pallas.decode.attention import decode_attention
from kernels_pallas.decode.inputs import check_decode
from kernels_pallas.prefill.attention import prefill_attention
from kernels_pallas.prefill.inputs import check_prefill


class Segment(NamedTuple):
    """Keys and values of one token class, in any order; roughly ascending positions are fastest.

    Attributes:
      k: keys, [B, K, S, R].
      v: values, [B, K, S, Z].
      positions: position of each slot, [B, S] int32; negative for an empty slot.
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
    """Compute causal attention of queries at `positions`, in any order, to the keys of all segments.

    A single query per sequence (T = 1) runs on `decode_attention`, others on `prefill_attention`.

    Args:
      q: queries; scores with a segment's keys use the first R coordinates, so H is at least the largest R.
      positions: position of each query.
      segments: keys and values of each class.
      scale: factor on the scores.
      sinks: sinks to exclude, in tokens.
      window: recent window to exclude. With `sinks` or `window` only far keys are attended to,
        sinks ≤ j ≤ t - window.

    Returns:
      The output and its natural log-sum-exp; zeros and -inf for queries without visible keys. The output has
      the width of the largest Z; values of narrower segments count as zero beyond theirs.

    Raises:
      ValueError: there is no segment, or an argument is invalid.
      NotImplementedError: the GPU has another compute capability than 9.0.
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
    """Return the arguments of `decode_attention` for one query per sequence: coordinates and length."""
    return q[:, 0, :, : k.shape[-1]], seen_to[:, 0] + 1


def check_segments(q: Shaped, positions: Shaped, segments: Sequence[Segment]) -> None:
    """Check the arguments of `segment_attention`, for all segments; errors are those it documents."""
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
    """Merge partial attention over disjoint keys, in float32; narrower outputs are zero-padded to the widest.

    A part without visible keys (zeros, log-sum-exp -inf) has no weight, even if all parts are such.
    """
    width = max(o.shape[-1] for o, _ in parts)
    # Do not stack: that would be a separate launch.
    highest = functools.reduce(jnp.maximum, (lse for _, lse in parts))
    weights = [jnp.exp(lse - jnp.where(jnp.isfinite(highest), highest, 0.0)) for _, lse in parts]
    total = functools.reduce(jnp.add, weights)

    def share(weight):
        return (weight / jnp.where(total > 0, total, 1.0)).swapaxes(1, 2)[..., None]

    def pad(o):
        return jnp.pad(o.astype(jnp.float32), [(0, 0)] * 3 + [(0, width - o.shape[-1])])

    merged = sum(pad(o) * share(weight) for (o, _), weight in zip(parts, weights, strict=True))
    return jnp.asarray(merged, parts[0][0].dtype), jnp.log(total) + jnp.where(total > 0, highest, 0.0)
