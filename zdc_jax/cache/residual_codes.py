"""Codes that mend their own error: those of GEAR (Kang et al. 2024)."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

from zdc_jax.axes import Array
from zdc_jax.cache.codes import SCALE_DTYPE, Code, Coded, pack, packing_refusal, unpack
from zdc_jax.cache.integer_codes import dequantise, quantise

POWER_STEPS = 4
"""Power iterations for a column and row of a residual; they begin with the same vector always."""
SMALLEST = 1e-12
"""A shorter column, of a residual whose largest number is 1, is nothing; its squares are still numbers."""
LONGEST = 256
"""Outliers are found by an index of 8 bits."""


@dataclass(frozen=True)
class Gear(Code):
    """Blocks as D + A·B + O: few-bit integers D, a product of low rank, and outliers.

    Vectors are the channels of a block (`by_channel`, for keys) or its tokens (for values). The integers have
    a scale and a zero point a vector. Its largest and its smallest coordinates, of each as many as is nearest
    to half the share `outliers`, take no part in the range of the integers; O is what is left of their error.
    A·B is nearly the best of rank `rank` for what the integers leave of all others.

    Coded, for n vectors of m coordinates, o of them outliers: levels uint8 [*batch, n, m·bits/8], scale and
    zero [*batch, n, 1], A [*batch, n, rank], B [*batch, rank, m], O [*batch, n, o] and places uint8 like it.
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
        if C > LONGEST:
            return f"rank {C} must be at most {LONGEST}, for 8 bits say where an outlier is"
        return packing_refusal(C)

    def encode(self, x: Array) -> Coded:
        x = self._vectors(x.astype(jnp.float32))
        m = x.shape[-1]
        each = round(self.outliers / 2 * m)
        order = jnp.argsort(x, axis=-1)
        places = jnp.concatenate([order[..., :each], order[..., m - each :]], axis=-1).astype(jnp.uint8)
        others = (places[..., None] != jnp.arange(m, dtype=jnp.uint8)).all(-2)
        levels, scale, zero = quantise(x, self.bits, -1, others)
        left = x - dequantise(levels, scale, zero)
        A, B = low_rank(jnp.where(others, left, 0), self.rank)
        left = jnp.take_along_axis(left - _product(A, B), places.astype(jnp.int32), axis=-1)
        return pack(levels, self.bits), scale, zero, A, B, left.astype(SCALE_DTYPE), places

    def decode(self, coded: Coded, C: int) -> Array:
        levels, scale, zero, A, B, left, places = coded
        x = dequantise(unpack(levels, self.bits), scale, zero) + _product(A, B)
        return self._vectors(x + _spread(left, places, x.shape[-1]))

    def _vectors(self, x: Array) -> Array:
        """Blocks [*batch, tokens, C] with what is coded together last; and back."""
        return x.swapaxes(-1, -2) if self.by_channel else x


def low_rank(
    x: Float[Array, "*batch n m"], rank: int
) -> tuple[Float[Array, "*batch n {rank}"], Float[Array, "*batch {rank} m"]]:
    """A and B of 16 bits whose product is nearly the best of this rank: power iteration, as in GEAR.

    One column and row after the other, each of what those before left, so that none makes the error larger.
    """
    A = jnp.zeros((*x.shape[:-1], rank), SCALE_DTYPE)
    B = jnp.zeros((*x.shape[:-2], rank, x.shape[-1]), SCALE_DTYPE)
    # Squares of the numbers themselves could overflow, or vanish.
    largest = jnp.abs(x).max((-1, -2), keepdims=True)
    x = x / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)
    for index in range(rank):
        row = jnp.broadcast_to(_start(x.shape[-1]), (*x.shape[:-2], x.shape[-1]))
        for _ in range(POWER_STEPS):
            column = jnp.einsum("...nm,...m->...n", x, row, precision="highest")
            column = column / jnp.maximum(jnp.linalg.norm(column, axis=-1, keepdims=True), SMALLEST)
            row = jnp.einsum("...nm,...n->...m", x, column, precision="highest")
        A = A.at[..., index].set(column.astype(SCALE_DTYPE))
        B = B.at[..., index, :].set((row * largest[..., 0]).astype(SCALE_DTYPE))
        x = x - column[..., None] * row[..., None, :]
    return A, B


def _start(m: int) -> np.ndarray:
    """No more alike to one coordinate than to another, and to no simple pattern of them."""
    return np.random.default_rng(m).normal(size=m).astype(np.float32)


def _product(A: Array, B: Array) -> Array:
    """A·B in float32."""
    return jnp.einsum("...nr,...rm->...nm", A, B, preferred_element_type=jnp.float32)


def _spread(
    values: Float[Array, "*batch n o"], places: UInt8[Array, "*batch n o"], m: int
) -> Float[Array, "*batch n m"]:
    """Each value at its place, zeros elsewhere, float32; a sum in the place of a scatter, that fuses."""
    there = places[..., None] == jnp.arange(m, dtype=jnp.uint8)
    return jnp.where(there, values[..., None].astype(jnp.float32), 0).sum(-2)
