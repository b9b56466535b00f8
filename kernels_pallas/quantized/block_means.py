"""Means that keys left out, which kernels add to the keys of chunks of prompts (ours)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from kernels_pallas import common
from kernels_pallas.triton import plt


class BlockMeans(NamedTuple):
    """Means of keys, one for each block of 64 positions; or references to them in a kernel.

    Attributes:
      values: means of all KV heads, float32 [K, blocks, C]. Later positions have the mean of the last block.
      references: block of each sequence whose mean is subtracted from all others, int32 [B].
    """

    values: Any
    references: Any

    def load(self, b: Array, kv: Array, block: Array, columns: Any) -> Array:
        """Return what coordinates of keys in a block gain; inside a kernel on the Triton back end.

        Args:
          b: sequence.
          kv: KV head.
          block: block of all keys, or of each key [n, 1].
          columns: coordinates; an array [1, width] if `block` is one.
        """
        last = self.values.shape[1] - 1
        own, subtracted = (
            plt.load(self.values.at[kv, jnp.clip(at, 0, last), columns]) for at in (block, self.references[b])
        )
        return own - subtracted


def check_means(means: BlockMeans | None, B: int, K: int, width: int) -> None:
    """Raise `ValueError` unless kernels can add the means to keys [B, K, ·, width]."""
    if means is None:
        return
    common.check_rows(B, **{"means.references": means.references})
    common.check_shape("means.values", means.values, (K, None, width), "K, blocks, C")
    if means.values.dtype != jnp.float32:
        raise ValueError(f"means.values has dtype {means.values.dtype}: must be float32")
