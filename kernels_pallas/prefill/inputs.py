"""Arguments of the prefill kernel other than q, k and v, and its argument checks."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from kernels_pallas import common
from kernels_pallas.common import GAIN_BLOCK, Shaped

ROWS = 64
"""Query rows of one warpgroup, as many as one tensor-core instruction takes."""
SMALLEST_BLOCK = 64
"""Smallest number of keys per step; page sizes are multiples of it."""
LARGEST_BLOCK = 256
"""Largest number of keys per step; reads past the last valid key end at a multiple of it."""
BLOCKS = (SMALLEST_BLOCK, 128, LARGEST_BLOCK)
"""Allowed numbers of keys per step."""
TAIL_ALIGNMENT = LARGEST_BLOCK
"""Alignment of `Trailing.start`, so that key blocks of every size begin at a row of the tail."""

NEAR_WINDOW = 512
"""Largest window of near keys next to far keys: all blocks of these near keys are masked."""
MOST_SINKS = 64
"""Most sinks of near keys, which one part of a masked block holds."""

Keys = Literal["all", "far"]


@dataclass(frozen=True)
class PrefillConfig:
    """Tile sizes of one launch. Where a config is optional, None means `config_for` the widths.

    Attributes:
      block_kv: keys per step, 64, 128 or 256.
      stages: blocks of keys in flight.
      warpgroups: query tiles of 64 rows that share the blocks.
      overlap: whether scores of the next block are computed during the softmax of the current one, which
        needs registers.
      turns: columns after which a warpgroup passes its turn on, a multiple of 8 up to block_kv; 0 without
        turns. In turns, one warpgroup at a time computes exponentials of unmasked blocks.
    """

    block_kv: int = 128
    stages: int = 2
    warpgroups: int = 3
    overlap: bool = False
    turns: int = 0

    def __post_init__(self) -> None:
        if self.block_kv not in BLOCKS:
            raise ValueError(f"block_kv={self.block_kv}: must be 64, 128 or 256")
        if self.stages < 1:
            raise ValueError(f"stages={self.stages}: must be at least 1")
        if self.overlap and self.stages < 2:
            raise ValueError(f"stages={self.stages}: overlap needs at least 2")
        if self.warpgroups not in (1, 2, 3):
            raise ValueError(f"warpgroups={self.warpgroups}: must be 1, 2 or 3")
        if self.turns not in range(0, self.block_kv + 1, 8):
            raise ValueError(
                f"turns={self.turns}: must be a multiple of 8 up to {self.block_kv} keys per step"
            )
        if self.turns and (self.overlap or self.warpgroups < 2):
            raise ValueError(f"turns={self.turns}: needs at least 2 warpgroups, and no overlap")

    def shared_memory(self, widths: "Widths") -> int:
        """Return the bytes of 16-bit buffers, barriers, log-sum-exp and scratch."""
        keys = self.stages * (widths.R + widths.Z) + widths.H - widths.R + widths.HV - widths.Z
        return 2 * (self.warpgroups * ROWS * (widths.H + widths.HV) + self.block_kv * keys) + 2048

    def fits(self, widths: "Widths") -> bool:
        """Return whether the tile fits a multiprocessor's shared memory and a thread's registers.

        With three warpgroups a thread has 128 registers. Half of HV and of block_kv are those of its outputs
        and scores. Beyond 128 in total ptxas spills, and with 208 values per query it fails.
        """
        registers = self.warpgroups < 3 or widths.HV + self.block_kv <= 256
        return registers and self.shared_memory(widths) <= common.SHARED_MEMORY


class Widths(NamedTuple):
    """Truncated and full widths: R of H query/key coordinates, Z of HV value coordinates."""

    R: int
    Z: int
    H: int
    HV: int


class Trailing(NamedTuple):
    """Trailing coordinates of near keys and values.

    Row i is position start + i; rows must cover the window of every query. With far keys, `start` is a
    multiple of `TAIL_ALIGNMENT` (not checked), and rows of positions below `sinks` must have their
    coordinates. Without far keys (R = Z = 0), `start` is any position; rows at positions below 0 or `sinks`
    are ignored.

    Attributes:
      k: keys, [B, K, M, H-R].
      v: values, [B, K, M, H-Z].
      start: position of the first row, [B] int32.
      sink_k: keys of positions 0 … sinks-1, [B, K, P, H-R] with P ≥ sinks; None without sinks.
      sink_v: values of the same positions, [B, K, P, H-Z].
    """

    k: Array
    v: Array
    start: Array
    sink_k: Array | None = None
    sink_v: Array | None = None


def rows_before(window: int) -> int:
    """Return the rows of a `Trailing` that may be before a chunk whose queries have this window."""
    return -(-window // TAIL_ALIGNMENT) * TAIL_ALIGNMENT + TAIL_ALIGNMENT


def first_near_row(starts: Array, window: int) -> Array:
    """Return `Trailing.start` for chunks that begin at the positions `starts`, [B] int32."""
    return jnp.maximum(starts - window + 1, 0) // TAIL_ALIGNMENT * TAIL_ALIGNMENT


def check_prefill(
    q: Shaped,
    k: Shaped,
    v: Shaped,
    *,
    starts: Shaped | None = None,
    lengths: Shaped | None = None,
    needed_from: Shaped | None = None,
    trailing: Trailing | None = None,
    sinks: int = 0,
    window: int = 0,
    keys: Keys = "all",
    block_table: Shaped | None = None,
    near: "Trailing | None" = None,
    block_scores: Shaped | None = None,
    config: PrefillConfig | None = None,
) -> None:
    """Check the arguments of `prefill_attention`; errors are those it documents."""
    common.check_device()
    common.check_dtypes(q=q, k=k, v=v)
    common.check_shape("q", q, (None,) * 4, "B, T, N, H")
    B, T, N, H = q.shape
    common.check_sizes(B=B, T=T, N=N)
    common.check_shape("k", k, (None if block_table is not None else B, None, None, None), "B, K, S, R")
    lead, K, S, R = k.shape
    common.check_shape("v", v, (lead, K, S, None), "B, K, S, Z")
    Z = v.shape[-1]
    common.check_groups(N, K)
    if trailing is None or R or Z:
        common.check_rank("R", R)
        common.check_rank("Z", Z)
    if H < R:
        raise ValueError(f"q has {H} coordinates: must be at least those of k, R={R}")
    if keys not in ("all", "far"):
        raise ValueError(f"keys={keys!r}: must be 'all' or 'far'")
    if sinks < 0 or window < 0:
        raise ValueError(f"sinks={sinks}, window={window}: must not be negative")
    common.check_rows(B, starts=starts, lengths=lengths, needed_from=needed_from)
    if trailing is not None:
        _check_trailing(q, k, v, trailing, sinks, window, keys)
    if near is not None:
        _check_near(q, k, v, near, sinks, window, keys)
    if block_table is not None:
        common.check_table(block_table, B, k, SMALLEST_BLOCK if config is None else config.block_kv)
    elif R:
        common.check_sizes(S=S)
    if block_scores is not None:
        common.check_shape("block_scores", block_scores, (B, T, N, None), "B, T, N, blocks")
        if config is not None and config.block_kv > 2 * GAIN_BLOCK:
            raise ValueError(f"block_kv={config.block_kv}: must be at most 128 with block_scores")


def _check_trailing(
    q: Shaped, k: Shaped, v: Shaped, trailing: Trailing, sinks: int, window: int, keys: Keys
) -> None:
    B, K, (R, Z, H) = q.shape[0], k.shape[1], (x.shape[-1] for x in (k, v, q))
    if keys != "all" or not window:
        raise ValueError(f"trailing: needs keys='all' and a window, not keys={keys!r}, window={window}")
    if sinks > MOST_SINKS:
        raise ValueError(f"sinks={sinks}: must be at most {MOST_SINKS}")
    common.check_tails(H, R, Z)
    common.check_dtypes(q=q, **{"trailing.k": trailing.k, "trailing.v": trailing.v})
    common.check_shape("trailing.k", trailing.k, (B, K, None, H - R), "B, K, M, H - R")
    common.check_shape("trailing.v", trailing.v, (B, K, trailing.k.shape[2], H - Z), "B, K, M, H - Z")
    common.check_sizes(M=trailing.k.shape[2])
    common.check_integers("trailing.start", trailing.start, (B,), "B")
    if not sinks:
        return
    for name, x, width in (("sink_k", trailing.sink_k, H - R), ("sink_v", trailing.sink_v, H - Z)):
        if x is None:
            raise ValueError(f"sinks={sinks}: need trailing.{name}, not None")
        common.check_dtypes(q=q, **{f"trailing.{name}": x})
        common.check_shape(f"trailing.{name}", x, (B, K, None, width), "B, K, P, trailing coordinates")
        if x.shape[2] < sinks:
            raise ValueError(f"trailing.{name} has {x.shape[2]} rows: needs at least sinks={sinks}")


def _check_near(q: Shaped, k: Shaped, v: Shaped, near: Trailing, sinks: int, window: int, keys: Keys) -> None:
    """Check near keys and values from arrays of their own."""
    B, K, R, Z = q.shape[0], k.shape[1], k.shape[-1], v.shape[-1]
    if keys != "far" or not 0 < window <= NEAR_WINDOW:
        raise ValueError(
            f"near: needs keys='far' and a window of 1 to {NEAR_WINDOW}, not keys={keys!r}, window={window}"
        )
    if sinks or near.sink_k is not None or near.sink_v is not None:
        raise ValueError(
            f"{sinks=}: must be 0 with near, without near.sink_k; k and v have the sinks' near values"
        )
    for name, x, width in (("k", near.k, R), ("v", near.v, Z)):
        common.check_dtypes(q=q, **{f"near.{name}": x})
        common.check_shape(f"near.{name}", x, (B, K, None, width), "B, K, M, coordinates")
    if near.k.shape[2] != near.v.shape[2]:
        raise ValueError(f"near.v has {near.v.shape[2]} rows: must have as many as near.k, {near.k.shape[2]}")
    common.check_integers("near.start", near.start, (B,), "B")
