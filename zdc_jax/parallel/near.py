"""Near keys of tokens that are divided over an axis of the mesh: a halo from devices before, and the sinks.

Near attention works on these at full rank and does not wait for the exchange of truncated coordinates (ours).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.parallel.exchange import moved


def halo_rows(window: int, tokens: int, degree: int) -> list[int]:
    """Rows that come from 1, 2, … devices before: ⌈W / t⌉ hops, fewer where there are no more devices."""
    hops = min(-(-window // tokens), degree - 1)
    return [min(tokens, window - hop * tokens) for hop in range(hops)]


def with_halo(
    k: Float[Array, "B t K H"], v: Float[Array, "B t K H"], window: int, axis: str
) -> tuple[Float[Array, "B {window}+t K H"], Float[Array, "B {window}+t K H"]]:
    """k and v with those of the `window` tokens before; rows before position 0 are zeros, to be masked.

    One `ppermute` of k and v together a hop; hops do not wait for one another.
    """
    U, t = jax.lax.axis_size(axis), k.shape[1]

    def from_before(distance: int, rows: int) -> Array:
        tail = jnp.concatenate([k[:, t - rows :], v[:, t - rows :]], -1)
        onward = [(source, source + distance) for source in range(U - distance)]
        return moved(lambda x: jax.lax.ppermute(x, axis, onward), tail)

    counts = halo_rows(window, t, U)
    hops = [from_before(distance, rows) for distance, rows in enumerate(counts, start=1)]
    absent = jnp.zeros((k.shape[0], window - sum(counts), k.shape[2], 2 * k.shape[3]), k.dtype)
    past = jnp.concatenate([absent, *reversed(hops)], 1)
    past_k, past_v = jnp.split(past, [k.shape[3]], axis=-1)
    return jnp.concatenate([past_k, k], 1), jnp.concatenate([past_v, v], 1)


def first_tokens(
    k: Float[Array, "B t K H"], v: Float[Array, "B t K H"], count: int, axis: str
) -> tuple[Float[Array, "B P K H"], Float[Array, "B P K H"]]:
    """k and v of the first `count` tokens on every device: a sum with the zeros of others, which is exact."""
    t = k.shape[1]
    rows = jnp.arange(count) - jax.lax.axis_index(axis) * t
    both = jnp.concatenate([k, v], -1)[:, jnp.clip(rows, 0, t - 1)]
    both = jax.lax.psum(jnp.where(((rows >= 0) & (rows < t))[:, None, None], both, 0), axis)
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]
