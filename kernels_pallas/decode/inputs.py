"""Arguments of the decode kernel other than q, k and v, its launch configuration, and its argument checks."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from jax import Array

from kernels_pallas import common
from kernels_pallas.common import GAIN_BLOCK, Shaped
from kernels_pallas.tuning import measured

ROWS = 64
"""Rows of the tensor-core tile; the query heads of one KV head are some of them."""


@dataclass(frozen=True)
class DecodeConfig:
    """Division of the keys of one KV head of one sequence.

    Attributes:
      block: keys per step, 64 or 128; window and page size are multiples of it.
      stages: blocks of far keys in flight.
      splits: parts of the far keys, or of all keys without a ring.
      near_splits: parts of window and sinks.
    """

    block: int = 64
    stages: int = 2
    splits: int = 4
    near_splits: int = 3

    def __post_init__(self) -> None:
        if self.block not in (64, 128):
            raise ValueError(f"block={self.block}: must be 64 or 128")
        for name in ("stages", "splits", "near_splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")


class Ring(NamedTuple):
    """Trailing coordinates of near keys and values.

    Position p ≥ sinks of the window is in row p mod window, sink p in row window + p. M ≥ window + sinks.

    Attributes:
      k: keys, [B, K, M, H-R].
      v: values, [B, K, M, H-Z].
    """

    k: Array
    v: Array


def config_for(rows: int, S: int, R: int, Z: int, H: int, *, window: int, page: int) -> DecodeConfig:
    """Return the default number of parts, with the measured block size for these widths on this device.

    Blocks divide `window` and `page`, where 0 means none.
    """
    default, found = default_config(rows, S, R, window), measured("decode", R=R, Z=Z, H=H)
    if found is None or math.gcd(window, page) % found["block"]:
        return default
    return replace(default, block=found["block"], stages=found["stages"])


def default_config(rows: int, S: int, R: int, window: int) -> DecodeConfig:
    """Return enough parts of `rows` = B·K caches to fill all multiprocessors, at least four blocks each.

    With two ranks, blocks of far keys are small, so more CTAs are needed to saturate memory. With only near
    keys (R = 0) a part may be a single block.
    """
    wanted = (12 if window else 2) * common.SMS // rows
    if not R:
        return DecodeConfig(near_splits=max(1, min(wanted, window // 64)))
    return DecodeConfig(splits=max(1, min(wanted, S // 256)))


def check_decode(
    q: Shaped,
    k: Shaped,
    v: Shaped,
    lengths: Shaped,
    *,
    ring: Ring | None = None,
    sinks: int = 0,
    window: int = 0,
    block_table: Shaped | None = None,
    block_scores: Shaped | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Check the arguments of `decode_parts`; errors are those it documents."""
    common.check_device()
    common.check_dtypes(q=q, k=k, v=v)
    common.check_shape("q", q, (None,) * 3, "B, N, H")
    B, N, H = q.shape
    common.check_sizes(B=B, N=N)
    common.check_shape("k", k, (None if block_table is not None else B, None, None, None), "B, K, S, R")
    leading, K, S, R = k.shape
    common.check_shape("v", v, (leading, K, S, None), "B, K, S, Z")
    common.check_rows(B, lengths=lengths)
    Z = v.shape[-1]
    # Copies begin at multiples of eight rows, so a group may begin in any of the tile's first eight rows.
    common.check_groups(N, K, most=ROWS - 8)
    common.check_caches(B, K)
    if ring is None or R or Z:
        common.check_rank("R", R)
        common.check_rank("Z", Z)
    if ring is not None:
        _check_ring(q, k, v, ring, sinks, window)
    elif H != R or sinks or window:
        raise ValueError(
            f"q has {H} coordinates with {sinks=}, {window=}: without a ring it must have R={R} and neither"
        )
    # If the smallest block divides window and pages, so does the block of the default config.
    block = DecodeConfig.block if config is None else config.block
    if window % block:
        raise ValueError(f"window={window}: must be a multiple of the block of {block} keys")
    if block_table is not None:
        common.check_table(block_table, B, k, block)
    elif R:
        common.check_sizes(S=S)
    if block_scores is not None:
        common.check_shape("block_scores", block_scores, (B, N, None), "B, N, blocks")
        if config is not None and config.block != GAIN_BLOCK:
            raise ValueError(f"block={config.block}: must be {GAIN_BLOCK} with block_scores")


def _check_ring(q: Shaped, k: Shaped, v: Shaped, ring: Ring, sinks: int, window: int) -> None:
    (B, K, R), Z, H = (q.shape[0], k.shape[1], k.shape[3]), v.shape[-1], q.shape[-1]
    if window < 64 or window % 64:
        raise ValueError(f"window={window}: must be a positive multiple of 64")
    if not 0 <= sinks <= 64:
        raise ValueError(f"sinks={sinks}: must be from 0 to 64")
    common.check_tails(H, R, Z)
    common.check_dtypes(q=q, **{"ring.k": ring.k, "ring.v": ring.v})
    common.check_shape("ring.k", ring.k, (B, K, None, H - R), "B, K, M, H - R")
    common.check_shape("ring.v", ring.v, (B, K, ring.k.shape[2], H - Z), "B, K, M, H - Z")
    if ring.k.shape[2] < window + sinks:
        raise ValueError(
            f"ring has {ring.k.shape[2]} rows: must be at least window + sinks = {window + sinks}"
        )
