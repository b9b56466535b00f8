"""Values of older tokens, weighted by the attention that they get (ours).

Plans store recent tokens precisely. What they lose depends on the values that attention reads among others.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from zdc_jax.axes import Array
from zdc_jax.model.observe import Seen
from zdc_jax.planning.profile import SINKS, cost_window, windows_for

STEP = 4
"""Distance of the queries whose attention counts. A sample of them suffices for a mean."""
QUERIES = 512
"""Queries whose attention weights are in memory at once."""


def sum_far_values(seen: Seen, weight: Bool[Array, " B"]) -> dict[str, Array]:
    """Sum the values of a layer, each weighted by its attention from every fourth query.

    A query counts tokens that are neither sinks nor in its window, which is that of other measurements.

    Args:
      seen: what the layer attends to.
      weight: whether a window of text counts, [B].

    Returns:
      v_far, the weighted sum of values, [K, H], and far, the sum of the weights, [K]; float32.
    """
    B, T, K, H = seen.v.shape
    queries = -(-T // STEP)
    size = min(queries, QUERIES)
    blocks = -(-queries // size)
    padding = (0, blocks * size - queries)
    q = jnp.pad(seen.q[:, ::STEP].astype(jnp.float32), ((0, 0), padding, (0, 0), (0, 0)))
    # Padding has no weight.
    lse = jnp.pad(seen.lse[..., ::STEP], ((0, 0), (0, 0), padding), constant_values=jnp.inf)
    q = jnp.moveaxis(q.reshape(B, blocks, size, K, -1, H), 1, 0)
    lse = jnp.moveaxis(lse.reshape(B, K, -1, blocks, size), 3, 0)
    is_far = jnp.pad(_list_far(T, seen.attention.spec.window)[::STEP], (padding, (0, 0)))

    def weigh(block: tuple[Array, Array, Array]) -> Float[Array, "B K T"]:
        q, lse, is_far = block
        scores = jnp.einsum("BQKGH,BTKH->BKGQT", q, seen.exact_k) * seen.attention.scale
        return jnp.where(is_far, jnp.exp(scores - lse[..., None]), 0).sum((2, 3))

    with jax.default_matmul_precision("highest"):
        weights = jax.lax.map(weigh, (q, lse, is_far.reshape(blocks, size, T))).sum(0) * weight[:, None, None]
        values = jnp.einsum("BKT,BTKH->KH", weights, seen.v.astype(jnp.float32))
    return {"v_far": values, "far": weights.sum((0, 2))}


def _list_far(tokens: int, sliding: int | None) -> Bool[Array, "T T"]:
    """Return for each query which tokens it attends to that are neither sinks nor in its window."""
    windows = windows_for(tokens)
    query, token = jnp.arange(tokens)[:, None], jnp.arange(tokens)
    is_far = (token <= query - windows[cost_window(windows)]) & (token >= SINKS)
    return is_far if sliding is None else is_far & (token > query - sliding)
