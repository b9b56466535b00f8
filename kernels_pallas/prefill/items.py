"""Work of each CTA of prefill: queries of one head, and the blocks of keys that they see."""

from typing import Any, Literal, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.common import divide
from kernels_pallas.prefill.inputs import ROWS, PrefillConfig


class Geometry(NamedTuple):
    """Static shape of a launch.

    `page` is the tokens per page, 0 without a block table.
    """

    N: int
    groups: int
    R: int
    Z: int
    H: int
    HV: int
    tiles: int
    S: int
    page: int
    sinks: int
    window: int
    scale: float
    keys: Literal["all", "near", "far", "both"]
    two_ranks: bool
    together: int


class Item(NamedTuple):
    """Work of one CTA: queries at positions first … length - 1 of one head, and the blocks they see.

    Steps 0 … plain-1 take unmasked blocks from `begin` on. Then come `mixed` steps, whose keys have both
    ranks: block 0 for the sinks (if `sink_step`) and the blocks from `edge` on. The last `inner` steps
    continue from there; all their visible keys have the same rank.

    With near keys alone, all masked steps are inner: those of the sinks' own array, and of blocks from `edge`
    on, without the unmasked blocks between them. Row 0 of these blocks is at position `base`.

    With far and near keys from arrays of their own (`both`), there are no sinks. The last `near` of the inner
    steps are those of near keys, in blocks from `near_edge` on.
    """

    b: Array
    head: Array
    row: Array
    first: Array
    length: Array
    base: Array
    begin: Array
    plain: Array
    mixed: Array
    inner: Array
    edge: Array
    sink_step: Array
    near: Array | int = 0
    near_edge: Array | int = 0

    def block(self, g: Geometry, step: Array) -> Array:
        """Return the key block of a step."""
        masked = self.edge + step - self.plain - self.sink_step
        if g.keys == "near":  # Unmasked blocks lie between masked ones.
            masked = jnp.where(masked < self.begin, masked, masked + self.plain)
        block = jnp.where(self.at_sinks(step), 0, masked)
        block = jnp.where(step < self.plain, self.begin + step, block)
        if g.keys == "both":
            block = jnp.where(self.is_near(step), self.near_edge + step - self.far, block)
        return block

    @property
    def far(self) -> Array:
        """Number of steps before those of near keys with arrays of their own."""
        return self.plain + self.mixed + self.inner - self.near

    def is_near(self, step: Array) -> Array:
        """Return whether a step has near keys from an array of their own."""
        return step >= self.far

    def at_sinks(self, step: Array) -> Array:
        """Return whether a step is that of the sinks."""
        return (self.sink_step == 1) & (step == self.plain)


def item_of(g: Geometry, config: PrefillConfig, scalars: Any) -> Item:
    """Return this CTA's work: a few heads at a time, longest tiles first."""
    i32, rows = jnp.int32, config.warpgroups * ROWS
    cta = lax.axis_index("cta")
    per_group = i32(g.together * g.tiles)
    within = lax.rem(cta, per_group)
    tile = g.tiles - 1 - lax.div(within, i32(g.together))
    index = lax.div(cta, per_group) * g.together + lax.rem(within, i32(g.together))
    b, head = divide(index, g.N)
    start, length, base, needed_from = (scalars[b, i] for i in range(4))
    first = start + tile * rows
    end = jnp.where(first + rows > needed_from, jnp.minimum(first + rows, length), first)
    zero = jnp.int32(0)
    begin, plain, mixed, inner, edge, sink_step = steps_of(g, config.block_kv, first, end, base)
    near, near_edge = zero, zero
    if g.keys == "both":
        near, near_edge = _list_near_steps(g, config.block_kv, first, end, base)
    steps = begin, plain, mixed, inner + near, edge, sink_step
    return Item(b, head, tile * rows, first, length, base, *steps, near, near_edge)


def _list_near_steps(g: Geometry, block: int, first: Array, end: Array, base: Array) -> tuple[Array, Array]:
    """Return `near` and `near_edge` of queries at first … end - 1."""
    edge = lax.div(jnp.maximum(first - g.window + 1 - base, 0), jnp.int32(block))
    last = lax.div(end - base + (block - 1), jnp.int32(block))
    return jnp.where(end <= first, 0, last - edge), edge


def steps_of(g: Geometry, block: int, first: Array, end: Array, base: Array) -> tuple[Array, ...]:
    """Return `begin`, `plain`, `mixed`, `inner`, `edge` and `sink_step` of queries at first … end - 1."""

    def down(x):
        return lax.div(jnp.maximum(x, 0), jnp.int32(block))

    def up(x):
        return down(x + (block - 1))

    zero, empty = jnp.int32(0), end <= first
    if g.keys == "near":
        edge, sink_step = down(first - g.window + 1 - base), jnp.int32(g.sinks > 0)
        # Unmasked blocks are within the windows of the first and the last query, and contain no sink.
        begin = up(jnp.maximum(end - g.window, g.sinks) - base)
        plain = jnp.where(empty, 0, jnp.maximum(down(first + 1 - base) - begin, 0))
        inner = jnp.where(empty, 0, up(end - base) - edge + sink_step - plain)
        return begin, plain, zero, inner, edge, sink_step
    is_far = g.keys in ("far", "both")
    past = g.window if is_far else 0
    last = jnp.where(empty, 0, up(end - past))
    # Unmasked blocks look the same to every query: all their keys are visible, or all are far.
    edge = jnp.minimum(down(first + 1 - (g.window if g.two_ranks else past)), last)
    if is_far:  # Queries may be after all keys.
        last, edge = jnp.minimum(last, pl.cdiv(g.S, block)), jnp.minimum(edge, g.S // block)
    sink_step = jnp.where((edge > 0) & (g.sinks > 0), 1, 0).astype(jnp.int32)
    if not g.two_ranks:
        return sink_step, edge - sink_step, zero, last - edge + sink_step, edge, sink_step
    inside = jnp.clip(up(end - g.window), edge, last)  # From here on all visible keys are near.
    return sink_step, edge - sink_step, inside - edge + sink_step, last - inside, edge, sink_step
