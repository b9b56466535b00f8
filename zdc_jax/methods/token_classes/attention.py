"""Attention to the keys of several token classes, and the choice of its implementation."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float, Int

from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.ops.attention import Implementation, choose_implementation
from zdc_jax.ops.slots import EMPTY
from zdc_jax.ops.xla import chosen_attention, in_query_blocks, query_block


class Segment(NamedTuple):
    """Keys and values of one token class, in any order.

    Attributes:
      k: keys, [B, K, S, R].
      v: values, [B, K, S, Z].
      positions: position of each slot, [B, S] int32; negative for an empty slot.
    """

    k: Array
    v: Array
    positions: Array


def segment_attention(
    q: Float[Array, "B T N Hq"],
    positions: Int[Array, "B T"],
    segments: Sequence[Segment],
    *,
    scale: float,
    sinks: int,
    window: int,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """Attend from queries at `positions`, in any order, to the keys of several token classes.

    Args:
      q: queries; the scores of a segment use its first R coordinates.
      positions: position of each query.
      segments: keys and values of each class.
      scale: factor on the scores, 1/√H of the original head dimension.
      sinks: sinks to exclude; only far keys, sinks ≤ j ≤ t - window, are attended to.
      window: recent window to exclude. If both are 0, all j ≤ t are attended to.
      implementation: of attention, see `zdc_jax.ops.attention`; None chooses.

    Returns:
      The output, and its log-sum-exp; zeros and -inf for queries without visible keys. The output has the
      width of the widest values; narrower values count as zero beyond their width.

    Raises:
      NotImplementedError: the requested implementation cannot serve this call; the message says why.
    """
    no_kernels = "it does not support token classes"
    choose_implementation(
        "token classes", implementation, {"pallas": lambda: no_kernels, "cudnn": lambda: no_kernels}
    )
    # Attention sees far keys alone: sinks look like empty slots, and the window like later tokens.
    positions = positions - window
    segments = [Segment(k, v, jnp.where(held >= sinks, held, EMPTY)) for k, v, held in segments]
    B, T, N, _ = q.shape
    block = query_block(B * N * sum(segment.k.shape[2] for segment in segments), T)
    attend = partial(_attend_on_xla, segments=segments, scale=scale)
    return in_query_blocks(attend, block, q, positions)


def _attend_on_xla(
    q: Array, positions: Array, segments: Sequence[Segment], scale: float
) -> tuple[Array, Array]:
    parts = []
    for k, v, held in segments:
        visible = (held[:, None] >= 0) & (held[:, None] <= positions[:, :, None])
        visible = visible[:, None].repeat(k.shape[1], axis=1)
        parts.append(chosen_attention(q[..., : k.shape[-1]], k, v, visible, scale=scale))
    return merge_partial(parts)
