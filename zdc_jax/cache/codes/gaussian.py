"""Quantization of rotated, nearly Gaussian vectors, as in TurboQuant (Zandieh et al. 2025)."""

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

from zdc_jax.axes import Array
from zdc_jax.cache.codes.code import SCALE_DTYPE, Coded, PackedCode, pack, unpack

LLOYD_STEPS = 500
"""Lloyd iterations. Levels of up to 4 bits converge by then; those of 8 bits start close to the optimum."""


@dataclass(frozen=True)
class Gaussian(PackedCode):
    """Coordinates in the 2^bits optimal levels for a Gaussian, times the root mean square of the token.

    Coded: levels uint8 [*batch, 1, C·bits/8]; root mean square [*batch, 1, 1] in `SCALE_DTYPE`. Zeros decode
    to zeros, and a token with a non-finite coordinate decodes to NaN.
    """

    bits: int

    def encode(self, x: Array) -> Coded:
        x, tiny = x.astype(jnp.float32), jnp.finfo(jnp.float32).tiny
        # Squares of the coordinates themselves could overflow.
        largest = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), tiny)
        x = x / largest
        size = jnp.sqrt((x * x).mean(-1, keepdims=True))
        unit = self.rotate(x) / jnp.maximum(size, tiny)
        return pack(nearest_levels(unit, self.bits), self.bits), (size * largest).astype(SCALE_DTYPE)

    def decode(self, coded: Coded, C: int) -> Array:
        levels, size = coded
        table = jnp.asarray(gaussian_levels(self.bits), jnp.float32)
        unit = jnp.take(table, unpack(levels, self.bits), mode="clip")
        return self.rotate_back(unit) * size.astype(jnp.float32)

    def rotate(self, x: Float[Array, "*batch C"]) -> Float[Array, "*batch C"]:
        """Rotate vectors before rounding; the identity here."""
        return x

    def rotate_back(self, x: Float[Array, "*batch C"]) -> Float[Array, "*batch C"]:
        """Invert `rotate`."""
        return x


@dataclass(frozen=True)
class TurnedGaussian(Gaussian):
    """`Gaussian` of the coordinates rotated by `turn`."""

    def rotate(self, x: Array) -> Array:
        return jnp.matmul(x, jnp.asarray(turn(x.shape[-1]), jnp.float32), precision="highest")

    def rotate_back(self, x: Array) -> Array:
        # Default precision: each decoding step rotates the whole store back, so that speed matters here.
        return x @ jnp.asarray(turn(x.shape[-1]).T, jnp.float32)


@cache
def turn(C: int) -> np.ndarray:
    """Return the fixed rotation of vectors of C coordinates: an orthogonal matrix, float64 [C, C].

    Its entries are at most √(2/C). It is a product of random signs and Sylvester's Hadamard matrix. For C =
    p·2^m with p odd, the Kronecker product of the Hartley matrix of p and the Hadamard matrix of 2^m replaces
    the latter.
    """
    odd = C // (C & -C)
    angles = 2 * np.pi * np.outer(np.arange(odd), np.arange(odd)) / odd
    matrix = (np.cos(angles) + np.sin(angles)) / np.sqrt(odd)
    while len(matrix) < C:
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]]) / np.sqrt(2))
    signs = np.random.default_rng(C).choice([-1, 1], C)
    return signs[:, None] * matrix


def nearest_levels(unit: Float[Array, "*batch C"], bits: int) -> UInt8[Array, "*batch C"]:
    """Return the index of the nearest of `gaussian_levels`; 0 for NaN."""
    table = gaussian_levels(bits)
    middles = jnp.asarray((table[1:] + table[:-1]) / 2, jnp.float32)
    # Binary search, because XLA takes minutes to compile a comparison with all 8-bit middles for a GPU.
    # The first middle is a constant: a gather of it would be folded at compile time, element by element.
    half = 1 << bits - 1
    level = jnp.where(unit > middles[half - 1], half, 0)
    for step in (1 << bit for bit in reversed(range(bits - 1))):
        level += jnp.where(unit > jnp.take(middles, level + (step - 1), mode="clip"), step, 0)
    return level.astype(jnp.uint8)


@cache
def gaussian_levels(bits: int) -> np.ndarray:
    """Return the 2^bits levels with the least mean square error for a unit Gaussian, ascending, float64.

    Lloyd's iteration moves each level to the mean of the values that are nearest to it. It starts with the
    optimum for many levels: quantiles of a Gaussian of three times the variance (Panter and Dite 1951).
    """
    normal, many = NormalDist(), NormalDist(0, 3**0.5)
    levels = np.array([many.inv_cdf((level + 0.5) / 2**bits) for level in range(2**bits)])
    for _ in range(LLOYD_STEPS):
        middles = (levels[1:] + levels[:-1]) / 2
        below = np.array([0.0, *map(normal.cdf, middles), 1.0])
        density = np.array([0.0, *map(normal.pdf, middles), 0.0])
        levels = -np.diff(density) / np.diff(below)
    return levels


@cache
def gaussian_distortion(bits: int) -> float:
    """Return the mean square error of a unit Gaussian that is rounded to `gaussian_levels`."""
    normal, levels = NormalDist(), gaussian_levels(bits)
    middles = [*(levels[1:] + levels[:-1]) / 2]
    mass = np.diff([0.0, *map(normal.cdf, middles), 1.0])
    first = -np.diff([0.0, *map(normal.pdf, middles), 0.0])
    return float(1 - (2 * levels * first - levels**2 * mass).sum())
