"""Scores that rise and fall from block to block, by less and by more than a softmax's slack."""

import math

import jax
import jax.numpy as jnp
from jax import Array

LEVELS = (0, 6, 6, 13, 30, 8, 31, 44, -20, 60, 59)
"""Of 64 keys each, less 30: powers of two of the first warp's weights; the fourth has 1.75 times these."""


def jumping(
    B: int, T: int, S: int, N: int, K: int, R: int, scale: float, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """q [B, T, N, R] and k [B, K, S, R]: random, but for a coordinate of levels."""
    q, k = (jax.random.normal(jax.random.key(i), x) for i, x in enumerate([(B, T, N, R), (B, K, S, R)]))
    levels = (jnp.take(jnp.array(LEVELS), jnp.arange(S) // 64, mode="wrap") - 30) * math.log(2) / scale
    rows = 1 + jnp.arange(T) // 16 % 4 / 4  # Warps, 16 rows each, raise their maxima at different blocks.
    return q.at[..., 0].set(rows[:, None]).astype(dtype), k.at[..., 0].set(levels).astype(dtype)
