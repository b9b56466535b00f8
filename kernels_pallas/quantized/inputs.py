"""Arguments of the kernels for quantized keys and values, and the checks of attention to them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import common
from kernels_pallas.common import Shaped
from kernels_pallas.quantized.byte_levels import BITS
from kernels_pallas.quantized.queries import columns_of
from kernels_pallas.quantized.warp_layout import Form
from kernels_pallas.tuning import measured

STEP = 128
"""Keys of a step."""
BLOCK = 64
"""Keys whose scores gain the same, and fewest that are copied together."""
CTAS = 4
"""CTAs that run on one multiprocessor at once."""
LEAST = 2
"""Fewest steps of a part where not all CTAs run at once: each prepares queries, and merges four warps."""
MOST_HEADS = 16
"""Largest number of query heads per KV head."""
BARRIERS = 1024
"""Bound of the shared memory of barriers, maxima and sums."""
MOST_SLOTS = 8192
"""Longest list of slots, which is kept in shared memory."""
MOST_ROWS = 2**31 - 1
"""Most slots of all KV heads of a pool, limited by the 32-bit entries of a list."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["levels", "reach"], meta_fields=["bits"])
@dataclass(frozen=True)
class Plane:
    """Quantized values of consecutive coordinates (`FittedIntegers`), or references to them in a kernel.

    Level l with scale r stands for (2l + 1 - 2^bits)·r/2^bits.
    Attention reads a scale of zero of keys as 2^-16.

    With a block table, int32 [B, pages per sequence], the arrays are a pool of pages [P, K, page size, ·].
    Slot j of sequence b is slot j % page size of page table[b, j // page size]; S counts all slots of a
    sequence. Entries of pages without valid slots may have any value.

    Attributes:
      levels: packed levels, uint8 [B, K, S, C·bits/8], in `bit_planes`.
      reach: scale of each token, uint8 [B, K, S] in e5m3 (`short_scales`).
      bits: bits per level.
    """

    levels: Any
    reach: Any
    bits: int

    @property
    def width(self) -> int:
        """Number of coordinates, C."""
        return self.levels.shape[-1] * 8 // self.bits


@dataclass(frozen=True)
class CodedConfig:
    """Launch configuration.

    Attributes:
      stages: steps of 128 keys in flight.
      splits: parts of the keys of one KV head of one sequence.
      least: steps of a part that has any; of few keys, the last parts have none.
    """

    stages: int = 2
    splits: int = 4
    least: int = 1

    def __post_init__(self) -> None:
        for name in ("stages", "splits", "least"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "keys", "values", "begin", "end", "slots", "block_table", "gains"],
    meta_fields=["config", "ring"],
)
@dataclass(frozen=True)
class CodedPass:
    """Quantized keys and values, and the queries that read them: slots begin ≤ j < end, and only these.

    Queries and gains may be arranged already (`kernels_pallas.quantized.queries`), [B, K, columns, R] and
    [B, K, blocks, columns].

    Attributes:
      q: queries [B, N, R], bfloat16, with as many coordinates as `keys` have together.
      keys: one or two planes of consecutive coordinates (an index, and the rest). Planes have levels of 2 to
        6 or 8 bits and a multiple of 16 coordinates, up to 256.
      values: one plane. Z is a multiple of 64, and so is S without `slots`.
      begin: first slot of each sequence, [B].
      end: end of the slots of each sequence, [B]; slots past S are ignored.
      slots: int32 list of slots to read, [B, K, n], if not all. Each counts as often as it is listed, if it
        is in range.
      block_table: table of a pool of pages (`Plane`). Without `slots`, pages have a multiple of 64 slots.
      gains: what scaled scores gain in each block of 64 slots, float32 [B, N, blocks].
      config: how keys are divided; None uses the measured or default config.
      ring: s sinks and a window w. Position p of the window is in slot p mod w, and sink p in slot w + p.
        The pass reads the sinks and the last w positions before `end`; `begin` is 0. Gains are those of
        positions, and reach up to `end`. A ring has a multiple of 8 slots, at least 64.
    """

    q: Any
    keys: Sequence[Plane]
    values: Plane
    begin: Any
    end: Any
    slots: Any = None
    block_table: Any = None
    gains: Any = None
    config: CodedConfig | None = None
    ring: tuple[int, int] | None = None

    @property
    def planes(self) -> list[Plane]:
        """Planes of keys, then of values."""
        return [*self.keys, self.values]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of sequences, KV heads, and slots: B, K and S."""
        return rows_of(self.values.reach, self.block_table)

    @property
    def columns(self) -> int:
        """Query heads per KV head, as the kernel arranges them."""
        return self.q.shape[2] if len(self.q.shape) == 4 else columns_of(self.q.shape[1] // self.sizes[1])


def config_for(coded_pass: CodedPass) -> CodedConfig:
    """Return the default number of parts, with the measured number of steps in flight for these widths.

    Entries of the table are keyed by coordinates and by the bytes of a token's levels, over all planes. There
    are fewer steps if shared memory is short, and one for a ring, of which most parts have one or two.
    """
    (B, K, S), planes, slots = coded_pass.sizes, coded_pass.planes, coded_pass.slots
    chosen = 0 if slots is None else slots.shape[2]
    default = default_config(B * K, S, chosen or (S if coded_pass.ring else 0))
    if coded_pass.ring is not None:
        return replace(default, stages=1)
    C, nbytes = sum(plane.width for plane in coded_pass.keys), sum(x.levels.shape[-1] for x in planes)
    found = measured("coded_decode", C=C, Z=coded_pass.values.width, bytes=nbytes, chosen=chosen)
    stages = found["stages"] if found else default.stages
    while stages > 1 and not chosen and shared_bytes(coded_pass, stages) > common.SHARED_MEMORY:
        stages -= 1
    return replace(default, stages=stages)


def shared_bytes(coded_pass: CodedPass, stages: int) -> int:
    """Return bytes of shared memory for queries, outputs, and `stages` steps of a whole store."""
    columns, planes = coded_pass.columns, coded_pass.planes
    form = Form(columns, tuple(x.width for x in planes), tuple(x.bits for x in planes), scale=1.0)
    step = STEP * sum(x.levels.shape[-1] for x in planes) + STEP // BLOCK * 128 * (len(planes) + 1)
    queries, outputs = 512 * form.query_rows, 16 * columns * planes[-1].width
    return stages * step + queries + outputs + BARRIERS


def default_config(rows: int, S: int, chosen: int = 0) -> CodedConfig:
    """Return parts of B·K = `rows` caches that give each multiprocessor four CTAs.

    A whole store has at least four parts if each then has at least 256 keys, and up to eight if they give a
    multiprocessor at most twelve CTAs: the last parts of the longest sequence would otherwise run alone. If
    they do not all run at once, parts have at least `LEAST` steps. A list of `chosen` slots has parts of
    about 128.
    """
    all_at_once = CTAS * common.SMS // rows
    if chosen:
        parts = min(all_at_once, -(-chosen // 128))
    else:
        parts = min(max(all_at_once, min(3 * CTAS * common.SMS // rows, 8), 4), S // 256)
    return CodedConfig(splits=max(1, parts), least=1 if parts <= all_at_once else LEAST)


def check_coded(coded_pass: CodedPass) -> None:
    """Check a pass of `coded_parts`; errors are those it documents."""
    q, slots, block_table = coded_pass.q, coded_pass.slots, coded_pass.block_table
    common.check_device()
    if q.dtype != jnp.bfloat16:
        raise ValueError(f"q has dtype {q.dtype}: must be bfloat16")
    if not 1 <= len(coded_pass.keys) <= 2:
        raise ValueError(f"keys has {len(coded_pass.keys)} planes: must be 1 or 2")
    is_whole, reach = slots is None and coded_pass.ring is None, coded_pass.values.reach
    multiple = BLOCK if is_whole else 1
    if block_table is not None:
        common.check_table(block_table, q.shape[0], reach, multiple)
    B, K, S = coded_pass.sizes
    _check_queries(q, B, K, sum(plane.width for plane in coded_pass.keys))
    common.check_sizes(B=B, N=q.shape[1], S=S)
    common.check_caches(B, K)
    if S % multiple:
        raise ValueError(f"S={S} slots: must be a multiple of {multiple}")
    for name, plane in (
        *((f"keys[{i}]", x) for i, x in enumerate(coded_pass.keys)),
        ("values", coded_pass.values),
    ):
        check_plane(name, plane, (reach.shape[0], K, reach.shape[2]))
    if coded_pass.ring is not None:
        _check_ring(coded_pass.ring, coded_pass)
    elif is_whole and (size := shared_bytes(coded_pass, 1)) > common.SHARED_MEMORY:
        raise ValueError(f"a step takes {size} bytes of shared memory: at most {common.SHARED_MEMORY} fit")
    if coded_pass.values.width % BLOCK:
        raise ValueError(f"values has {coded_pass.values.width} coordinates: must be a multiple of {BLOCK}")
    common.check_rows(B, begin=coded_pass.begin, end=coded_pass.end)
    if coded_pass.gains is not None:
        _check_gains(coded_pass, S // BLOCK if is_whole else None)
    if slots is None:
        return
    common.check_integers("slots", slots, (B, K, None), "B, K, n")
    if not 0 < slots.shape[2] <= MOST_SLOTS:
        raise ValueError(f"slots has {slots.shape[2]} per KV head: must be from 1 to {MOST_SLOTS}")
    if block_table is not None and reach.size > MOST_ROWS:
        raise ValueError(f"the pool has {reach.size} slots of KV heads: must be at most {MOST_ROWS}")


def _check_ring(ring: tuple[int, int], coded_pass: CodedPass) -> None:
    """Raise `ValueError` unless a pass can read its planes as a ring."""
    if coded_pass.slots is not None:
        raise ValueError(f"ring={ring} with slots: must be None")
    if (table := coded_pass.block_table) is not None and table.shape[1] != 1:
        raise ValueError(f"ring={ring} in {table.shape[1]} pages per sequence: must be 1")
    M, size = coded_pass.values.reach.shape[2], [plane.levels.shape[-1] for plane in coded_pass.planes]
    if min(ring) < 0 or sum(ring) > M or M < BLOCK or M % 8 or any(nbytes % 16 for nbytes in size):
        raise ValueError(
            f"ring={ring} in {M} slots: sinks and window must fit, in a multiple of 8 slots, at least "
            f"{BLOCK}, whose levels have a multiple of 16 bytes"
        )


def _check_queries(q: Shaped, B: int, K: int, R: int) -> None:
    """Raise `ValueError` unless `q` has the shape of queries, arranged or not."""
    if len(q.shape) == 4:
        common.check_shape("q", q, (B, K, None, R), "B, K, columns, R")
        if q.shape[2] not in (4, 8, MOST_HEADS):
            raise ValueError(f"q has {q.shape[2]} columns per KV head: must be 4, 8 or {MOST_HEADS}")
        return
    common.check_shape("q", q, (B, None, R), "B, N, R")
    common.check_groups(q.shape[1], K, most=MOST_HEADS)


def _check_gains(coded_pass: CodedPass, blocks: int | None) -> None:
    """Raise `ValueError` unless gains have the shape of gains, arranged or not; None allows any blocks."""
    q, gains, (B, K, _) = coded_pass.q, coded_pass.gains, coded_pass.sizes
    if len(gains.shape) == 4:
        common.check_shape("gains", gains, (B, K, blocks, coded_pass.columns), "B, K, blocks, columns")
    else:
        heads = q.shape[1] if len(q.shape) == 3 else None
        common.check_shape("gains", gains, (B, heads, blocks), "B, N, blocks")
    common.check_sizes(blocks=gains.shape[2])


def rows_of(reach: Shaped, block_table: Shaped | None) -> tuple[int, int, int]:
    """Return B, K and S of a plane's scales, or of the pages they are in."""
    lead, K, S = reach.shape
    return (lead, K, S) if block_table is None else (block_table.shape[0], K, block_table.shape[1] * S)


def plane_fits(width: int, bits: int) -> bool:
    """Return whether kernels can read planes of `width` coordinates."""
    return bits in BITS and width % 16 == 0 and 0 < width <= 256


def check_plane(name: str, plane: Plane, tokens: tuple[int, int, int]) -> None:
    """Raise `ValueError` unless kernels can read a plane of [B, K, S] `tokens`."""
    if plane.bits not in BITS:
        raise ValueError(f"{name}.bits={plane.bits}: must be one of {BITS}")
    common.check_shape(f"{name}.levels", plane.levels, (*tokens, None), "B, K, S, C·bits/8")
    common.check_shape(f"{name}.reach", plane.reach, tokens, "B, K, S")
    for part, x in (("levels", plane.levels), ("reach", plane.reach)):
        if x.dtype != jnp.uint8:
            raise ValueError(f"{name}.{part} has dtype {x.dtype}: must be uint8")
    if plane.width > 256 or plane.width % 16:
        raise ValueError(f"{name} has {plane.width} coordinates: must be a multiple of 16 up to 256")
