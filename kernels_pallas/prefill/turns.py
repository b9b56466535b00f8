"""Unmasked blocks of prefill with turns: one warpgroup at a time computes exponentials.

    wg 0:  S = Q Kᵀ | exponentials (turn) | O += P V | ...
    wg 1:  ...      | S = Q Kᵀ            | exponentials (turn) | ...

Without turns, warpgroups synchronize by themselves: all compute scores, then all exponentials, and each unit
waits for the other. With turns the exponentials of one overlap the products of the others (ping-pong
scheduling). Named hardware barriers pass a turn on shortly before its last exponentials, so that the next
turn begins as it ends.
"""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from kernels_pallas.prefill.softmax import LANES, Gains, State, lanes, raised, weights

_FIRST_BARRIER = 8
"""First of the hardware's 16 named barriers used for turns; the compiler uses lower numbers."""
_SCALAR = plgpu.Layout.WG_SPLAT


def attend(c: Any, carry: tuple[State, Gains]) -> State:
    """Add all unmasked blocks, at least one, with consumer `c`; they must come first.

    All warpgroups of the CTA call this function for the same number of blocks: each turn passed on is taken.
    `carry` has the gains of the first block.
    """
    pl.when(c.wg == c.config.warpgroups - 1)(lambda: _hand_on(c, carry[0].l))
    state = lax.fori_loop(0, c.item.plain, functools.partial(_step, c), carry)[0]

    @pl.when(c.wg == 0)  # Takes the turn that was passed on last.
    def _() -> None:
        _take_turn(c, state.m)

    return state


def _step(c: Any, step: Array, carry: tuple[State, Gains]) -> tuple[State, Gains]:
    """Add one block to the state; the maximum is raised, if necessary, before the turn."""
    (state, gains), ahead = carry, c.plain_gains(step + 1)
    scores, factor = c.scores(step), c.factor
    state = raised(state, scores, factor, gains)
    state = state._replace(m=_take_turn(c, state.m))
    p, l = weights(state, scores, factor, gains), state.l
    for i, part in enumerate(lanes(p), 1):
        l = l + part
        if i * LANES == c.config.turns:
            _hand_on(c, l)
    return c.add_values(step, state._replace(l=l), p.astype(c.dtype)), ahead


def _take_turn(c: Any, m: Array) -> Array:
    """Return the maxima `m` [ROWS] once this warpgroup has its turn; results that use them belong to it.

    ptxas moves arithmetic across barriers. Data dependencies prevent that: the barrier's number depends on
    `m`, and the result on a load that stays after the barrier.
    """
    column = plgpu.Layout.WGMMA.reduce(1)
    out = plgpu.ShapeDtypeStruct((), jnp.float32, layout=_SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), column, _SCALAR, _SCALAR), return_type=out)
    def take(_: Any, any_ref: Any, m: Any, wg: Any, nothing: Any) -> Any:
        utils.inline_ptx(
            "bar.sync $0, 256;", _barrier(wg, m, nothing), has_side_effects=True, convergent=True
        )
        loaded = utils.inline_ptx(
            "ld.volatile.shared.u32 $0, [$1];",
            utils.memref_ptr(any_ref),
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        zero = utils.bitcast(arith.andi(loaded, _value(nothing)), ir.F32Type.get())
        return mgpu.FragmentedArray.splat(zero, (), is_signed=None)

    return m + take(c.smem.lse, m, c.wg, _nothing(c))


def _hand_on(c: Any, l: Array) -> None:
    """Pass the turn to the next warpgroup once the sums [ROWS, lanes] of this one's weights are known."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _SCALAR, _SCALAR))
    def hand_on(_: Any, l: Any, wg: Any, nothing: Any) -> None:
        barrier = _barrier(wg, l, nothing)
        utils.inline_ptx("bar.arrive $0, 256;", barrier, has_side_effects=True, convergent=True)

    hand_on(l, lax.rem(c.wg + 1, jnp.int32(c.config.warpgroups)), _nothing(c))


def _nothing(c: Any) -> Array:
    """Return a 0 that the compiler does not know: the sign of a length, which is not negative."""
    return lax.shift_right_arithmetic(c.item.length, jnp.int32(31))


def _barrier(wg: Any, after: Any, nothing: Any) -> Any:
    """Return the named barrier of a warpgroup, in a way that depends on `after`."""
    i32 = ir.IntegerType.get_signless(32)
    parts = []
    for register in after.registers.flat:
        length = utils.bitwidth(register.type) // 32
        words = utils.bitcast(register, ir.VectorType.get((length,), i32))
        parts += [vector.extract(words, [], [i]) for i in range(length)]
    zero = arith.andi(functools.reduce(arith.ori, parts), _value(nothing))
    return arith.addi(arith.addi(_value(wg), utils.c(_FIRST_BARRIER, i32)), zero)


def _value(scalar: Any) -> Any:
    return scalar.registers.flat[0]
