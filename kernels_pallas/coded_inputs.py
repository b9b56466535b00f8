"""What the kernels of coded keys and values take, and the refusals of attention before launch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from kernels_pallas import common
from kernels_pallas.common import Shaped
from kernels_pallas.tuning import measured
from kernels_pallas.unpack import BITS

BLOCK = 64
"""Keys a step: rows of one tensor-core product."""
MOST_HEADS = 16
"""Query heads of a KV head."""
MOST_SLOTS = 8192
"""Of a list, which is in shared memory."""
MOST_ROWS = 2**31 - 1
"""Slots of all KV heads of a pool, which a list has numbers for."""


class Plane(NamedTuple):
    """Integers of consecutive coordinates (`FittedIntegers`): levels uint8 [B, K, S, C·bits/8] in
    `bit_planes`, reach uint8 [B, K, S] in e5m3. Level l of reach r is (2l + 1 - 2^bits)·r/2^bits.

    With a block table, int32 [B, pages of a row], they are a pool of pages [P, K, page size, ·]. Slot j of
    row b is slot j % page size of page table[b, j // page size]; S are all slots of a row. Entries of pages
    without slots that count, as of those that a row does not have yet, may be any numbers.
    """

    levels: Array
    reach: Array
    bits: int

    @property
    def width(self) -> int:
        """C."""
        return self.levels.shape[-1] * 8 // self.bits


@dataclass(frozen=True)
class CodedConfig:
    """stages: blocks of keys in flight. splits: parts of the keys of one KV head of one row."""

    stages: int = 2
    splits: int = 4

    def __post_init__(self) -> None:
        for name in ("stages", "splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")


def config_for(
    keys: Sequence[Plane], values: Plane, chosen: int = 0, block_table: Shaped | None = None
) -> CodedConfig:
    """The default parts, with as many blocks in flight as measured for these widths on this device (else as
    by default). Entries tell the coordinates and the bytes of a token's levels, in all planes."""
    B, K, S = rows_of(values.reach, block_table)
    default, nbytes = default_config(B * K, S, chosen), sum(x.levels.shape[-1] for x in (*keys, values))
    C = sum(plane.width for plane in keys)
    found = measured("coded_decode", C=C, Z=values.width, bytes=nbytes, chosen=chosen)
    return replace(default, stages=found["stages"]) if found else default


def default_config(rows: int, S: int, chosen: int = 0) -> CodedConfig:
    """Parts of B·K = `rows` caches for four CTAs on each multiprocessor.

    Of a whole store four or more, each of 512 keys or more; of a list of `chosen` slots of 128 or more.
    """
    all_at_once = 4 * common.SMS // rows
    parts = min(all_at_once, chosen // 128) if chosen else min(max(all_at_once, 4), S // 512)
    return CodedConfig(splits=max(1, parts))


def check_coded(
    q: Shaped,
    keys: Sequence[Plane],
    values: Plane,
    begin: Shaped,
    end: Shaped,
    *,
    slots: Shaped | None = None,
    block_table: Shaped | None = None,
    config: CodedConfig | None = None,
) -> None:
    """Raises what `coded_attention` says it raises; arrays and options are those given to it."""
    common.check_device()
    if q.dtype != jnp.bfloat16:
        raise ValueError(f"q has dtype {q.dtype}: must be bfloat16")
    if not 1 <= len(keys) <= 2:
        raise ValueError(f"keys has {len(keys)} planes: must be 1 or 2")
    multiple = BLOCK if slots is None else 1
    if block_table is not None:
        common.check_table(block_table, q.shape[0], values.reach, multiple)
    (lead, _, each), (B, K, S) = values.reach.shape, rows_of(values.reach, block_table)
    common.check_shape("q", q, (B, None, sum(plane.width for plane in keys)), "B, N, R")
    common.check_sizes(B=B, N=q.shape[1], S=S)
    common.check_groups(q.shape[1], K)
    common.check_caches(B, K)
    if q.shape[1] // K > MOST_HEADS:
        raise ValueError(f"q has {q.shape[1] // K} heads a KV head: must be at most {MOST_HEADS}")
    if S % multiple:
        raise ValueError(f"S={S} slots: must be a multiple of {multiple}")
    for name, plane in (*((f"keys[{i}]", plane) for i, plane in enumerate(keys)), ("values", values)):
        check_plane(name, plane, (lead, K, each))
    if values.width % BLOCK:
        raise ValueError(f"values has {values.width} coordinates: must be a multiple of {BLOCK}")
    for name, x in (("begin", begin), ("end", end)):
        common.check_integers(name, x, (B,), "B")
    if slots is None:
        return
    common.check_integers("slots", slots, (B, K, None), "B, K, n")
    if not 0 < slots.shape[2] <= MOST_SLOTS:
        raise ValueError(f"slots has {slots.shape[2]} of a KV head: must be 1 to {MOST_SLOTS}")
    if block_table is not None and values.reach.size > MOST_ROWS:
        raise ValueError(f"a pool of {values.reach.size} slots of KV heads: must be at most {MOST_ROWS}")


def rows_of(reach: Shaped, block_table: Shaped | None) -> tuple[int, int, int]:
    """B, K and S of rows in a plane of these reaches, or in pages of it."""
    lead, K, S = reach.shape
    return (lead, K, S) if block_table is None else (block_table.shape[0], K, block_table.shape[1] * S)


def plane_fits(width: int, bits: int) -> bool:
    """Whether kernels read planes of so many coordinates."""
    return bits in BITS and width % 16 == 0 and 0 < width <= 256


def check_plane(name: str, plane: Plane, tokens: tuple[int, int, int]) -> None:
    """Raises `ValueError` unless a plane of [B, K, S] `tokens` is one that kernels read."""
    if plane.bits not in BITS:
        raise ValueError(f"{name}.bits={plane.bits}: must be one of {BITS}")
    common.check_shape(f"{name}.levels", plane.levels, (*tokens, None), "B, K, S, C·bits/8")
    common.check_shape(f"{name}.reach", plane.reach, tokens, "B, K, S")
    for part, x in (("levels", plane.levels), ("reach", plane.reach)):
        if x.dtype != jnp.uint8:
            raise ValueError(f"{name}.{part} has dtype {x.dtype}: must be uint8")
    if plane.width > 256 or plane.width % 16:
        raise ValueError(f"{name} has {plane.width} coordinates: must be a multiple of 16 up to 256")
