"""Quantization that corrects its own error, as in GEAR (Kang et al. 2024)."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

from zdc_jax.axes import Array
from zdc_jax.cache.codes.code import SCALE_DTYPE, Code, Coded, pack, packing_refusal, unpack
from zdc_jax.cache.codes.integers import dequantise, quantise

POWER_STEPS = 4
"""Power iterations for each column and row of a residual, always from the same start vector."""
SMALLEST = 1e-12
"""Least divisor of a column, for residuals scaled to a largest entry of 1; its square does not underflow."""
MAX_VECTOR_LENGTH = 256
"""Longest vector whose outliers an 8-bit index can address."""


@dataclass(frozen=True)
class Gear(Code):
    """Blocks as D + A·B + O: few-bit integers D, a product of low rank, and outliers.

    Vectors are the channels of a block for keys (`by_channel`), and its tokens for values. D has a scale and
    a zero point per vector. The outliers are the largest and the smallest coordinates of a vector. They are
    excluded from the range of D, and O corrects their error. A·B approximates the error of D on all other
    coordinates.

    Coded, for n vectors of m coordinates with o outliers: levels uint8 [*batch, n, m·bits/8]; scale and zero
    point [*batch, n, 1]; A [*batch, n, rank]; B [*batch, rank, m]; O [*batch, n, o]; and the places of the
    outliers, uint8 with the shape of O.

    Attributes:
      bits: bits of an integer.
      tokens: tokens of a block.
      rank: rank of A·B.
      outliers: share of outliers; half of them, rounded to a whole number, are the largest coordinates, the
        other half the smallest.
      by_channel: whether a vector is a channel instead of a token.
    """

    bits: int
    tokens: int
    rank: int
    outliers: float
    by_channel: bool

    @property
    def block(self) -> int:
        return self.tokens

    def refusal(self, C: int) -> str | None:
        if not self.rank <= min(self.tokens, C):
            return f"rank={self.rank} must be at most {min(self.tokens, C)}, for blocks [{self.tokens}, {C}]"
        if C > MAX_VECTOR_LENGTH:
            return f"rank {C} must be at most {MAX_VECTOR_LENGTH}, because an 8-bit index addresses outliers"
        return packing_refusal(C)

    def encode(self, x: Array) -> Coded:
        x = self._transpose_vectors(x.astype(jnp.float32))
        m = x.shape[-1]
        per_side = round(self.outliers / 2 * m)
        order = jnp.argsort(x, axis=-1)
        places = jnp.concatenate([order[..., :per_side], order[..., m - per_side :]], axis=-1)
        places = places.astype(jnp.uint8)
        inliers = (places[..., None] != jnp.arange(m, dtype=jnp.uint8)).all(-2)
        levels, scale, zero = quantise(x, self.bits, -1, inliers)
        residual = x - dequantise(levels, scale, zero)
        A, B = low_rank(jnp.where(inliers, residual, 0), self.rank)
        outliers = jnp.take_along_axis(residual - _multiply(A, B), places.astype(jnp.int32), axis=-1)
        return pack(levels, self.bits), scale, zero, A, B, outliers.astype(SCALE_DTYPE), places

    def decode(self, coded: Coded, C: int) -> Array:
        levels, scale, zero, A, B, outliers, places = coded
        x = dequantise(unpack(levels, self.bits), scale, zero) + _multiply(A, B)
        return self._transpose_vectors(x + _spread(outliers, places, x.shape[-1]))

    def _transpose_vectors(self, x: Array) -> Array:
        """Transpose blocks [*batch, tokens, C] between tokens and vectors; its own inverse."""
        return x.swapaxes(-1, -2) if self.by_channel else x


def low_rank(
    x: Float[Array, "*batch n m"], rank: int
) -> tuple[Float[Array, "*batch n {rank}"], Float[Array, "*batch {rank} m"]]:
    """Return A and B in `SCALE_DTYPE` whose product approximates x, by power iteration as in GEAR.

    Columns of A and rows of B are fitted one after the other. Each pair fits the residual of the previous
    pairs, so that no pair increases the error.
    """
    A = jnp.zeros((*x.shape[:-1], rank), SCALE_DTYPE)
    B = jnp.zeros((*x.shape[:-2], rank, x.shape[-1]), SCALE_DTYPE)
    # Scaling to a largest entry of 1 keeps squares from overflowing or vanishing.
    largest = jnp.abs(x).max((-1, -2), keepdims=True)
    x = x / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)
    for index in range(rank):
        row = jnp.broadcast_to(_create_start_vector(x.shape[-1]), (*x.shape[:-2], x.shape[-1]))
        for _ in range(POWER_STEPS):
            column = jnp.einsum("...nm,...m->...n", x, row, precision="highest")
            column = column / jnp.maximum(jnp.linalg.norm(column, axis=-1, keepdims=True), SMALLEST)
            row = jnp.einsum("...nm,...n->...m", x, column, precision="highest")
        A = A.at[..., index].set(column.astype(SCALE_DTYPE))
        B = B.at[..., index, :].set((row * largest[..., 0]).astype(SCALE_DTYPE))
        x = x - column[..., None] * row[..., None, :]
    return A, B


def _create_start_vector(m: int) -> np.ndarray:
    """Return a start vector without alignment to any coordinate or simple pattern of coordinates."""
    return np.random.default_rng(m).normal(size=m).astype(np.float32)


def _multiply(A: Array, B: Array) -> Array:
    """Return A·B in float32."""
    return jnp.einsum("...nr,...rm->...nm", A, B, preferred_element_type=jnp.float32)


def _spread(
    values: Float[Array, "*batch n o"], places: UInt8[Array, "*batch n o"], m: int
) -> Float[Array, "*batch n m"]:
    """Return zeros [*batch, n, m], float32, with each value at its place.

    A sum replaces the scatter, because XLA fuses it.
    """
    is_place = places[..., None] == jnp.arange(m, dtype=jnp.uint8)
    return jnp.where(is_place, values[..., None].astype(jnp.float32), 0).sum(-2)
