"""Scores that rise and fall from block to block, by less and by more than the softmax's slack."""

import math

import jax
import jax.numpy as jnp
from jax import Array

LEVELS = (0, 6, 6, 13, 30, 8, 31, 44, -20, 60, 59)
"""Powers of two (less 30) of the first warp's weights, per block of 64 keys.

The fourth warp has 1.75 times these.
"""


def jumping(
    B: int, T: int, S: int, N: int, K: int, R: int, scale: float, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """Return random q [B, T, N, R] and k [B, K, S, R] with one coordinate of levels."""
    q, k = (jax.random.normal(jax.random.key(i), x) for i, x in enumerate([(B, T, N, R), (B, K, S, R)]))
    levels = (jnp.take(jnp.array(LEVELS), jnp.arange(S) // 64, mode="wrap") - 30) * math.log(2) / scale
    rows = 1 + jnp.arange(T) // 16 % 4 / 4  # Warps of 16 rows raise their maxima at different blocks.
    return q.at[..., 0].set(rows[:, None]).astype(dtype), k.at[..., 0].set(levels).astype(dtype)
