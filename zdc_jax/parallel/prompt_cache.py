"""The cache of a prompt whose tokens were divided over devices: divided by head, for tensor-parallel decode.

First coordinates of all tokens of a device's heads are what the exchange has brought there. Only trailing
coordinates of the last window and of the sinks have to be sent, once (ours).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.prefix_ring import ClassLayerCache, LayerCache, ring_of_piece
from zdc_jax.parallel.exchange import kv_copies
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.plan import CompressionPlan, LayerRanks


@dataclass(frozen=True)
class Slots:
    """Sizes of a cache in tokens a row: `capacity`; of its ring the slots, sinks and window (`KVCache`)."""

    capacity: int
    ring: int
    sinks: int
    window: int

    @classmethod
    def of(cls, plan: CompressionPlan, capacity: int) -> "Slots":
        """Of a cache that holds up to `capacity` tokens a row under a plan."""
        return cls(capacity, plan.ring_slots(capacity), min(plan.sinks, capacity), min(plan.window, capacity))


def layer_cache(
    k: Float[Array, "B t K H"],
    v: Float[Array, "B t K H"],
    exchanged: tuple[Float[Array, "B T K/U R"], Float[Array, "B T K/U Z"]] | None,
    positions: Int[Array, "B t"],
    end: Int[Array, " B"],
    ranks: LayerRanks,
    slots: Slots,
) -> LayerCache:
    """Cache of one layer on one device; inside `jax.shard_map`.

    Args:
      k, v: of this device's tokens, which stand at `positions`; truncated where the plan has no near set.
      exchanged: first coordinates of all tokens for this device's heads; None without far attention.
      end: tokens that each row holds.
    """
    trailing = jnp.concatenate([k[..., ranks.qk :], v[..., ranks.v :]], -1)
    trailing = jnp.repeat(trailing, kv_copies(k.shape[2], jax.lax.axis_size(SEQUENCE)), axis=2)
    B, _, K, C = trailing.shape
    # Each slot's token is on one device: a sum with the zeros of others, of which each keeps its heads.
    ring = jnp.zeros((B, K, slots.ring, C), k.dtype)
    ring = ring_of_piece(ring, trailing, positions, end, sinks=slots.sinks, window=slots.window)
    ring = jax.lax.psum_scatter(ring, SEQUENCE, scatter_dimension=1, tiled=True)
    if exchanged is None:
        first_k = first_v = jnp.zeros((B, ring.shape[1], slots.capacity, 0), k.dtype)
    else:
        first_k, first_v = (stored(x.swapaxes(1, 2), slots.capacity) for x in exchanged)
    split = k.shape[-1] - ranks.qk
    return LayerCache(first_k, first_v, ring[..., :split], ring[..., split:])


def stored(x: Float[Array, "B K T R"], slots: int) -> Float[Array, "B K S R"]:
    """Tokens in a cache of S = `slots`; those beyond, which are padding, are dropped."""
    x = x[:, :, :slots]
    return jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0)))


def with_new_empties[Cache: (LayerCache, ClassLayerCache)](cache: Cache) -> Cache:
    """Makes empty arrays (rank 0 or H) anew: XLA for CPUs crashes on such arguments of a divided program."""
    return jax.tree.map(lambda x: x if x.size else jnp.zeros_like(x), cache)
