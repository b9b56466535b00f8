"""Caches that KV-Runahead hands from device to device: begun empty, given room, longer with each piece."""

from dataclasses import replace
from functools import partial

import jax

from zdc_jax.axes import Array
from zdc_jax.cache.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.parallel.prompt_cache import fit_slots


def no_tokens(spec: PrefixRing, batch: int, capacity: int) -> PrefixRingState:
    """What the first device begins with: a layer's cache with no room for any token, but with its ring.

    Args:
      batch: rows. capacity: of the cache that will be, in tokens a row; it says how large the ring is.
    """
    state = spec.create(batch, capacity)
    return replace(state, k=state.k[:, :, :0], v=state.v[:, :, :0])


def with_slots(state: PrefixRingState, slots: int) -> PrefixRingState:
    """The same tokens with room for S = `slots` in all; of first coordinates, the ring stays."""
    return replace(state, k=fit_slots(state.k, slots), v=fit_slots(state.v, slots))


@partial(jax.jit, static_argnames=("spec", "slots"))
def longer(
    spec: PrefixRing, state: PrefixRingState, k: Array, v: Array, positions: Array, end: Array, slots: int
) -> PrefixRingState:
    """The cache to hand on: with this piece's k, v [B, t, K, H] at `positions` [B, t], as `spec.write` does.

    end [B]: tokens that each row holds after this piece. slots: of the longer cache.
    """
    return spec.write(with_slots(state, slots), k, v, positions, end)
