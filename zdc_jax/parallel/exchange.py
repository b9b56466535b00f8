"""Relayouts inside `jax.shard_map`: tokens divided over an axis of the mesh ↔ heads divided over it.

U devices hold t = T/U tokens each. Whatever travels, travels as unsigned integers of the same width: the bits
arrive as they were sent, and no backend widens them on the way.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float

from zdc_jax.axes import Array

_WORDS = {2: jnp.uint16, 4: jnp.uint32}


def moved(collective: Callable[[Array], Array], x: Array) -> Array:
    """`collective(x)` for one that only moves data, bit by bit."""
    words = jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])
    return jax.lax.bitcast_convert_type(collective(words), x.dtype)


def kv_copies(num_kv_heads: int, degree: int) -> int:
    """Copies of each KV head that let `degree` devices take equal shares of them; 1 where K is a multiple.

    Where K < U each device needs a whole KV head of all tokens for its N/U query heads, so what it receives
    of K and V cannot be less; together the devices receive, and cache, U instead of K heads.
    """
    return degree // math.gcd(num_kv_heads, degree)


def scatter_heads(
    q: Float[Array, "B t N R"], k: Float[Array, "B t K R"], v: Float[Array, "B t K Z"], axis: str
) -> tuple[Float[Array, "B T N/U R"], Float[Array, "B T K/U R"], Float[Array, "B T K/U Z"]]:
    """All tokens of one device's heads, from all heads of its tokens: one dense all-to-all (ZDC §5.3).

    U must divide N. KV heads that U does not divide are sent `kv_copies` times.
    """
    U = jax.lax.axis_size(axis)
    copies = kv_copies(k.shape[2], U)
    parts = [q, jnp.repeat(k, copies, axis=2), jnp.repeat(v, copies, axis=2)]
    B, t = q.shape[:2]
    packed = jnp.concatenate([x.reshape(B, t, U, -1) for x in parts], -1)
    received = moved(lambda x: jax.lax.all_to_all(x, axis, 0, 0), jnp.moveaxis(packed, 2, 0))
    whole = jnp.moveaxis(received, 0, 1).reshape(B, U * t, -1)  # from the tokens of each device, in order
    ends = [x.shape[2] * x.shape[3] // U for x in parts]
    split = jnp.split(whole, [ends[0], ends[0] + ends[1]], axis=-1)
    q, k, v = (y.reshape(B, U * t, -1, x.shape[3]) for x, y in zip(parts, split, strict=True))
    return q, k, v


def gather_heads(o: Float[Array, "B T N/U Z"], axis: str) -> Float[Array, "B t N Z"]:
    """All heads of one device's tokens, from all tokens of its heads: the way back."""
    U = jax.lax.axis_size(axis)
    B, T, n, Z = o.shape
    blocks = jnp.moveaxis(o.reshape(B, U, T // U, n * Z), 1, 0)
    received = moved(lambda x: jax.lax.all_to_all(x, axis, 0, 0), blocks)
    return jnp.moveaxis(received.reshape(U, B, T // U, n, Z), 0, 2).reshape(B, T // U, U * n, Z)


def gather_heads_and_lse(
    o: Float[Array, "B T N/U Z"], lse: Float[Array, "B N/U T"], axis: str
) -> tuple[Float[Array, "B t N Z"], Float[Array, "B N t"]]:
    """`gather_heads` with the float32 log-sum-exp in the same message, as further columns of o's dtype."""
    Z = o.shape[-1]
    columns = jax.lax.bitcast_convert_type(lse.swapaxes(1, 2), o.dtype)
    both = jnp.concatenate([o, columns.reshape(*o.shape[:3], -1)], -1)
    both = gather_heads(both, axis)
    columns = both[..., Z:] if o.dtype.itemsize == 2 else both[..., Z]
    return both[..., :Z], jax.lax.bitcast_convert_type(columns, jnp.float32).swapaxes(1, 2)
