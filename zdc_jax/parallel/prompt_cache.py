"""The cache of a prompt whose tokens were divided over devices: divided by head, for tensor-parallel decode.

First coordinates of all tokens of a device's heads are what the exchange has brought there. Only trailing
coordinates of the last window and of the sinks have to be sent, once (ours); and, where the exchange rounded
them to few bits, the first coordinates of these tokens: what is decoded next attends mostly to them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from zdc_jax.axes import Array
from zdc_jax.cache.prefix_ring import PrefixRing, PrefixRingState, ring_of_piece, ring_slots
from zdc_jax.ops.slots import EMPTY, ring_positions
from zdc_jax.parallel.exchange import kv_copies
from zdc_jax.parallel.far import Exchanged, near_set
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.parallel.payload import NATIVE, Formats


def prompt_state(
    spec: PrefixRing,
    exchanged: Exchanged | None,
    k: Float[Array, "B t K Hq"],
    v: Float[Array, "B t K Hv"],
    positions: Int[Array, "B t"],
    end: Int[Array, " B"],
    capacity: int,
    formats: Formats = NATIVE,
) -> PrefixRingState:
    """Cache of one layer on one device, for `capacity` tokens a row; inside `jax.shard_map`.

    Args:
      exchanged: first coordinates of all tokens for this device's heads; None without far attention.
      k, v: of this device's tokens, which stand at `positions`; truncated where the plan has no near set.
      end: tokens that each row holds.
      formats: how the first coordinates came; near ones are put there whole where `formats.near` says so.
    """
    trailing = jnp.concatenate([k[..., spec.R :], v[..., spec.Z :]], -1)
    near, split = spec.near(capacity), k.shape[-1] - spec.R
    ring = scattered_ring(trailing, near, positions, end, capacity)
    if exchanged is None:
        first_k = first_v = jnp.zeros((k.shape[0], ring.shape[1], 1, 0), k.dtype)
    else:
        first_k, first_v = (stored(x.swapaxes(1, 2), capacity) for x in exchanged)
        if any(formats.near):
            whole = jnp.concatenate([k[..., : spec.R], v[..., : spec.Z]], -1)
            _, kept = near_set(spec, formats, (k.shape[-1], v.shape[-1]), capacity)
            whole = scattered_ring(whole, kept, positions, end, capacity)
            first_k = _with_near(first_k, whole[..., : spec.R], kept, end)
            first_v = _with_near(first_v, whole[..., spec.R :], kept, end)
    return PrefixRingState(first_k, first_v, ring[..., :split], ring[..., split:], near)


def scattered_ring(
    x: Float[Array, "B t K C"],
    near: tuple[int, int],
    positions: Int[Array, "B t"],
    end: Int[Array, " B"],
    capacity: int,
) -> Float[Array, "B k M C"]:
    """The ring of a prompt for this device's heads, from what each device has of its tokens; near: sinks and
    window."""
    x = jnp.repeat(x, kv_copies(x.shape[2], jax.lax.axis_size(SEQUENCE)), axis=2)
    (B, _, K, C), (sinks, window) = x.shape, near
    # Each slot's token is on one device: a sum with the zeros of others, of which each keeps its heads.
    ring = jnp.zeros((B, K, ring_slots(sinks, window, capacity), C), x.dtype)
    ring = ring_of_piece(ring, x, positions, end, sinks=sinks, window=window)
    return jax.lax.psum_scatter(ring, SEQUENCE, scatter_dimension=1, tiled=True)


def _with_near(
    first: Float[Array, "B k S R"],
    ring: Float[Array, "B k M R"],
    near: tuple[int, int],
    end: Int[Array, " B"],
) -> Float[Array, "B k S R"]:
    """First coordinates of all tokens of rows of `end` tokens, with those that a ring has of near ones."""
    sinks, window = near
    held = ring_positions(ring.shape[2], end[:, None] - 1, sinks=sinks, window=window)
    at = jnp.where(held == EMPTY, first.shape[2], held)
    return first.at[jnp.arange(len(first))[:, None], :, at].set(ring.swapaxes(1, 2), mode="drop")


def stored(x: Shaped[Array, "B K T *rest"], slots: int) -> Shaped[Array, "B K {slots} *rest"]:
    """Tokens in a cache of so many slots: zeros behind them, or without the last, which are padding."""
    x = x[:, :, :slots]
    return jnp.pad(x, [(0, slots - size if axis == 2 else 0) for axis, size in enumerate(x.shape)])


def with_new_empties[Tree](cache: Tree) -> Tree:
    """Makes empty arrays (rank 0 or H) anew: XLA for CPUs crashes on such arguments of a divided program."""
    return jax.tree.map(lambda x: x if x.size else jnp.zeros_like(x), cache)
