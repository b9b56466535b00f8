"""The shift: a mean of keys that a cache leaves out, and that scores regain (ours).

Keys before the rotary embedding have a mean m per KV head, in some models hundreds of times larger than the
rest. After the embedding it is R(p)m, and quantizing it would cost all bits. So every key loses a mean key of
its block of `BLOCK` positions, R(c)m with the block's center c. A query q then gains the same number q·R(c)m
in all scores of a block, which costs one product per block instead of one per key.

Within a block m turns by at most half of `BLOCK` positions. Coordinates of high frequency turn further, so
their part of the best m is small (`damping`), and the keys keep that part.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from kernels_pallas import MeanTurns, device_refusal, score_blocks, score_blocks_refusal
from zdc_jax.axes import Array

BLOCK = 64
"""Consecutive positions that share a mean key; kernels read keys in blocks of as many."""
MOST_POSITIONS = 2**17
"""Most positions for which a layer holds `means_of_blocks`: 8 MB with 8 KV heads of 128 coordinates."""
CENTER = (BLOCK - 1) / 2
"""Center of a block, in positions from its first."""


def damping(frequencies: Float[np.ndarray, " h"]) -> Float[np.ndarray, " h"]:
    """Return the mean of cos(dθ) over the distances d of a block's positions from its center, [H/2].

    The best mean key of a block, for keys whose mean before the rotary embedding is m, is this times m.
    """
    distances = np.arange(BLOCK) - CENTER
    return np.cos(distances[:, None] * frequencies).mean(0)


def mean_keys(
    mean: Float[np.ndarray, "*K H"], frequencies: Float[np.ndarray, " h"], blocks: int
) -> Float[np.ndarray, "blocks *K H"]:
    """Return the mean keys R(c)m of the first blocks in float64, after the rotary embedding."""
    centers = np.arange(blocks) * BLOCK + CENTER
    angles = np.multiply.outer(centers, frequencies).reshape(blocks, *(1,) * (mean.ndim - 1), -1)
    first, second = np.split(mean, 2, axis=-1)
    turned = (
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
    )
    return np.concatenate(turned, axis=-1)


def means_of_blocks(
    mean: Float[np.ndarray, "K H"],
    frequencies: Float[np.ndarray, " h"],
    positions: int,
    basis: Float[np.ndarray, "K H C"] | None = None,
) -> Float[np.ndarray, "K blocks C"] | None:
    """Return the mean keys of all blocks less that of the first, as keys are stored, in float64.

    A constant of all keys does not change attention.

    Args:
      mean: mean m of the keys before the rotary embedding.
      frequencies: rotary frequencies.
      positions: positions of the model. The result is None above `MOST_POSITIONS`.
      basis: basis of the keys; None for keys as the rotary embedding leaves them.
    """
    if positions > MOST_POSITIONS:
        return None
    means = mean_keys(mean, frequencies, -(-positions // BLOCK)).swapaxes(0, 1)
    means -= means[:, :1]
    return means if basis is None else means @ basis


def without_mean(
    k: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    mean: Float[Array, "K H"],
    frequencies: Float[np.ndarray, " h"],
) -> Float[Array, "B T K H"]:
    """Return float32 keys before the rotary embedding without the mean key of their block.

    The rotary embedding turns R(c - p)m of a key at position p into R(c)m.
    """
    cos, sin = _turns_in_block(frequencies, positions)
    first, second = jnp.split(mean.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return k.astype(jnp.float32) - turned


class ShiftedQueries(NamedTuple):
    """Queries as the scores of blocks need them.

    Attributes:
      q: queries before the rotary embedding, [B, T, N, H].
      positions: position of each query, [B, T].
      mean: mean m of the keys before the rotary embedding, [K, H].
      frequencies: rotary frequencies, float64 [H/2].
      means_of_keys: mean keys of all blocks less that of the first, as keys are stored, [K, blocks, C]
        (`means_of_blocks`); None if positions are too many.
    """

    q: Array
    positions: Array
    mean: Array
    frequencies: np.ndarray
    means_of_keys: Array | None = None

    def each(self, change: Callable[[Array], Array]) -> "ShiftedQueries":
        """Apply `change` to the arrays that have a token axis."""
        return self._replace(q=change(self.q), positions=change(self.positions))

    @property
    def products(self) -> Float[Array, "B T N H"]:
        """Products q·m̄ with the mean, turned from the center of each query's block to its position.

        Real parts of all pairs of coordinates come first, then imaginary parts, in float32.
        """
        groups = self.q.shape[2] // len(self.mean)
        m1, m2 = jnp.split(jnp.repeat(self.mean.astype(jnp.float32), groups, axis=0), 2, axis=-1)
        q1, q2 = jnp.split(self.q.astype(jnp.float32), 2, axis=-1)
        cos, sin = _turns_in_block(-self.frequencies, self.positions)
        a, b = q1 * m1 + q2 * m2, q2 * m1 - q1 * m2
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def block_scores(
        self, slots: int, scale: float, *, on_kernel: bool = False, ends: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T N blocks"]:
        """Return what the scaled scores of keys gain in each block of positions below `slots`.

        Scores are relative to the block of the query, since a constant of all keys does not change attention.
        Blocks after it have arbitrary values.

        Args:
          slots: number of positions.
          scale: factor on the scores.
          on_kernel: whether a kernel may compute them, where it can; positions must then be consecutive.
          ends: position at which padding begins; padding may have any finite scores. None for no padding.
        """
        tables = self.mean_turns(slots)
        if on_kernel and self._kernel_refusal(*tables) is None:
            scores = score_blocks(self.q, *tables, self.positions[:, 0], scale=scale, ends=ends)
            return scores.transpose(0, 3, 1, 2)
        return score_products(self.products, tables.turns, self.positions, scale=scale)

    def mean_turns(self, slots: int) -> MeanTurns:
        """Return the mean and its turns, as kernels need them for positions below `slots`."""
        turns = _turns_between_blocks(self.frequencies, -(-slots // BLOCK))
        return MeanTurns(self.mean.astype(jnp.float32), _all_turns_in_block(-self.frequencies), turns)

    def _kernel_refusal(self, mean: Array, in_block: Array, turns: Array) -> str | None:
        """Return why the kernel cannot run, or None."""
        # Caches of other dtypes do not run on kernels either.
        q = jax.ShapeDtypeStruct(self.q.shape, jnp.bfloat16)
        return device_refusal(q) or score_blocks_refusal(self.q, mean, in_block, turns, self.positions[:, 0])

    def scores_of_heads(
        self, products: Float[Array, "B S n H"], scale: float
    ) -> Float[Array, "B S n blocks"]:
        """Return the block scores of some heads from the `products` of all S positions, the slots."""
        B, S = products.shape[:2]
        turns = _turns_between_blocks(self.frequencies, -(-S // BLOCK))
        return score_products(products, turns, jnp.broadcast_to(jnp.arange(S), (B, S)), scale=scale)


def score_products(
    products: Float[Array, "B T N H"],
    turns: Float[Array, "blocks H"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
) -> Float[Array, "B T N blocks"]:
    """Return block scores from `ShiftedQueries.products` and the `turns` of all distances, on XLA."""
    scores = scale * jnp.einsum("BTNH,dH->BTNd", products, turns, precision=jax.lax.Precision.HIGHEST)
    own = positions // BLOCK
    distances = jnp.clip(own[..., None] - jnp.arange(len(turns)), 0, len(turns) - 1)
    return jnp.take_along_axis(scores, distances[:, :, None], axis=-1)


def _all_turns_in_block(frequencies: Float[np.ndarray, " h"]) -> Float[Array, "64 2*h"]:
    """Return cosines, then sines, of the turn from each position of a block to its center, in float32."""
    angles = np.multiply.outer(CENTER - np.arange(BLOCK), frequencies)
    return jnp.asarray(np.concatenate([np.cos(angles), np.sin(angles)], -1), jnp.float32)


def _turns_in_block(
    frequencies: Float[np.ndarray, " h"], positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]:
    """Return cosines and sines of the turn from each position to the center of its block."""
    turns = _all_turns_in_block(frequencies)[positions % BLOCK]
    cos, sin = jnp.split(turns[:, :, None], 2, axis=-1)
    return cos, sin


def _turns_between_blocks(frequencies: Float[np.ndarray, " h"], blocks: int) -> Float[Array, "blocks 2*h"]:
    """Return [cos δθ - 1, -sin δθ] of distances δ of 0, 1, … blocks, in float32.

    Angles are sums of two angles whose sines were computed in float64: float32 angles of far positions would
    be off by 0.008 at position 131,072. Differences from 1 keep the digits of slow turns.
    """
    inner = 64
    coarse = np.multiply.outer(np.arange(-(-blocks // inner)) * (inner * BLOCK), frequencies)
    fine = np.multiply.outer(np.arange(inner) * BLOCK, frequencies)
    (less1, s1), (less2, s2) = (
        (jnp.asarray(-2 * np.sin(x / 2) ** 2, jnp.float32), jnp.asarray(np.sin(x), jnp.float32))
        for x in (coarse, fine)
    )
    less1, s1 = less1[:, None], s1[:, None]
    less = less1 * less2 + less1 + less2 - s1 * s2
    sin = s1 * (1 + less2) + (1 + less1) * s2
    return jnp.concatenate([less, -sin], axis=-1).reshape(-1, 2 * len(frequencies))[:blocks]


def of_slots(
    block_scores: Float[Array, "B T N blocks"], slots: Int[Array, "..."], num_kv_heads: int
) -> Float[Array, "B K G T S"]:
    """Return the block scores of single keys.

    Args:
      block_scores: result of `ShiftedQueries.block_scores`.
      slots: positions of the keys: [S], [B, S] or [B, K, S]. Positions outside all blocks may have any score.
      num_kv_heads: number of KV heads K.
    """
    B, T, _, blocks = block_scores.shape
    by_head = block_scores.reshape(B, T, num_kv_heads, -1, blocks).transpose(0, 2, 3, 1, 4)
    at = jnp.clip(slots // BLOCK, 0, blocks - 1)
    if at.ndim == 1:
        return by_head[..., at]
    at = at[:, None, None, None] if at.ndim == 2 else at[:, :, None, None]
    return jnp.take_along_axis(by_head, jnp.broadcast_to(at, (*by_head.shape[:-1], at.shape[-1])), axis=-1)
