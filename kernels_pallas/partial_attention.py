"""Merge of partial attention over disjoint keys, by the log-sum-exp of each part."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def merge_partial(
    parts: Sequence[tuple[Float[Array, "B T N _"], Float[Array, "B N T"]]],
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Merge partial attention over disjoint keys, in float32; narrower outputs are zero-padded to the widest.

    A part without visible keys (zeros, log-sum-exp -inf) has no weight, even if all parts are such.
    """
    width = max(o.shape[-1] for o, _ in parts)
    # Do not stack: that would be a separate launch.
    highest = functools.reduce(jnp.maximum, (lse for _, lse in parts))
    weights = [jnp.exp(lse - jnp.where(jnp.isfinite(highest), highest, 0.0)) for _, lse in parts]
    total = functools.reduce(jnp.add, weights)

    def share(weight):
        return (weight / jnp.where(total > 0, total, 1.0)).swapaxes(1, 2)[..., None]

    def pad(o):
        return jnp.pad(o.astype(jnp.float32), [(0, 0)] * 3 + [(0, width - o.shape[-1])])

    merged = sum(pad(o) * share(weight) for (o, _), weight in zip(parts, weights, strict=True))
    return jnp.asarray(merged, parts[0][0].dtype), jnp.log(total) + jnp.where(total > 0, highest, 0.0)
