"""Operands of the prefill kernel in global memory, and its buffers and barriers in shared memory."""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from kernels_pallas.common import tile_width, tiled
from kernels_pallas.prefill.inputs import ROWS, PrefillConfig
from kernels_pallas.prefill.items import Geometry


class Pair(NamedTuple):
    """Keys and values, or one of both; absent ones are None."""

    k: Any = None
    v: Any = None


class Operands(NamedTuple):
    """Arrays of a launch, or references to them in the kernel; absent ones are None.

    Attributes:
      scalars: starts, lengths, bases and first needed positions, [B, 4].
      q: queries.
      far: keys and values; without far keys, near ones with all coordinates.
      near: trailing coordinates of near keys and values, or near keys and values in arrays of their own.
      sinks: like `near`, or like `far` without far keys, of the sinks.
      table: block table.
      gains: block scores, [B, N, blocks, T].
    """

    scalars: Any
    q: Any
    far: Pair
    near: Pair
    sinks: Pair
    table: Any
    gains: Any


class Ring(NamedTuple):
    """Slots that the producer fills and consumers read, in turn.

    Attributes:
      data: contents of the slots.
      free: barriers, on which consumers arrive once they have read a slot.
      ready: barriers, on which the copies into a slot arrive.
    """

    data: Any
    free: Any
    ready: Any


class Buffers(NamedTuple):
    """Shared memory of a CTA, allocated in this order; buffers of trailing coordinates may be None."""

    k: Ring
    k_tail: Any
    lse: Any
    o: Any
    o_tail: Any
    q: Any
    q_ready: Any
    q_tail: Any
    tail_free: Any
    tail_ready: Any
    v: Ring
    v_tail: Any

    @classmethod
    def of(cls, g: Geometry, config: PrefillConfig, dtype: Any) -> "Buffers":
        """Describe the buffers and barriers of a launch."""
        wgs, stages, block = config.warpgroups, config.stages, config.block_kv
        qk, vo = tile_width(g.R, g.H - g.R), tile_width(g.Z, g.HV - g.Z)
        tails = [width for width in (g.H - g.R, g.HV - g.Z) if width]

        def buffer(*shape: int, width: int) -> Any:
            return tiled(*shape, dtype=dtype, width=width) if shape[-1] else None

        def ring(data: Any) -> Ring:
            free = plgpu.Barrier(num_barriers=stages, num_arrivals=wgs)
            return Ring(data, free, ready=plgpu.Barrier(num_barriers=stages))

        return cls(
            k=ring(buffer(stages, block, g.R, width=qk)),
            k_tail=buffer(block, g.H - g.R, width=qk),
            lse=plgpu.SMEM((wgs, ROWS), jnp.float32),
            o=buffer(wgs, ROWS, g.Z, width=vo),
            o_tail=buffer(wgs, ROWS, g.HV - g.Z, width=vo),
            q=buffer(wgs, ROWS, g.R, width=qk),
            q_ready=plgpu.Barrier(num_barriers=wgs, num_arrivals=2 if g.H > g.R else 1),
            q_tail=buffer(wgs, ROWS, g.H - g.R, width=qk),
            tail_free=plgpu.Barrier(num_arrivals=wgs) if tails else None,
            tail_ready=plgpu.Barrier(num_arrivals=len(tails)) if tails else None,
            v=ring(buffer(stages, block, g.Z, width=vo)),
            v_tail=buffer(block, g.HV - g.Z, width=vo),
        )
