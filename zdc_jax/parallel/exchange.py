"""Relayouts inside `jax.shard_map`: tokens divided over an axis of the mesh ↔ heads divided over it.

U devices hold t = T/U tokens each. Whatever travels, travels as unsigned integers of the same width: the bits
arrive as they were sent, and no backend widens them on the way. A `Format` may round numbers for the way;
they are back in their own dtype right after it (`zdc_jax.parallel.payload`).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Shaped

from zdc_jax.axes import Array
from zdc_jax.parallel.payload import AS_IS, Format

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def moved(collective: Callable[[Array], Array], x: Array) -> Array:
    """`collective(x)` for one that only moves data, bit by bit."""
    words = jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])
    return jax.lax.bitcast_convert_type(collective(words), x.dtype)


def kv_copies(num_kv_heads: int, degree: int) -> int:
    """Copies of each KV head that let `degree` devices take equal shares of them; 1 where K is a multiple.

    Where K < U each device needs a whole KV head of all tokens for its n query heads, so what it receives
    of K and V cannot be less; together the devices receive, and cache, U instead of K heads.
    """
    return degree // math.gcd(num_kv_heads, degree)


def all_to_all(parts: Sequence[Array], axis: str) -> list[Array]:
    """Block i of each array [U, ...] goes to device i, in one dense message; what comes is by its sender.

    Arrays lie in the message one after another, as they are in memory, in words as wide as the narrowest.
    """
    U, width = len(parts[0]), min(x.dtype.itemsize for x in parts)
    if width == 1 and all(x.nbytes // U % 2 == 0 for x in parts):
        width = 2
    words = [_words(x, width) for x in parts]
    received = jax.lax.all_to_all(jnp.concatenate(words, 1), axis, 0, 0)
    split = jnp.split(received, list(itertools.accumulate(x.shape[1] for x in words[:-1])), axis=1)
    return [_from_words(y, x) for x, y in zip(parts, split, strict=True)]


def _words(x: Array, width: int) -> Array:
    """[U, ·], x's bits in unsigned integers of so many bytes."""
    x, many = x.reshape(len(x), x.size // len(x)), width // x.dtype.itemsize
    x = x if many <= 1 else x.reshape(len(x), x.shape[1] // many, many)
    words = jax.lax.bitcast_convert_type(x, _WORDS[width])
    return words.reshape(len(x), words.size // len(x))


def _from_words(words: Array, like: Array) -> Array:
    """What `_words` was given, an array of the shape and dtype of `like`."""
    many = like.dtype.itemsize // words.dtype.itemsize
    words = words if many <= 1 else words.reshape(len(words), words.shape[1] // many, many)
    return jax.lax.bitcast_convert_type(words, like.dtype).reshape(like.shape)


def scatter_heads(
    parts: Sequence[Float[Array, "B _ _ _"]], axis: str, formats: Sequence[Format] | None = None
) -> list[Float[Array, "B _ _ _"]]:
    """All tokens of one device's heads, from all heads of its tokens: one dense all-to-all (ZDC §5.3).

    parts: q, k and v, or others; each may have a t, N and R of its own. Heads that U does not divide are sent
    `kv_copies` times. formats: how each of them travels; default `AS_IS`.
    """
    U = jax.lax.axis_size(axis)
    formats = formats or [AS_IS] * len(parts)
    copies = [kv_copies(x.shape[2], U) for x in parts]
    every = [form.of_heads(x.shape[2]) for form, x in zip(formats, parts, strict=True)]
    # Codes are of the heads themselves: copies are made of what is packed.
    packed = [
        [jnp.repeat(part, many, axis=2) for part in form.packed(x)]
        for form, x, many in zip(every, parts, copies, strict=True)
    ]
    arrived = iter(_scattered([part for each in packed for part in each], axis))
    heads = [x.shape[2] * many for x, many in zip(parts, copies, strict=True)]
    own = [_own(form.of_heads(count), axis, count) for form, count in zip(formats, heads, strict=True)]
    return [
        form.unpacked(*itertools.islice(arrived, len(each)), dtype=x.dtype)
        for form, each, x in zip(own, packed, parts, strict=True)
    ]


def _scattered(parts: list[Array], axis: str) -> list[Array]:
    U = jax.lax.axis_size(axis)
    by_receiver = [jnp.moveaxis(x.reshape(*x.shape[:2], U, -1, x.shape[3]), 2, 0) for x in parts]
    by_sender = all_to_all(by_receiver, axis)
    return [jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in by_sender]


def gather_heads(o: Float[Array, "B T n Z"], axis: str, form: Format = AS_IS) -> Float[Array, "B t N Z"]:
    """All heads of one device's tokens, from all tokens of its heads: the way back."""
    every, packed = _packed_own(o, axis, form)
    return every.unpacked(*_gathered(packed, axis), dtype=o.dtype)


def gather_heads_and_lse(
    o: Float[Array, "B T n Z"],
    lse: Float[Array, "B n T"],
    axis: str,
    form: Format = AS_IS,
    lse_dtype: Any = jnp.float32,
) -> tuple[Float[Array, "B t N Z"], Float[Array, "B N t"]]:
    """`gather_heads` with the float32 log-sum-exp in the same message, where it may be rounded."""
    every, packed = _packed_own(o, axis, form)
    *arrived, of_lse = _gathered([*packed, lse.swapaxes(1, 2)[..., None].astype(lse_dtype)], axis)
    return every.unpacked(*arrived, dtype=o.dtype), of_lse[..., 0].swapaxes(1, 2).astype(lse.dtype)


def _packed_own(o: Array, axis: str, form: Format) -> tuple[Format, tuple[Array, ...]]:
    """The format of all heads, and what is sent of this device's."""
    every = form.of_heads(count := jax.lax.axis_size(axis) * o.shape[2])
    return every, _own(every, axis, count).packed(o)


def _own(every: Format, axis: str, count: int) -> Format:
    """Of `count` heads, those that this device has in the exchange."""
    share = count // jax.lax.axis_size(axis)
    return every.own(jax.lax.axis_index(axis) * share, share)


def _gathered(parts: Sequence[Shaped[Array, "B T n _"]], axis: str) -> list[Shaped[Array, "B t N _"]]:
    U, (B, T, n, _) = jax.lax.axis_size(axis), parts[0].shape
    by_receiver = [jnp.moveaxis(x.reshape(B, U, T // U, n, x.shape[3]), 1, 0) for x in parts]
    by_sender = all_to_all(by_receiver, axis)
    return [jnp.moveaxis(x, 0, 2).reshape(B, T // U, U * n, x.shape[4]) for x in by_sender]
