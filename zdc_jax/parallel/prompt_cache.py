"""Cache of a prompt whose tokens were divided over devices, for tensor-parallel decode by head.

The exchange has already brought the first coordinates of all tokens to the devices of their heads. Only the
trailing coordinates of the last window and the sinks are sent, once (ours). If the exchange quantized the
first coordinates, those of near tokens are sent again unquantized: decoded tokens attend mostly to them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from zdc_jax.axes import Array
from zdc_jax.cache.specs.prefix_ring import PrefixRing, PrefixRingState, ring_of_piece, ring_slots
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
    """Create one layer's cache on one device, for `capacity` tokens per sequence; inside `jax.shard_map`.

    Args:
      spec: the layer's cache.
      exchanged: first coordinates of all tokens for this device's heads; None without far attention.
      k: keys of this device's tokens; truncated if the plan has no near set.
      v: values of this device's tokens.
      positions: positions of this device's tokens.
      end: length of each sequence.
      capacity: tokens per sequence.
      formats: formats of the exchange; with `formats.near`, near tokens replace their quantized coordinates.
    """
    trailing = jnp.concatenate([k[..., spec.R :], v[..., spec.Z :]], -1)
    near, split = spec.near(capacity), k.shape[-1] - spec.R
    ring = scatter_ring(trailing, near, positions, end, capacity)
    if exchanged is None:
        first_k = first_v = jnp.zeros((k.shape[0], ring.shape[1], 1, 0), k.dtype)
    else:
        first_k, first_v = (fit_slots(x.swapaxes(1, 2), capacity) for x in exchanged)
        if any(formats.near):
            exact = jnp.concatenate([k[..., : spec.R], v[..., : spec.Z]], -1)
            _, exact_near = near_set(spec, formats, (k.shape[-1], v.shape[-1]), capacity)
            exact = scatter_ring(exact, exact_near, positions, end, capacity)
            first_k = _insert_near(first_k, exact[..., : spec.R], exact_near, end)
            first_v = _insert_near(first_v, exact[..., spec.R :], exact_near, end)
    return PrefixRingState(first_k, first_v, ring[..., :split], ring[..., split:], near)


def scatter_ring(
    x: Float[Array, "B t K C"],
    near: tuple[int, int],
    positions: Int[Array, "B t"],
    end: Int[Array, " B"],
    capacity: int,
) -> Float[Array, "B k M C"]:
    """Return the ring of a prompt for this device's heads, from the tokens of all devices.

    `near` is sinks and window.
    """
    x = jnp.repeat(x, kv_copies(x.shape[2], jax.lax.axis_size(SEQUENCE)), axis=2)
    (B, _, K, C), (sinks, window) = x.shape, near
    # Each slot's token is on one device. The sum with the zeros of the others is exact.
    ring = jnp.zeros((B, K, ring_slots(sinks, window, capacity), C), x.dtype)
    ring = ring_of_piece(ring, x, positions, end, sinks=sinks, window=window)
    return jax.lax.psum_scatter(ring, SEQUENCE, scatter_dimension=1, tiled=True)


def _insert_near(
    first: Float[Array, "B k S R"],
    ring: Float[Array, "B k M R"],
    near: tuple[int, int],
    end: Int[Array, " B"],
) -> Float[Array, "B k S R"]:
    """Insert the near tokens of a ring into the first coordinates of all tokens, by position."""
    sinks, window = near
    positions = ring_positions(ring.shape[2], end[:, None] - 1, sinks=sinks, window=window)
    slots = jnp.where(positions == EMPTY, first.shape[2], positions)
    return first.at[jnp.arange(len(first))[:, None], :, slots].set(ring.swapaxes(1, 2), mode="drop")


def fit_slots(x: Shaped[Array, "B K T *rest"], slots: int) -> Shaped[Array, "B K {slots} *rest"]:
    """Fit tokens into `slots` slots: pad with zeros, or drop the last tokens, which are padding."""
    x = x[:, :, :slots]
    return jnp.pad(x, [(0, slots - size if axis == 2 else 0) for axis, size in enumerate(x.shape)])


def with_new_empties[Tree](cache: Tree) -> Tree:
    """Recreate empty arrays (rank 0 or H): XLA's CPU backend crashes on them in sharded programs."""
    return jax.tree.map(lambda x: x if x.size else jnp.zeros_like(x), cache)
