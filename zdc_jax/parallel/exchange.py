"""Relayouts inside `jax.shard_map`: tokens divided over an axis of the mesh ↔ heads divided over it.

U devices hold t = T/U tokens each. Whatever travels, travels as unsigned integers of the same width: the bits
arrive as they were sent, and no backend widens them on the way. With scales numbers are rounded to float8 for
the way, and are back in their own dtype right after it (`zdc_jax.parallel.payload`).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.parallel.payload import Scales, packed, unpacked

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


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
    q: Float[Array, "B t N R"],
    k: Float[Array, "B t K R"],
    v: Float[Array, "B t K Z"],
    axis: str,
    scales: Scales | None = None,
) -> tuple[Float[Array, "B T N/U R"], Float[Array, "B T K/U R"], Float[Array, "B T K/U Z"]]:
    """All tokens of one device's heads, from all heads of its tokens: one dense all-to-all (ZDC §5.3).

    U must divide N. KV heads that U does not divide are sent `kv_copies` times. scales: of a float8 payload.
    """
    U = jax.lax.axis_size(axis)
    copies = kv_copies(k.shape[2], U)
    parts = [q, jnp.repeat(k, copies, axis=2), jnp.repeat(v, copies, axis=2)]
    if scales is not None:
        every = [_of_heads(scale, x.shape[2]) for x, scale in zip(parts, scales, strict=True)]
        parts = [packed(x, scale) for x, scale in zip(parts, every, strict=True)]
    B, t = q.shape[:2]
    message = jnp.concatenate([x.reshape(B, t, U, -1) for x in parts], -1)
    received = moved(lambda x: jax.lax.all_to_all(x, axis, 0, 0), jnp.moveaxis(message, 2, 0))
    whole = jnp.moveaxis(received, 0, 1).reshape(B, U * t, -1)  # from the tokens of each device, in order
    ends = [x.shape[2] * x.shape[3] // U for x in parts]
    split = jnp.split(whole, [ends[0], ends[0] + ends[1]], axis=-1)
    mine = [y.reshape(B, U * t, -1, x.shape[3]) for x, y in zip(parts, split, strict=True)]
    if scales is not None:
        own = [_own_heads(scale, axis) for scale in every]
        mine = [unpacked(x, scale, q.dtype) for x, scale in zip(mine, own, strict=True)]
    return mine[0], mine[1], mine[2]


def gather_heads(
    o: Float[Array, "B T N/U Z"], axis: str, scale: Float[Array, "K Z"] | None = None
) -> Float[Array, "B t N Z"]:
    """All heads of one device's tokens, from all tokens of its heads: the way back. scale: v's, of float8."""
    U = jax.lax.axis_size(axis)
    B, T, n, Z = o.shape
    if scale is not None:
        every = _of_heads(scale, U * n)
        return unpacked(gather_heads(packed(o, _own_heads(every, axis)), axis), every, o.dtype)
    blocks = jnp.moveaxis(o.reshape(B, U, T // U, n * Z), 1, 0)
    received = moved(lambda x: jax.lax.all_to_all(x, axis, 0, 0), blocks)
    return jnp.moveaxis(received.reshape(U, B, T // U, n, Z), 0, 2).reshape(B, T // U, U * n, Z)


def gather_heads_and_lse(
    o: Float[Array, "B T N/U Z"],
    lse: Float[Array, "B N/U T"],
    axis: str,
    scale: Float[Array, "K Z"] | None = None,
) -> tuple[Float[Array, "B t N Z"], Float[Array, "B N t"]]:
    """`gather_heads` with the float32 log-sum-exp in the same message, as further columns of as many bits."""
    U, Z = jax.lax.axis_size(axis), o.shape[-1]
    if scale is not None:
        every = _of_heads(scale, U * o.shape[2])
        back, lse = gather_heads_and_lse(packed(o, _own_heads(every, axis)), lse, axis)
        return unpacked(back, every, o.dtype), lse
    words = jax.lax.bitcast_convert_type(o, _WORDS[o.dtype.itemsize])
    columns = jax.lax.bitcast_convert_type(lse.swapaxes(1, 2), words.dtype)
    both = gather_heads(jnp.concatenate([words, columns.reshape(*o.shape[:3], -1)], -1), axis)
    columns = both[..., Z] if o.dtype.itemsize == 4 else both[..., Z:]
    lse = jax.lax.bitcast_convert_type(columns, jnp.float32).swapaxes(1, 2)
    return jax.lax.bitcast_convert_type(both[..., :Z], o.dtype), lse


def _of_heads(scale: Float[Array, "K R"], heads: int) -> Float[Array, "N R"]:
    """Of each query head, or copy of a KV head, that of its KV head."""
    return jnp.repeat(scale, heads // scale.shape[0], axis=0)


def _own_heads(scale: Float[Array, "N R"], axis: str) -> Float[Array, "N/U R"]:
    """Of the heads that this device has in the exchange."""
    count = scale.shape[0] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(scale, jax.lax.axis_index(axis) * count, count)
