"""The cache of a prompt whose tokens were divided over devices: divided by head, for tensor-parallel decode.

First coordinates of all tokens of a device's heads are what the exchange has brought there. Only trailing
coordinates of the last window and of the sinks have to be sent, once (ours).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.prefix_ring import PrefixRing, PrefixRingState, ring_of_piece
from zdc_jax.parallel.exchange import kv_copies
from zdc_jax.parallel.far import Exchanged
from zdc_jax.parallel.mesh import SEQUENCE


def prompt_state(
    spec: PrefixRing,
    k: Float[Array, "B t K Hq"],
    v: Float[Array, "B t K Hv"],
    exchanged: Exchanged | None,
    positions: Int[Array, "B t"],
    end: Int[Array, " B"],
    capacity: int,
) -> PrefixRingState:
    """Cache of one layer on one device, for `capacity` tokens a row; inside `jax.shard_map`.

    Args:
      k, v: of this device's tokens, which stand at `positions`; truncated where the plan has no near set.
      exchanged: first coordinates of all tokens for this device's heads; None without far attention.
      end: tokens that each row holds.
    """
    trailing = jnp.concatenate([k[..., spec.R :], v[..., spec.Z :]], -1)
    trailing = jnp.repeat(trailing, kv_copies(k.shape[2], jax.lax.axis_size(SEQUENCE)), axis=2)
    (B, _, K, C), (sinks, window) = trailing.shape, spec.near(capacity)
    # Each slot's token is on one device: a sum with the zeros of others, of which each keeps its heads.
    ring = jnp.zeros((B, K, spec.ring_slots(capacity), C), k.dtype)
    ring = ring_of_piece(ring, trailing, positions, end, sinks=sinks, window=window)
    ring = jax.lax.psum_scatter(ring, SEQUENCE, scatter_dimension=1, tiled=True)
    if exchanged is None:
        first_k = first_v = jnp.zeros((B, ring.shape[1], 1, 0), k.dtype)
    else:
        first_k, first_v = (stored(x.swapaxes(1, 2), capacity) for x in exchanged)
    split = k.shape[-1] - spec.R
    return PrefixRingState(first_k, first_v, ring[..., :split], ring[..., split:], (sinks, window))


def stored(x: Float[Array, "B K T R"], slots: int) -> Float[Array, "B K S R"]:
    """Tokens in a cache of S = `slots`; those beyond, which are padding, are dropped."""
    x = x[:, :, :slots]
    return jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0)))


def with_new_empties[Tree](cache: Tree) -> Tree:
    """Makes empty arrays (rank 0 or H) anew: XLA for CPUs crashes on such arguments of a divided program."""
    return jax.tree.map(lambda x: x if x.size else jnp.zeros_like(x), cache)
