"""Orders of the work on unmasked blocks that keep tensor cores and exponentials busy at the same time.

Left alone, warpgroups fall into step: all compute scores, then all of them exponentials, and each unit waits
for the other. Two ways out, alone or together. In turns one warpgroup at a time computes exponentials, as
long as the others' products take. In FlashAttention-3's order (Shah et al., 2024) a warpgroup has the scores
of the next block and the values of this one multiplied while it computes exponentials.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from kernels_pallas.common import LOG2_E, filled, scaled
from kernels_pallas.prefill_inputs import ROWS

_FIRST_BARRIER = 8
"""Of the hardware's 16 named barriers those that hand on turns; the compiler's own have lower numbers."""
_SCALAR = plgpu.Layout.WG_SPLAT
_LANES = 8
"""Columns of a sum of which every thread holds its own part: two of each of its rows."""


def attend(c: Any, state: Any) -> Any:
    """All unmasked blocks, at least one, by consumer `c`, in the order its config says."""
    if c.config.lanes:
        l = lax.broadcast_in_dim(state.l / _LANES, (ROWS, _LANES), [0])
        state = state._replace(l=filled((ROWS, _LANES), 0, plgpu.Layout.WGMMA) + l)
    if c.config.turns:
        pl.when(c.wg == c.config.warpgroups - 1)(lambda: _hand_on(c, state.l))
    orders = {"": _in_turn, "fa3": _next_with_this, "fa3_shared": _next_with_this}
    state = orders[c.config.order](c, state)
    if c.config.turns:  # The one that was handed on last.

        @pl.when(c.wg == 0)
        def _() -> None:
            _take_turn(c, state.m)

    return state._replace(l=state.l.sum(axis=1)) if c.config.lanes else state


def _in_turn(c: Any, state: Any) -> Any:
    """Scores, exponentials, values, one after the other."""

    def step(i: Array, state: Any) -> Any:
        p, state, alpha = _weights(c, c._scores(i), state)
        return c._add_values(i, state._replace(acc=scaled(state.acc, alpha)), p.astype(c.dtype))

    return lax.fori_loop(0, c.item.plain, step, state)


def _next_with_this(c: Any, state: Any) -> Any:
    """FlashAttention-3's: products with the next keys and this block's values run during the softmax."""
    last, shared = c.item.plain - 1, c.config.order == "fa3_shared"
    p_ref = c.smem["p"].at[c.wg] if shared else None

    def wait_for_keys(i: Array) -> None:
        pl.when(i <= last)(lambda: plgpu.barrier_wait(c.smem["k_ready"].at[c._slot(i)]))

    def packed(p: Array) -> Array | None:
        if p_ref is None:
            return p.astype(c.dtype)
        p_ref[...] = p.astype(c.dtype)
        plgpu.commit_smem()
        return None

    def step(i: Array, carry: tuple[Any, Array | None]) -> tuple[Any, Array | None]:
        (state, p), slot, v_slot = carry, c._slot(i + 1), c._slot(i)

        def weights(scores: Array) -> Any:
            plgpu.barrier_arrive(c.smem["k_free"].at[slot])
            p, new, alpha = _weights(c, scores, state)
            # With the barrier and a wait behind it the compiler leaves the wait for the values where it is.
            p, m, l, alpha = lax.optimization_barrier((p, new.m, new.l, alpha))
            wait_for_keys(i + 2)
            return p, m, l, alpha

        (p, m, l, alpha), acc = _during_products(
            (c.smem["q"].at[c.wg], c.smem["k"].at[slot]),
            (state.acc, p_ref if p is None else p, c.smem["v"].at[v_slot]),
            lambda: plgpu.barrier_wait(c.smem["v_ready"].at[v_slot]),
            weights,
        )
        plgpu.barrier_arrive(c.smem["v_free"].at[v_slot])
        return state._replace(acc=scaled(acc, alpha), m=m, l=l), packed(p)

    p, state, alpha = _weights(c, c._scores(jnp.int32(0)), state)
    state = state._replace(acc=scaled(state.acc, alpha))
    wait_for_keys(jnp.int32(1))
    state, p = lax.fori_loop(0, last, step, (state, packed(p)))
    return c._add_values(last, state, p_ref if p is None else p)


def _during_products(
    keys: tuple[Any, Any],
    values: tuple[Array, Any, Any],
    ready: Callable[[], None],
    f: Callable[[Array], Any],
) -> tuple[Any, Array]:
    """f(q kᵀ) of q, k, and acc + p v of acc, p, v, once they are `ready`, computed at the same time."""
    (q, k), (acc, p, v) = keys, values

    def body(s_ref: Any, o_ref: Any) -> tuple[Any, Array]:
        o_ref[...] = acc
        plgpu.wgmma(s_ref, q, k.transpose((1, 0)))
        ready()
        plgpu.wgmma(o_ref, p, v)
        result = f(plgpu.wgmma_accumulator_load(s_ref, wait_n=1))
        return result, plgpu.wgmma_accumulator_load(o_ref, wait_n=0)

    scores, values_so_far = (plgpu.ACC((ROWS, n), jnp.float32) for n in (k.shape[0], acc.shape[1]))
    return pl.run_scoped(body, scores, values_so_far)


def _weights(c: Any, scores: Array, state: Any) -> tuple[Array, Any, Array]:
    """Weights of a block, maximum and sum with it, and the factor for the values so far, not yet applied.

    With turns it takes one, and hands it on when so many columns have their weights that the next warpgroup
    begins as this one ends.
    """
    factor = c.g.scale * LOG2_E
    m = jnp.maximum(state.m, scores.max(axis=1) * factor)
    m = _take_turn(c, m)
    p = jnp.exp2(scores * factor - lax.broadcast_in_dim(m, scores.shape, [0]))
    alpha = jnp.exp2(state.m - m)
    if not c.config.lanes:
        return p, state._replace(m=m, l=state.l * alpha + p.sum(axis=1)), alpha
    l = scaled(state.l, alpha)
    for column in range(0, p.shape[1], _LANES):
        l = l + lax.slice(p, (0, column), (ROWS, column + _LANES))
        if column + _LANES == c.config.turns:
            _hand_on(c, l)
    return p, state._replace(m=m, l=l), alpha


def _take_turn(c: Any, m: Array) -> Array:
    """`m`, once this warpgroup has its turn: what is computed of it is computed in that turn.

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

    return m + take(c.smem["lse"], m, c.wg, _nothing(c)) if c.config.turns else m


def _hand_on(c: Any, l: Array) -> None:
    """Gives the next warpgroup its turn once sums [ROWS, lanes] of this one's weights are known."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _SCALAR, _SCALAR))
    def hand_on(_: Any, l: Any, wg: Any, nothing: Any) -> None:
        barrier = _barrier(wg, l, nothing)
        utils.inline_ptx("bar.arrive $0, 256;", barrier, has_side_effects=True, convergent=True)

    if c.config.turns:
        hand_on(l, lax.rem(c.wg + 1, jnp.int32(c.config.warpgroups)), _nothing(c))


def _nothing(c: Any) -> Array:
    """0, of which the compiler does not know it."""
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
