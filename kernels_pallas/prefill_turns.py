"""Unmasked blocks of prefill, whose exponentials one warpgroup at a time computes.

Left alone, warpgroups fall into step: all compute scores, then all of them exponentials, and each unit waits
for the other. In turns the exponentials of one lie beside the products of the others. A turn is handed on by
the hardware's named barriers, shortly before its last exponentials, so that the next one begins as it ends.
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

from kernels_pallas.common import LOG2_E
from kernels_pallas.prefill_softmax import LANES, State, lanes, raised, weights

_FIRST_BARRIER = 8
"""Of the hardware's 16 named barriers those that hand on turns; the compiler's own have lower numbers."""
_SCALAR = plgpu.Layout.WG_SPLAT


def attend(c: Any, state: State) -> State:
    """All unmasked blocks, at least one and the first of all, by consumer `c`.

    All warpgroups of the CTA call it, for as many blocks: each turn that is handed on is taken.
    """
    pl.when(c.wg == c.config.warpgroups - 1)(lambda: _hand_on(c, state.l))
    state = lax.fori_loop(0, c.item.plain, functools.partial(_step, c), state)

    @pl.when(c.wg == 0)  # Takes the turn that was handed on last.
    def _() -> None:
        _take_turn(c, state.m)

    return state


def _step(c: Any, step: Array, state: State) -> State:
    """Adds one block to the state; the maximum is raised, where it must be, before the turn."""
    scores, factor = c._scores(step), c.g.scale * LOG2_E
    state = raised(state, scores, factor)
    state = state._replace(m=_take_turn(c, state.m))
    p, l = weights(state, scores, factor), state.l
    for i, part in enumerate(lanes(p), 1):
        l = l + part
        if i * LANES == c.config.turns:
            _hand_on(c, l)
    return c._add_values(step, state._replace(l=l), p.astype(c.dtype))


def _take_turn(c: Any, m: Array) -> Array:
    """Maxima `m` [ROWS], once this warpgroup has its turn: what is computed of them is computed in it.

    ptxas moves arithmetic over barriers. Data hold it: the barrier's number depends on `m`, and the result on
    a load that stays behind the barrier.
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

    return m + take(c.smem["lse"], m, c.wg, _nothing(c))


def _hand_on(c: Any, l: Array) -> None:
    """Gives the next warpgroup its turn once sums [ROWS, lanes] of this one's weights are known."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _SCALAR, _SCALAR))
    def hand_on(_: Any, l: Any, wg: Any, nothing: Any) -> None:
        barrier = _barrier(wg, l, nothing)
        utils.inline_ptx("bar.arrive $0, 256;", barrier, has_side_effects=True, convergent=True)

    hand_on(l, lax.rem(c.wg + 1, jnp.int32(c.config.warpgroups)), _nothing(c))


def _nothing(c: Any) -> Array:
    """0, of which the compiler does not know it: the sign of a length, which is not negative."""
    return lax.shift_right_arithmetic(c.item.length, jnp.int32(31))


def _barrier(wg: Any, after: Any, nothing: Any) -> Any:
    """The named barrier of a warpgroup, not known before `after` is."""
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
