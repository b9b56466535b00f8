"""Caches that KV-Runahead hands from device to device: begun empty, given room, longer with each piece."""

from functools import partial

import jax
import jax.numpy as jnp

from zdc_jax.axes import Array
from zdc_jax.cache.prefix_ring import LayerCache, write
from zdc_jax.config import ModelConfig
from zdc_jax.parallel.prompt_cache import stored
from zdc_jax.plan import LayerRanks


def no_tokens(config: ModelConfig, ranks: LayerRanks, batch: int, ring: int, dtype: jnp.dtype) -> LayerCache:
    """What the first device begins with: a layer's cache of no tokens, and with no room for any.

    Args:
      batch: rows. ring: M, slots of the ring, which are there from the beginning.
    """
    rows = lambda slots, width: jnp.zeros((batch, config.num_kv_heads, slots, width), dtype)
    rings = rows(ring, config.head_dim - ranks.qk), rows(ring, config.head_dim - ranks.v)
    return LayerCache(rows(0, ranks.qk), rows(0, ranks.v), *rings)


def with_slots(cache: LayerCache, slots: int) -> LayerCache:
    """The same tokens with room for S = `slots` in all; of first coordinates, the ring stays."""
    return LayerCache(stored(cache.k, slots), stored(cache.v, slots), cache.ring_k, cache.ring_v)


@partial(jax.jit, static_argnames=("near", "slots"))
def longer(
    cache: LayerCache, k: Array, v: Array, positions: Array, end: Array, near: tuple[int, int], slots: int
) -> LayerCache:
    """The cache to hand on: with this piece's k, v [B, t, K, H] at `positions` [B, t], as `cache.write` does.

    near: sinks and window. end [B]: tokens that each row holds after this piece. slots: of the longer cache.
    """
    sinks, window = near
    return write(with_slots(cache, slots), k, v, positions, end, sinks=sinks, window=window)
