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


def head_groups(num_kv_heads: int, degree: int) -> int:
    """Groups of heads that may travel one by one: 2 where each device has an even number of KV heads."""
    return 2 - num_kv_heads * kv_copies(num_kv_heads, degree) // degree % 2


def scatter_heads(
    parts: Sequence[Float[Array, "B _ _ _"]], axis: str, formats: Sequence[Format] | None = None
) -> list[Float[Array, "B _ _ _"]]:
    """All tokens of one device's heads, from all heads of its tokens: one dense all-to-all (ZDC §5.3).

    parts: q, k and v, or others; each may have a t, N and R of its own. Heads that U does not divide are sent
    `kv_copies` times. formats: how each of them travels; default `AS_IS`.
    """
    (heads,) = scatter_head_groups(parts, axis, formats)
    return heads


def scatter_head_groups(
    parts: Sequence[Shaped[Array, "B _ _ _"]],
    axis: str,
    formats: Sequence[Format] | None = None,
    groups: int = 1,
    beside: Any = None,
) -> list[list[Shaped[Array, "B _ _ _"]]]:
    """`scatter_heads` with an all-to-all for each of so many equal groups of each device's heads, in order.

    One is sent after the other: what is computed from the first goes on beside the second. beside: arrays
    that are computed while the first is on its way, and before anything is from it (ours).
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
    heads = [x.shape[2] * many for x, many in zip(parts, copies, strict=True)]
    waiting = [[_group(x, U, each, groups) for part in packed for x in part] for each in range(groups)]
    found: list[list[Array]] = []
    for group in range(groups):
        arrived = iter(_scattered(waiting.pop(0), axis))
        own = [_own(form.of_heads(n), axis, n, group, groups) for form, n in zip(formats, heads, strict=True)]
        unpacked = [
            form.unpacked(*itertools.islice(arrived, len(each)), dtype=x.dtype)
            for form, each, x in zip(own, packed, parts, strict=True)
        ]
        if waiting or (beside is not None and group == 0):
            # Else XLA's scheduler sends groups at once, and computes `beside` where it hides nothing.
            unpacked, waiting, beside = jax.lax.optimization_barrier((unpacked, waiting, beside))
        found.append(unpacked)
    return found


def _group(x: Shaped[Array, "B t N _"], degree: int, group: int, groups: int) -> Shaped[Array, "B t n _"]:
    """Of each device's share of the heads, those of one group."""
    B, t, _, C = x.shape
    return x.reshape(B, t, degree, groups, -1, C)[:, :, :, group].reshape(B, t, -1, C)


def _scattered(parts: list[Array], axis: str) -> list[Array]:
    U = jax.lax.axis_size(axis)
    by_receiver = [jnp.moveaxis(x.reshape(*x.shape[:2], U, -1, x.shape[3]), 2, 0) for x in parts]
    by_sender = all_to_all(by_receiver, axis)
    return [jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in by_sender]


def gather_heads(o: Float[Array, "B T n Z"], axis: str, form: Format = AS_IS) -> Float[Array, "B t N Z"]:
    """All heads of one device's tokens, from all tokens of its heads: the way back."""
    return gather_head_groups([(o, None)], axis, form)[0]


def gather_heads_and_lse(
    o: Float[Array, "B T n Z"],
    lse: Float[Array, "B n T"],
    axis: str,
    form: Format = AS_IS,
    lse_dtype: Any = jnp.float32,
) -> tuple[Float[Array, "B t N Z"], Float[Array, "B N t"]]:
    """`gather_heads` with the float32 log-sum-exp in the same message, where it may be rounded."""
    o, gathered = gather_head_groups([(o, lse)], axis, form, lse_dtype)
    assert gathered is not None
    return o, gathered


def gather_head_groups(
    parts: Sequence[tuple[Float[Array, "B T n Z"], Float[Array, "B n T"] | None]],
    axis: str,
    form: Format = AS_IS,
    lse_dtype: Any = jnp.float32,
) -> tuple[Float[Array, "B t N Z"], Float[Array, "B N t"] | None]:
    """`gather_heads`, where there is one `gather_heads_and_lse`, of the groups of `scatter_head_groups`."""
    U, groups, first = jax.lax.axis_size(axis), len(parts), parts[0][0]
    every = form.of_heads(count := U * groups * first.shape[2])
    gathered = []
    for group, (o, lse) in enumerate(parts):
        sent = [*_own(every, axis, count, group, groups).packed(o)]
        if lse is not None:
            sent.append(lse.swapaxes(1, 2)[..., None].astype(lse_dtype))
        gathered.append(_gathered(sent, axis))
    arrived = [_merged_groups(each) for each in zip(*gathered, strict=True)]
    lse = parts[0][1]
    if lse is None:
        return every.unpacked(*arrived, dtype=first.dtype), None
    *arrived, of_lse = arrived
    of_lse = of_lse[..., 0].swapaxes(1, 2).astype(lse.dtype)
    return every.unpacked(*arrived, dtype=first.dtype), of_lse


def _merged_groups(groups: Sequence[Shaped[Array, "B t U n _"]]) -> Shaped[Array, "B t N _"]:
    """All heads in order."""
    x = jnp.concatenate(groups, 3)
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _own(every: Format, axis: str, count: int, group: int = 0, groups: int = 1) -> Format:
    """Of `count` heads, those of a group that this device has in the exchange."""
    share = count // jax.lax.axis_size(axis)
    each = share // groups
    return every.own(jax.lax.axis_index(axis) * share + group * each, each)


def _gathered(parts: Sequence[Shaped[Array, "B T n _"]], axis: str) -> list[Shaped[Array, "B t U n _"]]:
    U, (B, T, n, _) = jax.lax.axis_size(axis), parts[0].shape
    by_receiver = [jnp.moveaxis(x.reshape(B, U, T // U, n, x.shape[3]), 1, 0) for x in parts]
    return [jnp.moveaxis(x, 0, 2) for x in all_to_all(by_receiver, axis)]
