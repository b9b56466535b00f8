"""Producer warpgroup of prefill: it streams blocks of keys and values through shared memory."""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.prefill.inputs import PrefillConfig
from kernels_pallas.prefill.items import Geometry, Item
from kernels_pallas.prefill.memory import Buffers, Operands, Pair


def load_keys(g: Geometry, config: PrefillConfig, smem: Buffers, item: Item, refs: Operands) -> None:
    """Run the producer: load blocks of keys and values into slots as these become free."""
    block, kv_head = config.block_kv, lax.div(item.head, jnp.int32(g.groups))
    sinks = refs.sinks if g.sinks else Pair()

    def start(source: Any, lead: Array, row: Any, to: Any, ready: Any) -> None:
        plgpu.copy_gmem_to_smem(source.at[lead, kv_head, pl.ds(row, block)], to, ready)

    def copy(
        at_sinks: Array, source: Any, of_sinks: Any, lead: Array, row: Array, to: Any, ready: Any
    ) -> None:
        """Copy rows of `source` from `row` on; at the sinks, the first rows of theirs, if any."""
        row = pl.multiple_of(row, 8)
        if of_sinks is None:
            start(source, lead, row, to, ready)
            return
        pl.when(at_sinks)(lambda: start(of_sinks, item.b, 0, to, ready))
        pl.when(jnp.logical_not(at_sinks))(lambda: start(source, lead, row, to, ready))

    def copy_far_or_near(
        step: Array, far: Any, near: Any, lead: Array, row: Array, within: Array, *to: Any
    ) -> None:
        """Copy a block of far keys or values, or of near ones from their own arrays."""
        is_near = item.is_near(step)
        pl.when(jnp.logical_not(is_near))(lambda: start(far, lead, pl.multiple_of(within, 8), *to))
        pl.when(is_near)(lambda: start(near, item.b, pl.multiple_of(row, 8), *to))

    @pl.loop(0, item.plain + item.mixed + item.inner)
    def _step(step: Array) -> None:
        slot, row = lax.rem(step, jnp.int32(config.stages)), item.block(g, step) * block
        at_sinks = item.at_sinks(step)
        lead, within = _place(g, refs, item, row)
        for ring, far, near, of_sinks in zip((smem.k, smem.v), refs.far, refs.near, sinks, strict=True):
            pl.when(step >= config.stages)(functools.partial(plgpu.barrier_wait, ring.free.at[slot]))
            to = ring.data.at[slot], ring.ready.at[slot]
            if g.keys == "both":
                copy_far_or_near(step, far, near, lead, row, within, *to)
            else:
                copy(at_sinks, far, of_sinks if g.keys == "near" else None, lead, within, *to)

        if g.two_ranks:

            @pl.when(step >= item.plain)
            def _() -> None:
                pl.when(step > item.plain)(functools.partial(plgpu.barrier_wait, smem.tail_free))
                for tail, near, of_sinks in zip((smem.k_tail, smem.v_tail), refs.near, sinks, strict=True):
                    if tail is not None:
                        copy(at_sinks, near, of_sinks, item.b, row - item.base, tail, smem.tail_ready)


def _place(g: Geometry, refs: Operands, item: Item, row: Array) -> tuple[Array, Array]:
    """Return the leading index of a row of keys, and its row there, through the block table if any."""
    if not g.page:
        return item.b, row
    page = jnp.int32(g.page)
    return refs.table[item.b, lax.div(row, page)], lax.rem(row, page)
