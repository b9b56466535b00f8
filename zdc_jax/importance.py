"""How important is a token? From softmax denominators (ZDC §5.2), which attention gives as a by-product."""

import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Float, Int

from zdc_jax.axes import Array


def token_importance(
    lse: Float[Array, "B N T"], visible: Int[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
    """log Σ_heads Σ_keys exp(score) of each query token, float32: the paper's importance, monotone in it.

    A token later in the sequence sums over more keys. With `visible`, how many each query sees, that trend
    is taken off: the mean instead of the sum over keys (ours).
    """
    importance = logsumexp(lse.astype(jnp.float32), axis=1)
    return importance if visible is None else importance - jnp.log(visible.astype(jnp.float32))
