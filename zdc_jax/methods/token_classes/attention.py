"""Attention to the keys of several token classes, and the choice of its implementation."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Float, Int

from kernels_pallas import Segment, merge_partial, segment_refusal
from kernels_pallas import segment_attention as kernel_segments
from zdc_jax.axes import Array
from zdc_jax.ops.attention import Implementation, choose_implementation, kernel_refusal
from zdc_jax.ops.xla import chosen_attention, in_query_blocks, query_block


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
      segments: keys k [B, K, S, R], values v [B, K, S, Z] and positions [B, S] of each class; a negative
        position marks an empty slot.
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

    def operands(q: Array) -> dict[str, Any]:
        return {"q": q, "positions": positions, "segments": segments}

    refusals: dict[Implementation, Callable[[], str | None]] = {
        "pallas": lambda: kernel_refusal(segment_refusal, operands, q),
        "cudnn": lambda: "it does not support token classes",
    }
    kind = "class decode" if q.shape[1] == 1 else "class prefill"
    if choose_implementation(kind, implementation, refusals) == "pallas":
        return kernel_segments(q, positions, segments, scale=scale, sinks=sinks, window=window)

    def attend(q: Array, positions: Array) -> tuple[Array, Array]:
        parts = []
        for k, v, held in segments:
            j, t = held[:, None], positions[:, :, None]
            visible = ((j >= sinks) & (j >= 0) & (j <= t - window))[:, None]
            visible = visible.repeat(k.shape[1], axis=1)
            parts.append(chosen_attention(q[..., : k.shape[-1]], k, v, visible, scale=scale))
        return merge_partial(parts)

    B, T, N, _ = q.shape
    block = query_block(B * N * sum(segment.k.shape[2] for segment in segments), T)
    return in_query_blocks(attend, block, q, positions)
