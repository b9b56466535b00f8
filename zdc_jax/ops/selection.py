"""The largest of many numbers, without sorting them."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, UInt32

from zdc_jax.axes import Array


def among_largest(x: Float[Array, "*batch S"], count: int) -> Bool[Array, "*batch S"]:
    """Which of x, float32 and no NaN, `jax.lax.top_k` would give: of equal numbers those that come first.

    The number at which the `count` largest begin is found bit by bit, each time by counting those above: 32
    passes over x, where sorting thousands of numbers takes a GPU several times as long.
    """
    S = x.shape[-1]
    if count >= S:
        return jnp.ones(x.shape, bool)
    ordered = _ordered(x)

    def with_bit(bit: Array, least: Array) -> Array:
        higher = least | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        enough = (ordered >= higher).sum(-1, keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough, higher, least)

    least = jax.lax.fori_loop(0, 32, with_bit, jnp.zeros((*x.shape[:-1], 1), jnp.uint32))
    above, equal = ordered > least, ordered == least
    room = count - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room))


def _ordered(x: Float[Array, "*batch S"]) -> UInt32[Array, "*batch S"]:
    """Integers in the order of x: bits of a float32, turned round where it is negative."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.uint32)  # -0 becomes 0.
    sign = jnp.uint32(0x8000_0000)
    return jnp.where(bits & sign, ~bits, bits | sign)
