"""Selection of the largest elements of an array without sorting."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, UInt32

from zdc_jax.axes import Array


def among_largest(x: Float[Array, "*batch S"], count: int) -> Bool[Array, "*batch S"]:
    """Return which elements `jax.lax.top_k` would select; of equal elements the first ones.

    The threshold is found bit by bit, each time by counting the elements at or above a candidate. This takes
    32 passes over `x`; sorting thousands of elements takes a GPU several times as long.

    Args:
      x: float32 values without NaN.
      count: number of elements to select.
    """
    S = x.shape[-1]
    if count >= S:
        return jnp.ones(x.shape, bool)
    ordered = _to_ordered_integers(x)

    def decide_bit(bit: Array, threshold: Array) -> Array:
        higher = threshold | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        enough = (ordered >= higher).sum(-1, keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough, higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, decide_bit, jnp.zeros((*x.shape[:-1], 1), jnp.uint32))
    above, equal = ordered > threshold, ordered == threshold
    room = count - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room))


def _to_ordered_integers(x: Float[Array, "*batch S"]) -> UInt32[Array, "*batch S"]:
    """Map float32 values to unsigned integers of the same order."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.uint32)  # Adding 0 turns -0 into 0.
    sign = jnp.uint32(0x8000_0000)
    return jnp.where(bits & sign, ~bits, bits | sign)
