"""What happens inside the layers on whole sequences: one walk for all that calibration measures."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.model.attention import Attention
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Transformer


class Seen(NamedTuple):
    """One layer on whole sequences, under its own mask, rotary embedding and scale.

    x [B, T, D] enters it; q [B, T, N, H], k and v [B, T, K, H] as attention sees them; o [B, T, N, H] and lse
    [B, N, T], the log-sum-exp of scaled scores, are what attention gives; attention: the module.
    """

    x: Array
    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array
    attention: Attention


Tap = Callable[[Seen], Any]
"""What is taken of a layer: any tree of arrays. A module's function, so that programs compile once."""


def observe(network: Transformer, tokens: Int[Array, "B T"], tap: Tap) -> list[Any]:
    """What `tap` gives in each layer of an unmodified (or only rotated) network, in order.

    The plan of the network plays no part: every layer attends as its checkpoint says.
    """
    x = network.embeddings.embed(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    found = []
    for block in network.layers:
        x, taken = observe_layer(block, x, tap)
        found.append(taken)
    return found


@partial(jax.jit, static_argnames="tap")
def observe_layer(block: Block, x: Float[Array, "B T D"], tap: Tap) -> tuple[Float[Array, "B T D"], Any]:
    """One layer on whole sequences, and what `tap` gives. Jitted, so that layers alike compile once."""

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        o, lse = block.attention.attend(q, k, v)
        return o, tap(Seen(x, q, k, v, o, lse, block.attention))

    return block(x, jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]), attend)
