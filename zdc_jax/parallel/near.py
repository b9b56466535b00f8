"""Near keys of tokens that are divided over an axis of the mesh: a halo from devices before, and the sinks.

Near attention works on these at full rank and does not wait for the exchange of truncated coordinates (ours).
"""

import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.parallel.exchange import moved
from zdc_jax.parallel.payload import AS_IS, Format


def halo_rows(window: int, tokens: int, degree: int) -> list[int]:
    """Rows that come from 1, 2, … devices before: ⌈W / t⌉ hops, fewer where there are no more devices."""
    hops = min(-(-window // tokens), degree - 1)
    return [min(tokens, window - hop * tokens) for hop in range(hops)]


def with_halo(
    k: Float[Array, "B t K H"],
    v: Float[Array, "B t K Z"],
    window: int,
    axis: str,
    formats: tuple[Format, Format] = (AS_IS, AS_IS),
) -> tuple[Float[Array, "B {window}+t K H"], Float[Array, "B {window}+t K Z"]]:
    """k and v with those of the `window` tokens before; rows before position 0 are zeros, to be masked.

    One `ppermute` of k and v together a hop, which travel in these formats; hops do not wait for one another.
    """
    U, t = jax.lax.axis_size(axis), k.shape[1]

    def from_before(distance: int, rows: int) -> list[Array]:
        packed = [form.packed(x[:, t - rows :]) for form, x in zip(formats, (k, v), strict=True)]
        parts = [part for each in packed for part in each]
        onward = [(source, source + distance) for source in range(U - distance)]
        arrived = moved(lambda x: jax.lax.ppermute(x, axis, onward), jnp.concatenate(parts, -1))
        ends = list(itertools.accumulate(part.shape[-1] for part in parts))
        split, of_k = jnp.split(arrived, ends[:-1], axis=-1), len(packed[0])
        return [
            form.unpacked(*each, dtype=x.dtype)
            for form, each, x in zip(formats, (split[:of_k], split[of_k:]), (k, v), strict=True)
        ]

    counts = halo_rows(window, t, U)
    hops = [from_before(distance, rows) for distance, rows in enumerate(counts, start=1)]
    absent = [jnp.zeros((x.shape[0], window - sum(counts), *x.shape[2:]), x.dtype) for x in (k, v)]
    past_k, past_v = (
        jnp.concatenate([none, *(hop[i] for hop in reversed(hops)), x], 1)
        for i, (none, x) in enumerate(zip(absent, (k, v), strict=True))
    )
    return past_k, past_v


def first_tokens(
    k: Float[Array, "B t K H"], v: Float[Array, "B t K Z"], count: int, axis: str
) -> tuple[Float[Array, "B P K H"], Float[Array, "B P K Z"]]:
    """k and v of the first `count` tokens on every device: a sum with the zeros of others, which is exact."""
    t = k.shape[1]
    rows = jnp.arange(count) - jax.lax.axis_index(axis) * t
    both = jnp.concatenate([k, v], -1)[:, jnp.clip(rows, 0, t - 1)]
    both = jax.lax.psum(jnp.where(((rows >= 0) & (rows < t))[:, None, None], both, 0), axis)
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]
