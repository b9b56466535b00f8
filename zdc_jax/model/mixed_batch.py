"""One pass over prefill chunks of some sequences and the next tokens of others.

Decoding one token reads all weights for a single vector; a prefill chunk reads the same weights anyway. The
chunks of several sequences are concatenated and share one padding. Attention stays separate, because decode
and prefill have their own kernels: prefill kernels get one padded sequence per chunk.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache, LayerView
from zdc_jax.cache.specs.spec import Call, LayerCacheSpec, NewTokens, Snapshots, State
from zdc_jax.cache.tails import TailArrays
from zdc_jax.model.block import Block, HalfLayer, map_tokens
from zdc_jax.model.run_layer import finish_layer
from zdc_jax.model.tiles import attend_one_by_one
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.new_keys import NewKeys

NOWHERE = 2**30
"""Row of a sequence outside the batch, where a cache has rows of several layers."""


class Place(NamedTuple):
    """Cache rows and positions of P prefill chunks, all [P] int32.

    An empty entry has no tokens and a row number outside the batch.

    Attributes:
      row: row of the cache that the chunk extends.
      begin: position of the chunk's first token.
      end: number of tokens in the row after the chunk.
      mark: number of tokens in the row at which a snapshot is taken of what it stores outside pages.
      slot: slot of that snapshot. It is dropped if there is no such slot.
    """

    row: Int[Array, " P"]
    begin: Int[Array, " P"]
    end: Int[Array, " P"]
    mark: Int[Array, " P"]
    slot: Int[Array, " P"]

    def lengths_after(self, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        """Return the lengths of all rows after the chunks, given those of the other rows."""
        return lengths.at[self.row].set(self.end, mode="drop")


class Packing(NamedTuple):
    """Indices between T concatenated chunk tokens and P chunks, each padded to C tokens.

    Attributes:
      chunk: chunk index of each token, [T] int32; padding belongs to the last chunk.
      offset: index of each token within its chunk, [T] int32.
      source: index of each chunk's tokens in the concatenation, [P, C] int32; T after its last token.
    """

    chunk: Int[Array, " T"]
    offset: Int[Array, " T"]
    source: Int[Array, "P C"]

    @classmethod
    def of(cls, place: Place, T: int, C: int) -> "Packing":
        """Create the indices for chunks of at most T tokens in total and C tokens each."""
        last = jnp.cumsum(place.end - place.begin)
        first = last - (place.end - place.begin)
        token = jnp.arange(T, dtype=jnp.int32)
        chunk = jnp.minimum(jnp.sum(token[:, None] >= last, axis=1), len(first) - 1)
        source = jnp.where(token < (last - first)[:, None], first[:, None] + token, T)[:, :C]
        return cls(chunk.astype(jnp.int32), token - first[chunk], source)

    def split(self, x: Shaped[Array, "1 T *rest"]) -> Shaped[Array, "P C *rest"]:
        """Split concatenated tokens into one sequence per chunk, padded with zeros.

        Attention multiplies padding by 0, and tokens of another sequence could be NaN.
        """
        if len(self.source) == 1:
            return x
        return jnp.take(x[0], self.source, axis=0, mode="fill", fill_value=0)

    def pack(self, x: Shaped[Array, "P C *rest"]) -> Shaped[Array, "1 T *rest"]:
        """Concatenate the tokens of padded chunks; the inverse of `split`."""
        return x if len(self.source) == 1 else x[self.chunk, self.offset][None]


class MixedResult(NamedTuple):
    """Result of `extend_together` for P chunks and b tokens.

    Attributes:
      ends: hidden state of the last token of each chunk.
      tokens: hidden states of the tokens.
      half: last layer for all T tokens of the chunks, [1, T, …], unspecified for padding and for tokens that
        are not needed.
      cache: extended cache.
      tails: snapshots with those of `Place`; None if none are taken.
    """

    ends: Float[Array, "P D"]
    tokens: Float[Array, "b D"]
    half: HalfLayer
    cache: KVCache
    tails: TailArrays | None


def extend_together(
    network: Transformer,
    cache: KVCache,
    place: Place,
    chunks: Int[Array, " T"],
    tokens: Int[Array, " b"],
    end: Int[Array, " b"],
    longest: int | None = None,
    tails: TailArrays | None = None,
    needed_from: Int[Array, " P"] | None = None,
) -> MixedResult:
    """Extend some rows of a cache by chunks, and each other row by at most one token.

    The result is that of `Transformer.extend_half` on the chunks, then of `extend` on the tokens. The caches
    must support the clause `pages` (`cache.specs.spec`): they store tokens by position alone, and a new
    request needs no `release`.

    Args:
      network: the model.
      cache: its cache.
      place: rows and positions of the chunks, at most one per row.
      chunks: tokens of the chunks, concatenated, then padding.
      tokens: next token of each of the first b rows; others get none. It is ignored where `end` equals the
        row's length, as in rows with chunks.
      end: number of tokens in each of these rows afterwards, without those of the chunks.
      longest: most tokens of each of several chunks; default T.
      tails: snapshots; None takes none.
      needed_from: first position of each chunk for which `MixedResult.half` is needed; None means all.
    """
    T, count = len(chunks), len(tokens)
    packing = Packing.of(place, T, T if longest is None or len(place.row) == 1 else longest)
    chunk_positions = place.begin[packing.chunk] + packing.offset
    positions = jnp.concatenate([chunk_positions, cache.lengths[:count]])[None]
    x = network.embeddings.embed(jnp.concatenate([chunks, tokens])[None], positions)
    aux: tuple[Any, Any] = (None, None)
    for index, (block, spec) in enumerate(zip(network.layers, cache.specs, strict=True)):
        snapshots = tails and tails.of_layer(index, place.mark, place.slot)
        view = cache.of_layer(index)
        is_last = index == len(network.layers) - 1
        half, state, aux, copies = _start_layer(
            block,
            spec,
            x,
            view,
            aux,
            place,
            packing,
            positions,
            end,
            snapshots,
            needed_from=needed_from if is_last else None,
        )
        if not is_last:
            x = finish_layer(block, half)
        cache, tails = cache.with_layer(index, state), tails and tails.with_layer(index, copies)
    lengths = place.lengths_after(jnp.concatenate([end, cache.lengths[count:]]))
    ends = jnp.clip(jnp.cumsum(place.end - place.begin) - 1, 0)
    hidden = network.finish(half.take(jnp.concatenate([ends, T + jnp.arange(count)])[None]))[0]
    return MixedResult(
        ends=hidden[: len(ends)],
        tokens=hidden[len(ends) :],
        half=jax.tree.map(lambda each: each[:, :T], half),
        cache=replace(cache, lengths=lengths),
        tails=tails,
    )


@partial(jax.jit, static_argnames="spec")
def _start_layer(
    block: Block,
    spec: LayerCacheSpec,
    x: Float[Array, "1 T_and_b D"],
    view: LayerView,
    aux: tuple[Any, Any],
    place: Place,
    packing: Packing,
    positions: Int[Array, "1 T_and_b"],
    end: Int[Array, " b"],
    snapshots: Snapshots | None,
    needed_from: Int[Array, " P"] | None,
) -> tuple[HalfLayer, State, tuple[Any, Any], list[Array]]:
    """Extend the cache by one layer's keys and values of chunks and tokens.

    `aux` has two parts: what the previous layer hands on for the chunks, and for the tokens. The last result
    has the leaves of the layer's snapshots.
    """
    count, T, (state, table, first) = len(end), x.shape[1] - len(end), view
    call = partial(Call, block.attention.scale)

    def take_chunks(x: Array) -> Array:
        return packing.split(x[:, :T])

    def take_tokens(x: Array) -> Array:
        return x[:, T:].swapaxes(0, 1)

    chunk_table = None if table is None else jnp.take(table, place.row, axis=0, mode="clip")
    token_table = None if table is None else table[:count]
    rows = place.row
    if first is not None:
        assert table is not None  # Only layers with pages share arrays.
        rows = jnp.where(place.row < len(table), place.row + first, NOWHERE)
    chunk_positions = place.begin[:, None] + jnp.arange(packing.source.shape[1])
    # Without the barrier XLA reads rows and pages of several layers at once and copies the written buffers.
    x, state = jax.lax.optimization_barrier((x, state))

    def attend_alike(q: Array, k: NewKeys, v: Any) -> tuple[Array, tuple[State, Any, list[Array]]]:
        assert first is None
        batch = jnp.arange(count)
        of_token = jnp.concatenate([place.row[packing.chunk], batch])
        ends = jnp.concatenate([place.end[packing.chunk], end])
        attended = attend_one_by_one(
            spec, state, q, k, v, of_token[None], positions, ends[None], aux[0], call(table=table)
        )
        return attended.o, (attended.state, (attended.aux, None), [])

    def attend_apart(*qkv: Any) -> tuple[Array, tuple[State, Any, list[Array]]]:
        q, k, v = map_tokens(take_chunks, *qkv)
        of_chunks = call(table=chunk_table, needed_from=needed_from)
        new = NewTokens(k, v, chunk_positions, place.end)
        prefilled, copies = spec.attend_sequences(state, rows, q, new, aux[0], of_chunks, snapshots)
        if not count:
            return packing.pack(prefilled.o), (prefilled.state, (prefilled.aux, None), copies)
        # Without the barrier XLA may copy a pool: it cannot see that chunks read it before tokens write it.
        o, updated = jax.lax.optimization_barrier((packing.pack(prefilled.o), prefilled.state))
        q, k, v = map_tokens(take_tokens, *qkv)
        some, of_tokens = spec.first_rows(updated, count), call(table=token_table, first=first)
        new = NewTokens(k, v, take_tokens(positions), end)
        decoded = spec.attend(some, q, new, aux[1], of_tokens)
        o = jnp.concatenate([o, decoded.o.swapaxes(0, 1)], axis=1)
        return o, (spec.with_first_rows(updated, decoded.state), (prefilled.aux, decoded.aux), copies)

    attend = attend_alike if block.reproducible else attend_apart
    half, (state, aux, copies) = block.start(x, positions, attend, project=spec.project)
    return half, state, aux, copies
