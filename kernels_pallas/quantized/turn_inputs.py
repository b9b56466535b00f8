"""Arguments and results of `turn_and_store`, and their checks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from kernels_pallas import common
from kernels_pallas.common import Shaped
from kernels_pallas.quantized.inputs import Plane
from kernels_pallas.quantized.queries import columns_of
from kernels_pallas.rope.score_blocks import MeanTurns, check_count, check_turns
from kernels_pallas.triton import check_addressed, check_back_end, check_bytes, check_planes

HEADS = (32, 64, 128, 256)
"""Allowed head dimensions: their halves are powers of two, as Triton requires."""


class Turning(NamedTuple):
    """Rotary embedding and basis of new queries and keys.

    Attributes:
      cos: cosines of the rotary angles, [B, H/2] float32.
      sin: sines of the rotary angles, [B, H/2] float32.
      q: basis of queries, [K, H, H], as in `post_rope`.
      k: basis of keys, [K, H, H].
    """

    cos: Array
    sin: Array
    q: Array
    k: Array


class Stored(NamedTuple):
    """Cache of keys, or of values; or references to its arrays in the kernel.

    Attributes:
      planes: planes of the store, for the first coordinates one after another.
      ring: ring of near tokens, [B, K, M, all coordinates], in 16 bits or in one plane of integers. It may
        have more sequences than there are tokens, whose rings are left as they are.
    """

    planes: Sequence[Plane]
    ring: Any

    @property
    def width(self) -> int:
        """Number of coordinates of the store."""
        return sum(plane.width for plane in self.planes)

    @property
    def programs(self) -> int:
        """Number of programs that write: one for each plane of the store, and one for the ring."""
        return len(self.planes) + 1


class TurnedQueries(NamedTuple):
    """Queries after rotary embedding and basis.

    Attributes:
      plain: queries, [B, N, H].
      far: queries arranged by KV head (`arrange_queries`) for the store, [B, K, columns, coordinates].
      near: queries arranged for the ring; None if the ring has 16 bits.
      gains: what the scores of each block of 64 positions gain, arranged as by `arrange_gains`; None without
        `means`. Blocks after a token have any values.
    """

    plain: Any
    far: Any
    near: Any = None
    gains: Any = None


def join_heads(
    q: Float[Array, "*B N H"], k: Float[Array, "*B K H"], v: Float[Array, "*B K Hv"]
) -> list[Array]:
    """Return the heads of new tokens as `turn_and_store` reads them: in one array if all are equally wide.

    XLA copies its products into that array once. Duplicate a single token before them: a vector product would
    be summed within the concatenation, slowly, one element per thread.
    """
    return [jnp.concatenate([q, k, v], axis=-2)] if q.shape[-1] == v.shape[-1] else [q, k, v]


def check_turn_and_store(
    heads: Sequence[Shaped],
    turning: Turning,
    k_stored: Stored,
    v_stored: Stored,
    starts: Shaped,
    ends: Shaped,
    *,
    sinks: int,
    window: int,
    block_table: Shaped | None = None,
    first_ring: Shaped | None = None,
    means: MeanTurns | None = None,
) -> None:
    """Check the arguments of `turn_and_store`; errors are those it documents."""
    check_back_end()
    K, H = turning.k.shape[:2]
    k, Hv = _check_heads(heads, K, H)
    B, N = k.shape[0], max(0, heads[0].shape[1] - (2 * K if len(heads) == 1 else 0))
    for name in ("cos", "sin"):
        common.check_shape(f"turning.{name}", getattr(turning, name), (B, H // 2), "B, H/2")
    for name in ("q", "k"):
        basis = getattr(turning, name)
        common.check_shape(f"turning.{name}", basis, (K, H, H), "K, H, H")
        if basis.dtype not in (jnp.float16, k.dtype):
            raise ValueError(
                f"turning.{name} has dtype {basis.dtype}: must be float16 or {k.dtype}, as k has"
            )
    for name, stored in (("k_stored", k_stored), ("v_stored", v_stored)):
        if not stored.planes:
            raise ValueError(f"{name}.planes={stored.planes}: must be at least one")
    lead, _, slots = k_stored.planes[0].reach.shape
    if block_table is not None:
        common.check_table(block_table, B, k_stored.planes[0].reach, 1)
    common.check_sizes(B=B, N=N, S=slots)
    tokens = B if block_table is None else lead, K, slots
    for name, stored, width in (("k_stored", k_stored, H), ("v_stored", v_stored, Hv)):
        check_planes(f"{name}.planes", stored.planes, tokens)
        if stored.width > width:
            raise ValueError(f"{name}.planes take {stored.width} coordinates: must be at most {width}")
        _check_ring(f"{name}.ring", stored.ring, k, K=K, width=width, sinks=sinks, window=window)
    common.check_rows(B, starts=starts, ends=ends)
    if first_ring is not None:
        common.check_integers("first_ring", first_ring, (), "")
    if means is not None:
        common.check_shape("means.mean", means.mean, (K, H), "K, H")
        check_turns(means, H)
        check_count(B * K * columns_of(N // K), means.turns)


def _check_heads(heads: Sequence[Shaped], K: int, H: int) -> tuple[Shaped, int]:
    """Return an array with keys, and the width of values; raise `ValueError` for wrong heads."""
    if H not in HEADS:
        raise ValueError(f"turning.k has {H} coordinates: must be one of {HEADS}")
    if len(heads) == 1:
        (x,) = heads
        common.check_shape("heads[0]", x, (None, None, H), "B, N + 2K, H")
        common.check_dtypes(**{"heads[0]": x})
        common.check_groups(max(0, x.shape[1] - 2 * K), K)
        return x, H
    if len(heads) != 3:
        raise ValueError(f"heads has {len(heads)} arrays: must be 1, or 3 of queries, keys and values")
    q, k, v = heads
    common.check_shape("heads[0]", q, (None, None, H), "B, N, H")
    common.check_shape("heads[1]", k, (q.shape[0], K, H), "B, K, H")
    common.check_shape("heads[2]", v, (q.shape[0], K, None), "B, K, Hv")
    common.check_dtypes(**{f"heads[{i}]": x for i, x in enumerate(heads)})
    common.check_groups(q.shape[1], K)
    return k, v.shape[2]


def _check_ring(name: str, ring: Any, k: Shaped, *, K: int, width: int, sinks: int, window: int) -> None:
    """Raise `ValueError` for a ring that does not fit the sequences of k, and these coordinates and slots."""
    is_plane = isinstance(ring, Plane)
    count, _, slots, *_ = (ring.reach if is_plane else ring).shape
    if sinks < 0 or window < 0 or sinks + window > slots:
        raise ValueError(
            f"sinks={sinks}, window={window}: must be 0 to {slots} together, the slots of {name}"
        )
    tokens = max(k.shape[0], count), K, slots
    if is_plane:
        check_addressed(name, ring, tokens)
        if ring.width != width:
            raise ValueError(f"{name} has {ring.width} coordinates: must be {width}")
        return
    common.check_shape(name, ring, (*tokens, width), "B, K, M, coordinates")
    common.check_dtypes(k=k, **{name: ring})
    check_bytes(name, ring)
