"""Which slots of a cache hold what: rings of near tokens.

Position p of the window stands in slot p mod window, sink p in slot window + p. Slots behind these hold none.
"""

import jax.numpy as jnp
from jaxtyping import Bool, Int

from zdc_jax.axes import Array

EMPTY = -1
"""Position of a slot that holds no token."""


def ring_slot(positions: Int[Array, "*B"], *, sinks: int, window: int) -> Int[Array, "*B"]:
    """The slots of positions that are near."""
    return jnp.where(positions < sinks, window + positions, positions % max(window, 1))


def slot_of_token(
    positions: Int[Array, "B 1"], end: Int[Array, " B"], *, sinks: int, window: int
) -> tuple[Int[Array, "B 1"], Bool[Array, "B 1"]]:
    """The slot of one new token a row, and whether it goes there: below `end`, if near tokens are kept."""
    taken = positions < end[:, None]
    slot = ring_slot(positions, sinks=sinks, window=window)
    return slot, taken if window else taken & (positions < sinks)


def ring_positions(
    slots: int, last: Int[Array, "B 1"], *, sinks: int, window: int
) -> Int[Array, "B {slots}"]:
    """Positions of the tokens in a ring of so many slots; `EMPTY` of those that hold none.

    last: position of the newest token of each row, -1 before the first.
    """
    slot = jnp.arange(slots)
    recent = last - (last - slot) % max(window, 1)
    sink = slot - window
    held = jnp.where(slot < window, recent >= sinks, (sink < sinks) & (sink <= last))
    return jnp.where(held, jnp.where(slot < window, recent, sink), EMPTY)
