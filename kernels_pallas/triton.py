"""What kernels on Pallas' Triton back end share: what they refuse, and where they find bytes of planes."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.coded_inputs import Plane
from kernels_pallas.unpack import bit_planes

try:
    import jax.experimental.pallas.triton as plt
except ImportError:
    plt = None  # type: ignore[assignment]

OFFSETS = "must be at most 2^31, or above 2^32, where Triton takes offsets of 64 bits"


def check_back_end() -> None:
    """Raises `NotImplementedError` where JAX has no Triton back end."""
    if plt is None:
        raise NotImplementedError("this JAX has no Triton back end of Pallas")


def check_offsets(name: str, plane: Plane) -> None:
    """Raises `ValueError` for a plane whose bytes Triton would not find.

    Offsets have 32 bits up to 2^32 bytes, and a sign: arrays of two bytes a number end where that is reached.
    """
    for part, x in (("levels", plane.levels), ("reach", plane.reach)):
        if 2**31 < (size := math.prod(x.shape)) <= 2**32:
            raise ValueError(f"{name}.{part} has {size} bytes: {OFFSETS}")


def in_pages(table_ref: Any, b: Array, slot: Array, pool: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Page of a row's slot in a pool [P, K, page size, …], its slot there, and whether there is such a page.

    table_ref: int32 [B, pages]. A slot past all pages is taken for one of the last.
    """
    pages, _, page, *_ = pool
    lead = table_ref[b, jnp.clip(lax.div(slot, page), 0, table_ref.shape[1] - 1)]
    return lead, lax.rem(slot, page), (lead >= 0) & (lead < pages)


def pieces(C: int) -> list[tuple[int, int]]:
    """Begins and widths of parts of C coordinates: powers of two, as Triton wants, the largest first."""
    widths = [1 << i for i in reversed(range(C.bit_length())) if C >> i & 1]
    return list(zip(itertools.accumulate(widths, initial=0), widths, strict=False))


def byte_places(C: int, begin: int, width: int, bits: int) -> Iterator[tuple[int, int, int]]:
    """Where `width` of C levels lie from `begin` on: of each bit plane its bits, and the place and number of
    its bytes. The first level of a byte is lowest."""
    place = 0
    for plane in bit_planes(bits):
        each = 8 // plane
        yield plane, place + begin // each, width // each
        place += C // each
