"""Near keys of tokens divided over a mesh axis: the halo from preceding devices, and the sinks.

Near attention uses these at full rank and need not wait for the exchange of truncated coordinates (ours).
"""

import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.parallel.exchange import moved
from zdc_jax.parallel.payload import AS_IS, Format


def halo_rows(window: int, tokens: int, degree: int) -> list[int]:
    """Return the numbers of tokens received from 1, 2, … devices before.

    There are ⌈W / t⌉ hops, or fewer if there are fewer devices.
    """
    hops = min(-(-window // tokens), degree - 1)
    return [min(tokens, window - hop * tokens) for hop in range(hops)]


def with_halo(
    k: Float[Array, "B t K H"],
    v: Float[Array, "B t K Z"],
    window: int,
    axis: str,
    formats: tuple[Format, Format] = (AS_IS, AS_IS),
) -> tuple[Float[Array, "B {window}+t K H"], Float[Array, "B {window}+t K Z"]]:
    """Prepend the keys and values of the `window` preceding tokens.

    Entries at positions below 0 are zeros, to be masked. Each hop is one `ppermute` of k and v together, in
    the given formats. Hops are independent of one another.
    """
    U, t = jax.lax.axis_size(axis), k.shape[1]

    def receive(distance: int, count: int) -> list[Array]:
        packed_k, packed_v = (form.pack(x[:, t - count :]) for form, x in zip(formats, (k, v), strict=True))
        parts = [*packed_k, *packed_v]
        routes = [(source, source + distance) for source in range(U - distance)]
        arrived = moved(lambda x: jax.lax.ppermute(x, axis, routes), jnp.concatenate(parts, -1))
        ends = list(itertools.accumulate(part.shape[-1] for part in parts))
        split = jnp.split(arrived, ends[:-1], axis=-1)
        parts_k, parts_v = split[: len(packed_k)], split[len(packed_k) :]
        return [
            form.unpack(*received, dtype=x.dtype)
            for form, received, x in zip(formats, (parts_k, parts_v), (k, v), strict=True)
        ]

    counts = halo_rows(window, t, U)
    hops = [receive(distance, count) for distance, count in enumerate(counts, start=1)]
    absent = [jnp.zeros((x.shape[0], window - sum(counts), *x.shape[2:]), x.dtype) for x in (k, v)]
    past_k, past_v = (
        jnp.concatenate([zeros, *(hop[i] for hop in reversed(hops)), x], 1)
        for i, (zeros, x) in enumerate(zip(absent, (k, v), strict=True))
    )
    return past_k, past_v


def first_tokens(
    k: Float[Array, "B t K H"], v: Float[Array, "B t K Z"], count: int, axis: str
) -> tuple[Float[Array, "B P K H"], Float[Array, "B P K Z"]]:
    """Return k and v of the first `count` tokens on every device.

    Each token is on one device. The sum with the zeros of the others is exact.
    """
    t = k.shape[1]
    rows = jnp.arange(count) - jax.lax.axis_index(axis) * t
    both = jnp.concatenate([k, v], -1)[:, jnp.clip(rows, 0, t - 1)]
    both = jax.lax.psum(jnp.where(((rows >= 0) & (rows < t))[:, None, None], both, 0), axis)
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]
