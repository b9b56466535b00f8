"""A piece of one text and the next tokens of others, in the same products with weights.

A decoded token reads all weights for one row of numbers, and a piece of a prompt reads them anyway. Attention
is apart: each has its own kernels.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.spec import Call, LayerCacheSpec, State
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.latent import LatentKeys
from zdc_jax.ops.rotary import UnturnedKeys


class Place(NamedTuple):
    """Of a piece: the row of the cache that it belongs to, the position of its first token, and the tokens
    that the row holds behind it; all [] int32."""

    row: Int[Array, ""]
    begin: Int[Array, ""]
    end: Int[Array, ""]


def extend_together(
    network: Transformer,
    cache: KVCache,
    place: Place,
    piece: Int[Array, " T"],
    tokens: Int[Array, " B"],
    end: Int[Array, " B"],
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "B D"], KVCache]:
    """`Transformer.extend` of a piece of one row and then of one token of each other row.

    Methods that keep tokens by position alone can do it (`pages` in their clauses): their projections treat
    all tokens alike, and a row that begins anew needs no `release`.

    Args:
      piece: padded on the right. tokens: of all rows; where `end` is what the row holds there is none, as in
        the piece's own row. end: tokens that each row holds afterwards, but the piece's.

    Returns:
      hidden states of the piece (those of padding are unspecified) and of the tokens, and the longer cache.
    """
    positions = jnp.concatenate([place.begin + jnp.arange(len(piece)), cache.lengths])[None]
    x = network.embeddings.embed(jnp.concatenate([piece, tokens])[None], positions)
    aux, states = (None, None), list(cache.layers)
    for index, (block, spec) in enumerate(zip(network.layers, cache.specs, strict=True)):
        given = x, states[index], aux, place, positions, end, cache.table, implementation
        x, states[index], aux = _layer(block, spec, *given)
    longer = replace(cache, layers=tuple(states), lengths=end.at[place.row].set(place.end))
    return x[0, : len(piece)], x[0, len(piece) :], longer


@partial(jax.jit, static_argnames=("spec", "implementation"))
def _layer(
    block: Block,
    spec: LayerCacheSpec,
    x: Float[Array, "1 T_and_B D"],
    state: State,
    aux: tuple[Any, Any],
    place: Place,
    positions: Int[Array, "1 T_and_B"],
    end: Int[Array, " B"],
    table: Int[Array, "B n"] | None,
    implementation: Implementation | None,
) -> tuple[Array, State, tuple[Any, Any]]:
    """One layer; aux: what piece and tokens hand on, each its own."""
    T = x.shape[1] - len(end)
    call = partial(Call, block.attention.scale, implementation)
    of_piece = lambda x: x[:, :T]
    of_tokens = lambda x: x[:, T:].swapaxes(0, 1)
    keys = lambda part, k: k.each(part) if isinstance(k, LatentKeys | UnturnedKeys) else part(k)
    cut = lambda part, q, k, v: (part(q), keys(part, k), part(v))
    own = None if table is None else jax.lax.dynamic_slice_in_dim(table, place.row, 1)
    # Else XLA reads rows and pages of several layers at once, and copies what is written before that.
    x, row, state = jax.lax.optimization_barrier((x, spec.row(state, place.row), state))

    def attend(*qkv: Any) -> tuple[Array, tuple[State, Any]]:
        given = *cut(of_piece, *qkv), of_piece(positions), place.end[None], aux[0]
        read = spec.attend(row, *given, call(table=own))
        held = spec.with_row(state, place.row, read.state)
        # Else XLA may copy a pool: it does not know that the piece reads it before tokens are written.
        o, held = jax.lax.optimization_barrier((read.o, held))
        given = *cut(of_tokens, *qkv), of_tokens(positions), end, aux[1]
        decoded = spec.attend(held, *given, call(table=table))
        o = jnp.concatenate([o, decoded.o.swapaxes(0, 1)], axis=1)
        return o, (decoded.state, (read.aux, decoded.aux))

    x, (state, aux) = block(x, positions, attend, implementation, partial(spec.project, aux=None))
    return x, state, aux
