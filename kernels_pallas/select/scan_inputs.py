"""Limits, launch configuration and argument checks of the scan of an index (`scan`)."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kernels_pallas import common
from kernels_pallas.common import Shaped
from kernels_pallas.quantized.inputs import MOST_HEADS, Plane, check_plane, plane_fits, rows_of

THREADS = 128
"""Threads of a CTA."""
BLOCKS = (128, 256, 512)
"""Tokens per step: each thread has one, two or four."""
SAMPLE_BLOCK, SAMPLE_EVERY = 128, 8
"""Tokens per block of the sample that determines denominators, and its stride in blocks."""
MOST_COORDINATES = 128
"""Largest number of coordinates of an index."""
INDEX_BITS = (2, 4, 8)
VECTOR = 16
"""Bytes per load of a thread."""
MOST_HELD = 128
"""Largest number of bytes of levels per thread and step; those of the next step are in flight as well."""


@dataclass(frozen=True)
class ScanConfig:
    """Launch configuration.

    Attributes:
      block: tokens per step, 128, 256 or 512.
      splits: parts of a sequence's tokens.
    """

    block: int = 512
    splits: int = 4

    def __post_init__(self) -> None:
        if self.splits < 1:
            raise ValueError(f"splits={self.splits}: must be at least 1")
        if self.block not in BLOCKS:
            raise ValueError(f"block={self.block}: must be one of {BLOCKS}")


def default_scan_config(rows: int, S: int, token_bytes: int, page: int = 0) -> ScanConfig:
    """Return the default config for B·K = `rows` caches of S tokens.

    A thread has 64 bytes of levels per step, unless a token has more. Parts of at least 1024 tokens give each
    multiprocessor four CTAs. Blocks divide S, and pages if there are any.
    """
    block = min(max(BLOCKS), max(THREADS, THREADS * 64 // token_bytes))
    return ScanConfig(
        block=math.gcd(S, page, 1 << block.bit_length() - 1),
        splits=max(1, min(4 * common.SMS // rows, S // 1024)),
    )


def in_sample(slots: Array, begin: Array) -> Array:
    """Return which slots from `begin` on determine denominators if query heads share a KV head.

    Of 8192 far tokens these are about 1024.
    """
    blocks = slots // SAMPLE_BLOCK - begin // SAMPLE_BLOCK
    return blocks % SAMPLE_EVERY == 0


def index_fits(width: int, bits: int) -> bool:
    """Return whether `index_scores` can read an index of `width` coordinates."""
    return (
        bits in INDEX_BITS
        and plane_fits(width, bits)
        and width <= MOST_COORDINATES
        and width * bits // 8 % VECTOR == 0
    )


def check_scan(
    q: Shaped,
    index: Plane,
    begin: Shaped,
    end: Shaped,
    *,
    block_table: Shaped | None = None,
    config: ScanConfig | None = None,
) -> None:
    """Check the arguments of `index_scores`; errors are those it documents."""
    common.check_device()
    if q.dtype != jnp.bfloat16:
        raise ValueError(f"q has dtype {q.dtype}: must be bfloat16")
    if index.reach.ndim != 3:
        raise ValueError(f"index.reach has shape {index.reach.shape}: must be [B, K, S]")
    lead, K, slots = index.reach.shape
    check_plane("index", index, (lead, K, slots))
    if not index_fits(index.width, index.bits):
        raise ValueError(
            f"index has {index.width} coordinates of {index.bits} bits: must be at most {MOST_COORDINATES}, "
            f"of one of {INDEX_BITS} bits, with a multiple of {VECTOR} bytes per token"
        )
    block, size = config.block if config else THREADS, index.levels.shape[-1]
    if block_table is not None:
        common.check_table(block_table, q.shape[0], index.reach, block)
    B, _, S = rows_of(index.reach, block_table)
    common.check_shape("q", q, (B, None, index.width), "B, N, C")
    common.check_sizes(B=B, N=q.shape[1], S=S)
    common.check_groups(q.shape[1], K, most=MOST_HEADS)
    common.check_caches(B, K)
    if S % block:
        raise ValueError(f"S={S} slots: must be a multiple of {block}")
    if (held := block // THREADS * size) > MOST_HELD:
        raise ValueError(
            f"block={block} tokens of {size} bytes: {held} bytes per thread, must be at most {MOST_HELD}"
        )
    common.check_rows(B, begin=begin, end=end)
