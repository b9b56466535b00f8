"""Masks of tokens: a bit for each token of a vocabulary, in int32 numbers with the lowest bits first."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from zdc_jax.axes import Array

MASK_BITS = 32
"""Tokens of one number of a mask."""
ALL = -1
"""Number of a mask that allows all its tokens."""


def mask_width(vocab: int) -> int:
    """Return how many int32 numbers a mask of `vocab` tokens has."""
    return -(-vocab // MASK_BITS)


def pack_mask(allowed: Bool[np.ndarray, " V"]) -> Int[np.ndarray, " W"]:
    """Pack a flag for each token into int32 numbers, the lowest bits first."""
    padded = np.zeros(mask_width(len(allowed)) * MASK_BITS, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32)


def full_mask(vocab: int, *batch: int) -> Int[np.ndarray, "*batch W"]:
    """Return a mask that allows all tokens."""
    return np.full((*batch, mask_width(vocab)), ALL, np.int32)


def unpack_mask(mask: Int[Array, "B W"], tokens: int) -> Bool[Array, "B {tokens}"]:
    """Return the first `tokens` bits of a mask."""
    bits = (mask[:, :, None] >> jnp.arange(MASK_BITS)) & 1
    return bits.reshape(len(mask), -1)[:, :tokens].astype(bool)


def clear_bit(mask: Int[np.ndarray, " W"], token: int) -> None:
    """Clear the bit of a token, in place."""
    mask.view(np.uint32)[token // MASK_BITS] &= ~np.uint32(1 << token % MASK_BITS)


def set_bits(mask: Int[np.ndarray, " W"], tokens: Sequence[int]) -> None:
    """Set the bits of tokens, in place."""
    for token in tokens:
        mask.view(np.uint32)[token // MASK_BITS] |= np.uint32(1 << token % MASK_BITS)
