"""Pieces of texts and the next tokens of others, in the same products with weights.

A decoded token reads all weights for one row of numbers, and a piece of a prompt reads them anyway. Pieces of
several texts stand one behind another, so that one padding serves all. Attention is apart: tokens and pieces
have kernels of their own, and to these each piece is a row, padded to all tokens of the step.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.spec import Call, LayerCacheSpec, State
from zdc_jax.model.block import Block, of_each
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation


class Place(NamedTuple):
    """Of P pieces: the row of the cache that each belongs to, the position of its first token, and the tokens
    that the row holds behind it; all [P] int32. A piece that is none has no tokens, and a number that is no
    row's."""

    row: Int[Array, " P"]
    begin: Int[Array, " P"]
    end: Int[Array, " P"]

    def held(self, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        """What rows hold behind the pieces, where the others hold `lengths`."""
        return lengths.at[self.row].set(self.end, mode="drop")


class Packing(NamedTuple):
    """T tokens of pieces, one piece behind another, and each piece as a row of T.

    piece, offset [T] int32: of each token its piece, and where it stands there; padding is of the last.
    source [P, T] int32: where the tokens of each piece stand; behind its last, any.
    """

    piece: Int[Array, " T"]
    offset: Int[Array, " T"]
    source: Int[Array, "P T"]

    @classmethod
    def of(cls, place: Place, T: int) -> "Packing":
        """Of pieces with T tokens at most, together."""
        behind = jnp.cumsum(place.end - place.begin)
        first = behind - (place.end - place.begin)
        token = jnp.arange(T, dtype=jnp.int32)
        piece = jnp.minimum(jnp.sum(token[:, None] >= behind, axis=1), len(first) - 1)
        source = jnp.minimum(first[:, None] + token, T - 1)
        return cls(piece.astype(jnp.int32), token - first[piece], source)

    def apart(self, x: Shaped[Array, "1 T *rest"]) -> Shaped[Array, "P T *rest"]:
        """What is of tokens, each piece in a row of its own."""
        return x if len(self.source) == 1 else x[0][self.source]

    def packed(self, x: Shaped[Array, "P T *rest"]) -> Shaped[Array, "1 T *rest"]:
        """The reverse."""
        return x if len(self.source) == 1 else x[self.piece, self.offset][None]


def extend_together(
    network: Transformer,
    cache: KVCache,
    place: Place,
    pieces: Int[Array, " T"],
    tokens: Int[Array, " B"],
    end: Int[Array, " B"],
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "B D"], KVCache]:
    """`Transformer.extend` of pieces of some rows and then of one token of each other row.

    Methods that keep tokens by position alone can do it (`pages` in their clauses): their projections treat
    all tokens alike, and a row that begins anew needs no `release`.

    Args:
      place: of pieces, no two of one row. pieces: their tokens, one piece behind another, then padding.
      tokens: of all rows; where `end` is what the row holds there is none, as in the rows of pieces.
      end: tokens that each row holds afterwards, but those of pieces.

    Returns:
      hidden states of pieces (those of padding are unspecified) and of tokens, and the longer cache.
    """
    packing = Packing.of(place, len(pieces))
    in_pieces = place.begin[packing.piece] + packing.offset
    positions = jnp.concatenate([in_pieces, cache.lengths])[None]
    x = network.embeddings.embed(jnp.concatenate([pieces, tokens])[None], positions)
    aux, states = (None, None), list(cache.layers)
    for index, (block, spec) in enumerate(zip(network.layers, cache.specs, strict=True)):
        given = x, states[index], aux, place, packing, positions, end, cache.table, implementation
        x, states[index], aux = _layer(block, spec, *given)
    longer = replace(cache, layers=tuple(states), lengths=place.held(end))
    return x[0, : len(pieces)], x[0, len(pieces) :], longer


@partial(jax.jit, static_argnames=("spec", "implementation"))
def _layer(
    block: Block,
    spec: LayerCacheSpec,
    x: Float[Array, "1 T_and_B D"],
    state: State,
    aux: tuple[Any, Any],
    place: Place,
    packing: Packing,
    positions: Int[Array, "1 T_and_B"],
    end: Int[Array, " B"],
    table: Int[Array, "B n"] | None,
    implementation: Implementation | None,
) -> tuple[Array, State, tuple[Any, Any]]:
    """One layer; aux: what pieces and tokens hand on, each their own."""
    T = x.shape[1] - len(end)
    call = partial(Call, block.attention.scale, implementation)

    def of_pieces(x):
        return packing.apart(x[:, :T])

    def of_tokens(x):
        return x[:, T:].swapaxes(0, 1)

    own = None if table is None else jnp.take(table, place.row, axis=0, mode="clip")
    new = place.begin[:, None] + jnp.arange(T)
    # Else XLA reads rows and pages of several layers at once, and copies what is written before that.
    x, rows, state = jax.lax.optimization_barrier((x, spec.of_rows(state, place.row), state))

    def attend(*qkv: Any) -> tuple[Array, tuple[State, Any]]:
        given = *of_each(of_pieces, *qkv), new, place.end, aux[0]
        read = spec.attend(rows, *given, call(table=own))
        held = spec.with_rows(state, place.row, read.state)
        # Else XLA may copy a pool: it does not know that pieces read it before tokens are written.
        o, held = jax.lax.optimization_barrier((packing.packed(read.o), held))
        given = *of_each(of_tokens, *qkv), of_tokens(positions), end, aux[1]
        decoded = spec.attend(held, *given, call(table=table))
        o = jnp.concatenate([o, decoded.o.swapaxes(0, 1)], axis=1)
        return o, (decoded.state, (read.aux, decoded.aux))

    x, (state, aux) = block(x, positions, attend, implementation, partial(spec.project, aux=None))
    return x, state, aux
