"""Ring slots of near tokens, the sinks and the recent window.

Position p of the window is stored in slot p mod window, and sink p in slot window + p. Further slots are
empty.
"""

import jax.numpy as jnp
from jaxtyping import Bool, Int

from zdc_jax.axes import Array

EMPTY = -1
"""Position of an empty slot."""


def ring_slot(positions: Int[Array, "*B"], *, sinks: int, window: int) -> Int[Array, "*B"]:
    """Return the ring slots of near positions."""
    return jnp.where(positions < sinks, window + positions, positions % max(window, 1))


def last_read(positions: Int[Array, "B 1"], end: Int[Array, " B"]) -> Int[Array, "B 1"]:
    """Return the last position that each single query reads: its own, or -1 in an idle sequence.

    An idle sequence of a batch has an `end` of 0.
    """
    return jnp.minimum(positions, end[:, None] - 1)


def slot_of_token(
    positions: Int[Array, "B 1"], end: Int[Array, " B"], *, sinks: int, window: int
) -> tuple[Int[Array, "B 1"], Bool[Array, "B 1"]]:
    """Return the slot of one new token per sequence, and whether the token is stored.

    It is stored if its position is below `end` and near.
    """
    valid = positions < end[:, None]
    slot = ring_slot(positions, sinks=sinks, window=window)
    return slot, valid if window else valid & (positions < sinks)


def ring_positions(
    slots: int, last: Int[Array, "B 1"], *, sinks: int, window: int
) -> Int[Array, "B {slots}"]:
    """Return the positions of the tokens in a ring; `EMPTY` for empty slots.

    Args:
      slots: number of slots.
      last: position of the newest token of each sequence, -1 before the first.
      sinks: number of sinks.
      window: size of the recent window.
    """
    slot = jnp.arange(slots)
    recent = last - (last - slot) % max(window, 1)
    sink = slot - window
    occupied = jnp.where(slot < window, recent >= sinks, (sink < sinks) & (sink <= last))
    return jnp.where(occupied, jnp.where(slot < window, recent, sink), EMPTY)
