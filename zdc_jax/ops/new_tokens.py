"""Quantization of new tokens by kernels, apart or together with rotary embedding and basis (ours).

Each function returns None where no kernel can serve the call. XLA then does the work.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from kernels_pallas import (
    BlockMeans,
    MeanTurns,
    NearTokens,
    Plane,
    RingSnapshots,
    Rounded,
    Stored,
    TurnedQueries,
    Turning,
    device_refusal,
    encode,
    encode_refusal,
    put_near,
    put_near_refusal,
    round_tokens,
    round_tokens_refusal,
    turn_and_store,
    turn_and_store_refusal,
)
from zdc_jax.axes import Array
from zdc_jax.ops.attention import Implementation, takes_kernels
from zdc_jax.ops.cache_attention import NOT_INTEGERS
from zdc_jax.ops.new_keys import NewKeys


def encode_with_kernel(
    x: Sequence[Float[Array, "B T K _"]],
    planes: Sequence[Sequence[Plane]],
    positions: Int[Array, "B T"],
    end: Int[Array, " B"],
    table: Int[Array, "B pages"] | None = None,
) -> list[list[Plane]] | None:
    """Quantize the tokens x at `positions` below `end` into planes with one kernel; None if it cannot.

    The choice of attention's implementation does not matter here: the quantized values are the same.

    Args:
      x: arrays to quantize.
      planes: for each array of `x` the planes of its coordinates, pools if there is a `table`; empty if the
        kernels do not support a code.
      positions: position of each token.
      end: length of each sequence.
      table: block table of a paged cache.
    """
    row = jax.ShapeDtypeStruct(x[0].shape[:1], jnp.int32)

    def refusal() -> str | None:
        if not all(planes):
            return NOT_INTEGERS
        return device_refusal(x[0]) or encode_refusal(x, planes, row, row, block_table=table)

    if not takes_kernels("coding", None, refusal):
        return None
    return encode(x, planes, positions[:, 0], end, block_table=table)


def round_with_kernel(x: Sequence[Float[Array, "B T K _"]], bits: int | None) -> list[Rounded] | None:
    """Quantize all coordinates of the tokens x into planes of `bits`, with one kernel; None if it cannot.

    `bits` is None if the kernels do not support the code. As in `encode_with_kernel`, results are the same.
    """

    if bits is None or device_refusal(x[0]) or round_tokens_refusal(x, bits):
        return None
    return round_tokens(x, bits)


def put_near_with_kernel(
    x: Sequence[Float[Array, "B T K _"]],
    rings: Sequence[Plane],
    rows: Int[Array, " B"],
    positions: Int[Array, "B T"],
    end: Int[Array, " B"],
    near: tuple[int, int],
    snapshots: RingSnapshots | None = None,
    means: BlockMeans | None = None,
) -> NearTokens | None:
    """Quantize the tokens x at `positions` below `end` into rings, with one kernel; None if it cannot.

    Args:
      x: keys and values.
      rings: rings of keys and of values.
      rows: ring of each sequence.
      positions: position of each token.
      end: length of each sequence.
      near: sinks and window.
      snapshots: copies of the rings to make.
      means: what keys gain where queries read them.
    """
    sinks, window = near
    options: dict[str, Any] = {"sinks": sinks, "window": window, "snapshots": snapshots, "means": means}
    start = positions[:, 0]
    if device_refusal(x[0]) or put_near_refusal(x, rings, rows, start, end, **options):
        return None
    return put_near(x, rings, rows, start, end, **options)


def rotate_and_store(
    heads: Sequence[Float[Array, "B 1 _ _"]],
    k: NewKeys,
    stored: tuple[Stored, Stored],
    positions: Int[Array, "B 1"],
    end: Int[Array, " B"],
    near: tuple[int, int],
    *,
    implementation: Implementation | None,
    scale: float,
    means: MeanTurns | None = None,
    table: Int[Array, "B pages"] | None = None,
    first: Int[Array, ""] | None = None,
) -> tuple[TurnedQueries, Stored, Stored] | None:
    """Apply rotary embedding and basis to single tokens and quantize them into the cache, with one kernel.

    Args:
      heads: heads of queries, keys and values (`join_heads`).
      k: keys that still need a turn.
      stored: stores of keys and of values, pools if there is a `table`; without planes if the kernels do not
        support a code.
      positions: position of each token.
      end: length of each sequence.
      near: sinks and window.
      implementation: requested implementation of attention.
      scale: factor on the scores.
      means: mean that keys have left out; None for whole keys.
      table: block table of a paged cache.
      first: ring of the first sequence, default 0.

    Returns:
      Rotated queries, with a token axis in their plain form, and both updated stores. None if the kernel
      cannot serve the call, even if `pallas` is requested, or if XLA is requested.
    """
    sinks, window = near
    options: dict[str, Any] = {
        "sinks": sinks,
        "window": window,
        "block_table": table,
        "first_ring": first,
        "means": means,
    }
    turn = k.turn
    assert turn is not None  # Otherwise nothing is left to apply.

    def prepare(heads: Sequence[Array]) -> tuple[list[Array], Turning]:
        cos, sin = turn.angles()
        return [x[:, 0] for x in heads], Turning(cos[:, 0], sin[:, 0], turn.q_basis, turn.k_basis)

    def refusal() -> str | None:
        if not all(each.planes for each in stored):
            return NOT_INTEGERS
        shapes, turning = jax.eval_shape(prepare, heads)
        row = jax.ShapeDtypeStruct(heads[0].shape[:1], jnp.int32)
        return device_refusal(heads[0]) or turn_and_store_refusal(
            shapes, turning, *stored, row, row, **options
        )

    # Otherwise other kernels do the parts of its work, and log it.
    if implementation not in (None, "pallas") or refusal() is not None:
        return None
    takes_kernels("new token", None, refusal)
    queries, stored_k, stored_v = turn_and_store(
        *prepare(heads), *stored, positions[:, 0], end, scale=scale, **options
    )
    return queries._replace(plain=queries.plain[:, None]), stored_k, stored_v
