"""Producer warpgroup of prefill: it streams blocks of keys and values through shared memory."""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.prefill.inputs import PrefillConfig
from kernels_pallas.prefill.items import Geometry, Item


class Rows(NamedTuple):
    """Lookup of key rows: a block table and lists of blocks, or None."""

    table: Any
    lists: Any

    def block(self, g: Geometry, item: Item, step: Array) -> Array:
        """Return the key block of a step."""
        if not g.listed:
            return item.block(g, step)
        at = item.b, lax.div(item.head, jnp.int32(g.groups)), lax.div(item.row, jnp.int32(g.listed))
        listed = self.lists[*at, jnp.minimum(step, self.lists.shape[-1] - 1)]
        return jnp.where(step < item.plain, listed, item.block(g, step))

    def in_pages(self, g: Geometry, item: Item, row: Array) -> tuple[Array, Array]:
        """Return the leading index of a row of keys, and its row there."""
        if not g.page:
            return item.b, row
        page = jnp.int32(g.page)
        return self.table[item.b, lax.div(row, page)], lax.rem(row, page)


def load_keys(
    g: Geometry,
    config: PrefillConfig,
    smem: Any,
    item: Item,
    sources: tuple[Any, Any],
    tails: Any,
    rows: Rows,
) -> None:
    """Run the producer: load blocks of keys and values into slots as these become free.

    `tails` are trailing coordinates of keys and values, or near keys and values, and then those of the sinks.
    """
    block, kv_head = config.block_kv, lax.div(item.head, jnp.int32(g.groups))
    buffers = [smem[name + "_tail"] for name in g.tails()]
    sinks = tails[len(buffers) :] if g.sinks and g.keys != "both" else [None, None]

    def copy(
        at_sinks: Array, sources: tuple[Any, Any], lead: Array, row: Array, destination: Any, ready: Any
    ) -> None:
        """Copy rows of the first source from `row` on; at the sinks, the first rows of the second, if any."""

        def start(source: Any, lead: Array, rows: Any) -> None:
            plgpu.copy_gmem_to_smem(source.at[lead, kv_head, rows], destination, ready)

        (source, of_sinks), rows = sources, pl.ds(pl.multiple_of(row, 8), block)
        if of_sinks is None:
            start(source, lead, rows)
            return
        pl.when(at_sinks)(lambda: start(of_sinks, item.b, pl.ds(0, block)))
        pl.when(jnp.logical_not(at_sinks))(lambda: start(source, lead, rows))

    def copy_far_or_near(
        step: Array, i: int, lead: Array, row: Array, within: Array, to: Any, ready: Any
    ) -> None:
        """Copy a block of far keys (i = 0) or values (1), or of near ones from their own arrays."""

        def start(source: Any, lead: Array, row: Any) -> None:
            plgpu.copy_gmem_to_smem(source.at[lead, kv_head, pl.ds(row, block)], to, ready)

        is_near = item.is_near(step)
        pl.when(jnp.logical_not(is_near))(lambda: start(sources[i], lead, pl.multiple_of(within, 8)))
        if g.sinks:
            at_sinks = item.is_at_own_sinks(step)
            pl.when(at_sinks)(lambda: start(tails[2 + i], item.b, 0))
            is_near = is_near & jnp.logical_not(at_sinks)
        pl.when(is_near)(lambda: start(tails[i], item.b, pl.multiple_of(row, 8)))

    @pl.loop(0, item.plain + item.mixed + item.inner)
    def _step(step: Array) -> None:
        slot, row = lax.rem(step, jnp.int32(config.stages)), rows.block(g, item, step) * block
        at_sinks = item.at_sinks(step)
        lead, within = rows.in_pages(g, item, row)
        for i, name in enumerate("kv"):

            @pl.when(step >= config.stages)
            def _(name: str = name) -> None:
                plgpu.barrier_wait(smem[name + "_free"].at[slot])

            to, ready = smem[name].at[slot], smem[name + "_ready"].at[slot]
            if g.keys == "both":
                copy_far_or_near(step, i, lead, row, within, to, ready)
            else:
                pair = sources[i], sinks[i] if g.keys == "near" else None
                copy(at_sinks, pair, lead, within, to, ready)

        if g.two_ranks:

            @pl.when(step >= item.plain)
            def _() -> None:
                @pl.when(step > item.plain)
                def _() -> None:
                    plgpu.barrier_wait(smem["tail_free"])

                for *pair, buffer in zip(tails, sinks, buffers, strict=False):
                    copy(at_sinks, tuple(pair), item.b, row - item.base, buffer, smem["tail_ready"])
