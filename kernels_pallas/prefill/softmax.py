"""Online softmax of prefill, whose maximum is raised only if weights would grow too large.

Flash attention rescales its accumulators in every block by the factor between old and new maximum, which is
nearly always 1. Here weights are relative to a maximum that may be too low by a factor of up to 2^8, as in
FlashAttention-4 (Dao, 2025). Ours is that a block within this slack needs no exchange between threads: each
checks its own scores, and a warp takes one vote.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from kernels_pallas.common import NEVER, filled, scaled
from kernels_pallas.prefill.inputs import ROWS

LANES = 8
"""Columns of a sum or maximum kept per thread: two in each of its rows."""
_SLACK = 8.0
"""Powers of two by which a score may exceed the maximum that its weight is relative to; float16 allows 16."""


type Gains = tuple[Array, ...]
"""Gains of base-2 scores in equal ranges of a block's columns, each [ROWS]; empty without gains."""


class State(NamedTuple):
    """Running result of 64 queries.

    Attributes:
      acc: weighted values.
      tail: weighted trailing coordinates of values, or None.
      m: maximum, in powers of two.
      l: sums of the weights by lane, [ROWS, LANES].
    """

    acc: Array
    tail: Array | None
    m: Array
    l: Array


def empty(width: int) -> State:
    """Return the state before any key, without trailing coordinates."""
    wide, column = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)

    def zeros(width):
        return filled((ROWS, width), 0, wide)

    return State(zeros(width), None, filled((ROWS,), NEVER, column), zeros(LANES))


def raised(state: State, scores: Array, factor: float, gains: Gains) -> State:
    """Return the state relative to a maximum that base-2 scores exceed by at most the slack.

    Base-2 scores are scores · factor, and what they gain.
    """
    highest = _highest(scores, factor, gains)
    over = highest - lax.broadcast_in_dim(state.m + _SLACK, highest.shape, [0])

    def raise_() -> State:
        m = jnp.maximum(state.m, highest.max(axis=1))
        alpha = jnp.exp2(state.m - m)
        tail = None if state.tail is None else scaled(state.tail, alpha)
        return State(scaled(state.acc, alpha), tail, m, scaled(state.l, alpha))

    return lax.cond(_any_positive(over), raise_, lambda: state)


def _highest(scores: Array, factor: float, gains: Gains) -> Array:
    """Return the largest base-2 score of each thread's columns, [ROWS, LANES]."""
    parts = lanes(scores)
    count = max(1, len(gains))
    width = len(parts) // count
    groups = [
        functools.reduce(jnp.maximum, parts[i * width : (i + 1) * width]) * factor for i in range(count)
    ]
    more = [lax.broadcast_in_dim(gain, groups[0].shape, [0]) for gain in gains]
    return functools.reduce(jnp.maximum, map(jnp.add, groups, more) if more else groups)


def weights(state: State, scores: Array, factor: float, gains: Gains) -> Array:
    """Return the weights of a block's keys in float32, relative to the state's maximum."""
    if not gains:
        return jnp.exp2(scores * factor - lax.broadcast_in_dim(state.m, scores.shape, [0]))
    rows, columns = scores.shape
    shape = rows, columns // len(gains)
    # The same registers for all columns of a gain: no column costs an instruction.
    lowered = [lax.broadcast_in_dim(state.m - gain, shape, [0]) for gain in gains]
    return jnp.exp2(scores * factor - lax.concatenate(lowered, 1))


def lanes(block: Array) -> list[Array]:
    """Split a block's columns into groups of LANES; each thread has the same number of each."""
    rows, columns = block.shape
    return [lax.slice(block, (0, i), (rows, i + LANES)) for i in range(0, columns, LANES)]


def _any_positive(x: Array) -> Array:
    """Return whether any value of a warp, 16 rows of x [ROWS, LANES], is positive; all its threads know."""
    out = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=out)
    def vote(_: Any, x: Any) -> Any:
        own = [vector.extract(pair, [], [i]) for pair in x.registers.flat for i in range(2)]
        highest = functools.reduce(arith.maximumf, own)
        found = utils.inline_ptx(
            "{.reg .pred p; setp.gt.f32 p, $1, 0f00000000; vote.sync.any.pred p, p, 0xffffffff;"
            " selp.u32 $0, 1, 0, p;}",
            highest,
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return vote(x) != 0
