"""Exchanges inside `jax.shard_map` between tokens and heads divided over a mesh axis.

U devices hold t = T/U tokens each. All data travels as unsigned integers of the same width, so that bits
arrive unchanged and no backend widens them. A `Format` may round values for transport; they return to their
own dtype on arrival (`zdc_jax.parallel.payload`).
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
    """Apply a collective that only moves data, on the bits of `x`."""
    words = jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])
    return jax.lax.bitcast_convert_type(collective(words), x.dtype)


def kv_copies(num_kv_heads: int, degree: int) -> int:
    """Return the copies of each KV head that let `degree` devices take equal shares; 1 if `degree` divides K.

    If K < U, each device needs a whole KV head of all tokens for its n query heads, so it cannot receive less
    of K and V. Together the devices receive and cache U heads instead of K.
    """
    return degree // math.gcd(num_kv_heads, degree)


def all_to_all(parts: Sequence[Array], axis: str) -> list[Array]:
    """Send block i of each array [U, ...] to device i, in one dense message; results are by sender.

    The message holds the arrays one after another, as in memory, in words of the narrowest array's width.
    """
    U, width = len(parts[0]), min(x.dtype.itemsize for x in parts)
    if width == 1 and all(x.nbytes // U % 2 == 0 for x in parts):
        width = 2
    words = [_to_words(x, width) for x in parts]
    received = jax.lax.all_to_all(jnp.concatenate(words, 1), axis, 0, 0)
    split = jnp.split(received, list(itertools.accumulate(x.shape[1] for x in words[:-1])), axis=1)
    return [_from_words(y, x) for x, y in zip(parts, split, strict=True)]


def _to_words(x: Array, width: int) -> Array:
    """Reinterpret the bits of `x` as [U, ·] unsigned integers of `width` bytes."""
    x, many = x.reshape(len(x), x.size // len(x)), width // x.dtype.itemsize
    x = x if many <= 1 else x.reshape(len(x), x.shape[1] // many, many)
    words = jax.lax.bitcast_convert_type(x, _WORDS[width])
    return words.reshape(len(x), words.size // len(x))


def _from_words(words: Array, like: Array) -> Array:
    """Invert `_to_words`, for an array of the shape and dtype of `like`."""
    many = like.dtype.itemsize // words.dtype.itemsize
    words = words if many <= 1 else words.reshape(len(words), words.shape[1] // many, many)
    return jax.lax.bitcast_convert_type(words, like.dtype).reshape(like.shape)


def head_groups(num_kv_heads: int, degree: int) -> int:
    """Return the number of groups in which heads travel: 2 if each device has an even number of KV heads."""
    return 2 - num_kv_heads * kv_copies(num_kv_heads, degree) // degree % 2


def scatter_head_groups(
    parts: Sequence[Shaped[Array, "B _ _ _"]],
    axis: str,
    formats: Sequence[Format] | None = None,
    groups: int = 1,
    overlapped: Any = None,
) -> list[list[Shaped[Array, "B _ _ _"]]]:
    """Exchange all heads of one device's tokens for all tokens of its heads, by group of the heads.

    Each group travels in one dense all-to-all (ZDC §5.3). Messages follow one another, so that computation on
    the first group overlaps the second message.

    Args:
      parts: q, k and v, or other arrays; each may have its own t, N and R. Heads that U does not divide are
        sent `kv_copies` times.
      axis: mesh axis.
      formats: format of each array; default `AS_IS`.
      groups: number of equal groups of a device's heads.
      overlapped: arrays to compute during the first message, before anything that depends on it (ours).
    """
    U = jax.lax.axis_size(axis)
    formats = formats or [AS_IS] * len(parts)
    copies = [kv_copies(x.shape[2], U) for x in parts]
    all_heads = [form.expand_heads(x.shape[2]) for form, x in zip(formats, parts, strict=True)]
    # Pack before copying, so that each head is quantized once.
    packed = [
        [jnp.repeat(part, count, axis=2) for part in form.pack(x)]
        for form, x, count in zip(all_heads, parts, copies, strict=True)
    ]
    heads = [x.shape[2] * count for x, count in zip(parts, copies, strict=True)]
    waiting = [
        [_select_group(x, U, group, groups) for part in packed for x in part] for group in range(groups)
    ]
    received: list[list[Array]] = []
    for group in range(groups):
        arrived = iter(_scatter(waiting.pop(0), axis))
        own_formats = [
            _own_format(form.expand_heads(count), axis, count, group, groups)
            for form, count in zip(formats, heads, strict=True)
        ]
        unpacked = [
            form.unpack(*itertools.islice(arrived, len(sent)), dtype=x.dtype)
            for form, sent, x in zip(own_formats, packed, parts, strict=True)
        ]
        if waiting or (overlapped is not None and group == 0):
            # Without the barrier XLA sends all groups at once, and `overlapped` hides no message.
            unpacked, waiting, overlapped = jax.lax.optimization_barrier((unpacked, waiting, overlapped))
        received.append(unpacked)
    return received


def _select_group(
    x: Shaped[Array, "B t N _"], degree: int, group: int, groups: int
) -> Shaped[Array, "B t n _"]:
    """Select the heads of one group from each device's share."""
    B, t, _, C = x.shape
    return x.reshape(B, t, degree, groups, -1, C)[:, :, :, group].reshape(B, t, -1, C)


def _scatter(parts: list[Array], axis: str) -> list[Array]:
    U = jax.lax.axis_size(axis)
    by_receiver = [jnp.moveaxis(x.reshape(*x.shape[:2], U, -1, x.shape[3]), 2, 0) for x in parts]
    by_sender = all_to_all(by_receiver, axis)
    return [jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in by_sender]


def gather_head_groups(
    parts: Sequence[tuple[Float[Array, "B T n Z"], Float[Array, "B n T"] | None]],
    axis: str,
    form: Format = AS_IS,
    lse_dtype: Any = jnp.float32,
) -> tuple[Float[Array, "B t N Z"], Float[Array, "B N t"] | None]:
    """Exchange all tokens of one device's heads back for all heads of its tokens.

    Args:
      parts: output and float32 log-sum-exp, or None, for each group of `scatter_head_groups`. Both travel in
        one message.
      axis: mesh axis.
      form: format of the output.
      lse_dtype: dtype that the log-sum-exp is rounded to.
    """
    U, groups, first = jax.lax.axis_size(axis), len(parts), parts[0][0]
    all_heads = form.expand_heads(count := U * groups * first.shape[2])
    gathered = []
    for group, (o, lse) in enumerate(parts):
        sent = [*_own_format(all_heads, axis, count, group, groups).pack(o)]
        if lse is not None:
            sent.append(lse.swapaxes(1, 2)[..., None].astype(lse_dtype))
        gathered.append(_gather(sent, axis))
    arrived = [_merge_groups(each) for each in zip(*gathered, strict=True)]
    lse = parts[0][1]
    if lse is None:
        return all_heads.unpack(*arrived, dtype=first.dtype), None
    *arrived, arrived_lse = arrived
    arrived_lse = arrived_lse[..., 0].swapaxes(1, 2).astype(lse.dtype)
    return all_heads.unpack(*arrived, dtype=first.dtype), arrived_lse


def _merge_groups(groups: Sequence[Shaped[Array, "B t U n _"]]) -> Shaped[Array, "B t N _"]:
    """Merge the groups into all heads in order."""
    x = jnp.concatenate(groups, 3)
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _own_format(all_heads: Format, axis: str, count: int, group: int = 0, groups: int = 1) -> Format:
    """Return the format of the heads of one group that this device has in the exchange, of `count` in all."""
    share = count // jax.lax.axis_size(axis)
    size = share // groups
    return all_heads.slice_heads(jax.lax.axis_index(axis) * share + group * size, size)


def _gather(parts: Sequence[Shaped[Array, "B T n _"]], axis: str) -> list[Shaped[Array, "B t U n _"]]:
    U, (B, T, n, _) = jax.lax.axis_size(axis), parts[0].shape
    by_receiver = [jnp.moveaxis(x.reshape(B, U, T // U, n, x.shape[3]), 1, 0) for x in parts]
    return [jnp.moveaxis(x, 0, 2) for x in all_to_all(by_receiver, axis)]
