"""One walk over the layers on whole sequences, from which calibration takes its measurements."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.model.attention import Attention
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.new_keys import NewKeys


class Seen(NamedTuple):
    """Inputs and results of one layer on whole sequences, with its own mask, rotary embedding and scale.

    Attributes:
      x: input of the layer, [B, T, D].
      q: queries as attention sees them, [B, T, N, H].
      k: keys as attention sees them, [B, T, K, H].
      exact_k: keys of an unmodified network before they are rounded, [B, T, K, H] float32.
      v: values, [B, T, K, H].
      o: output of attention, [B, T, N, H].
      lse: log-sum-exp of the scaled scores, [B, N, T].
      block_scores: what scaled scores gain where the plan shifts keys, or None (`zdc_jax.ops.shift`).
      attention: the layer's attention module.
    """

    x: Array
    q: Array
    k: Array
    exact_k: Array
    v: Array
    o: Array
    lse: Array
    block_scores: Array | None
    attention: Attention


Tap = Callable[..., Any]
"""Measurement of one layer from its `Seen`; returns any tree of arrays.

Use a module-level function: it is hashed.
"""


def observe(
    network: Transformer, tokens: Int[Array, "B T"], tap: Tap, given: Sequence[Any] | None = None
) -> list[Any]:
    """Return what `tap` measures in each layer of an unmodified (or only rotated) network, in order.

    The network's plan is ignored: every layer attends as the checkpoint defines it. With `given`, `tap` gets
    the entry of its layer as a second argument.
    """
    x = network.embeddings.embed(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    measurements = []
    for index, block in enumerate(network.layers):
        x, measured = observe_layer(block, x, tap, *([] if given is None else [given[index]]))
        measurements.append(measured)
    return measurements


@partial(jax.jit, static_argnames="tap")
def observe_layer(
    block: Block, x: Float[Array, "B T D"], tap: Tap, *given: Any
) -> tuple[Float[Array, "B T D"], Any]:
    """Run one layer on whole sequences; return its output and what `tap` measures.

    The function is jitted so that equal layers compile once.
    """

    def project(attention: Attention, x: Array, positions: Array, _: Any) -> tuple[Array, NewKeys, Any]:
        q, k, v = attention.project(x, positions)
        return q, k, (v, attention.project_exact_keys(x, positions))

    def attend(q: Array, k: NewKeys, values: tuple[Array, Array]) -> tuple[Array, Any]:
        v, exact_k = values
        o, lse = block.attention.attend(q, k, v)
        scores = k.block_scores(q.shape[1], block.attention.scale)
        return o, tap(Seen(x, q, k.keys, exact_k, v, o, lse, scores, block.attention), *given)

    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    return block(x, positions, attend, project=project)
