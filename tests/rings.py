"""Rings as lists of their slots."""

import jax.numpy as jnp

from zdc_jax.axes import Array
from zdc_jax.ops.slots import EMPTY, ring_positions


def listed(ring: tuple[int, int], shape: tuple[int, ...], end: Array) -> tuple[Array, Array, Array]:
    """Return lists [B, K, M] of a ring's slots and of the blocks of their positions, and the end of slots.

    Args:
      ring: sinks and window.
      shape: sequences, KV heads and slots.
      end: position after the newest token of each sequence.
    """
    (_, K, M), (sinks, window) = shape, ring
    stored = ring_positions(M, end[:, None] - 1, sinks=sinks, window=window)
    lists = jnp.where(stored == EMPTY, M, jnp.arange(M)), stored // 64
    slots, blocks = (jnp.broadcast_to(x[:, None], (len(end), K, M)) for x in lists)
    return slots, blocks, jnp.where(end > 0, M, 0)
