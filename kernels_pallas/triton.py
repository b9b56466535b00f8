"""Helpers of the kernels on Pallas' Triton back end: limits, pages, and the bytes of planes."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import common
from kernels_pallas.common import Shaped
from kernels_pallas.quantized.byte_levels import bit_planes
from kernels_pallas.quantized.inputs import Plane, check_plane

try:
    import jax.experimental.pallas.triton as plt
except ImportError:
    plt = None  # type: ignore[assignment]

OFFSETS = "must be at most 2^31, or above 2^32, where Triton uses 64-bit offsets"


def check_back_end() -> None:
    """Raise `NotImplementedError` on a GPU without support, and if JAX has no Triton back end."""
    common.check_device()
    if plt is None:
        raise NotImplementedError("this JAX has no Triton back end for Pallas")


def is_addressable(size: int) -> bool:
    """Return whether Triton can address an array of `size` bytes.

    Its offsets have 32 bits up to 2^32 bytes, but are signed.
    """
    return not 2**31 < size <= 2**32


def count_addressable(most: int, sizes: Sequence[int]) -> int:
    """Return how many arrays of each size in bytes can be joined in one, at most `most` and at least 1."""
    fitting = (n for n in range(most, 1, -1) if all(is_addressable(n * size) for size in sizes))
    return next(fitting, 1)


def check_planes(name: str, planes: Sequence[Plane], tokens: tuple[int, int, int]) -> None:
    """Raise `ValueError` unless kernels can read each plane of [B, K, S] `tokens`, and Triton address it."""
    for i, plane in enumerate(planes):
        check_addressed(f"{name}[{i}]", plane, tokens)


def check_addressed(name: str, plane: Plane, tokens: tuple[int, int, int]) -> None:
    """Raise `ValueError` unless kernels can read a plane of [B, K, S] `tokens`, and Triton address it."""
    check_plane(name, plane, tokens)
    for part, x in (("levels", plane.levels), ("reach", plane.reach)):
        if not is_addressable(size := math.prod(x.shape)):
            raise ValueError(f"{name}.{part} has {size} bytes: {OFFSETS}")


def check_bytes(name: str, x: Shaped) -> None:
    """Raise `ValueError` for an array whose offsets exceed 32 bits."""
    if (size := math.prod(x.shape) * x.dtype.itemsize) > 2**31:
        raise ValueError(f"{name} has {size} bytes: must be at most 2^31: Triton has 32-bit offsets")


def in_pages(table_ref: Any, b: Array, slot: Array, pool: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Look up a sequence's slots in a pool [P, K, page size, …] through the block table int32 [B, pages].

    A slot past all pages is looked up in the last page.

    Returns:
      The page of each slot, the slot within it, and whether the page is valid.
    """
    pages, _, page, *_ = pool
    lead = plt.load(table_ref.at[b, jnp.clip(lax.div(slot, page), 0, table_ref.shape[1] - 1)])
    return lead, lax.rem(slot, page), (lead >= 0) & (lead < pages)


def pieces(C: int) -> list[tuple[int, int]]:
    """Return begins and widths of parts of C coordinates, the largest first.

    Widths are powers of two, as Triton requires.
    """
    widths = [1 << i for i in reversed(range(C.bit_length())) if C >> i & 1]
    return list(zip(itertools.accumulate(widths, initial=0), widths, strict=False))


def byte_places(C: int, begin: int, width: int, bits: int) -> Iterator[tuple[int, int, int]]:
    """Yield where `width` of C levels are stored from `begin` on.

    Yields bits, first byte and number of bytes for each bit plane. The first level of a byte is in its lowest
    bits.
    """
    place = 0
    for plane in bit_planes(bits):
        each = 8 // plane
        yield plane, place + begin // each, width // each
        place += C // each
