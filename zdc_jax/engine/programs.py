"""Steps of an engine on the device: the functions that `zdc_jax.engine.runner` compiles.

Each takes the network, the state of the batch and packed numbers, and returns the new state and a result.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax.numpy as jnp

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.tails import TailArrays
from zdc_jax.generation.next_token import Choice
from zdc_jax.generation.packed_parameters import WIDTH
from zdc_jax.generation.steps import (
    DecodeState,
    Flat,
    Frontier,
    SampledTokens,
    advance,
    decode_steps,
    select_active,
)
from zdc_jax.model.block import HalfLayer
from zdc_jax.model.mixed_batch import Place, extend_together
from zdc_jax.model.transformer import Transformer

CHUNK_HEADER = 7
"""Numbers before a packed chunk's tokens.

Batch index, first position, token count, end of text, tokens of a snapshot, the slot of that snapshot, and
the first position whose hidden state is needed.
"""


class PrefillState(NamedTuple):
    """State that prefill updates.

    Attributes:
      batch: state of the batch.
      tails: snapshots of state outside pages; None if there are none.
    """

    batch: DecodeState
    tails: TailArrays | None


class FlatState(NamedTuple):
    """A `DecodeState` between two programs: its cache is flattened, without the page table.

    Attributes:
      cache: KV cache.
      last: newest token of each sequence, [B] int32.
      done: whether that token is a stop token, [B] bool.
    """

    cache: Flat[KVCache]
    last: Array
    done: Array

    @classmethod
    def of(cls, state: DecodeState) -> "FlatState":
        """Flatten a state."""
        return cls(Flat.of(replace(state.cache, table=None)), state.last, state.done)

    def with_table(self, table: Array | None) -> DecodeState:
        """Return the whole state with a page table."""
        return DecodeState(replace(self.cache.whole, table=table), self.last, self.done)


class FlatPrefillState(NamedTuple):
    """A `PrefillState` between two programs."""

    batch: FlatState
    tails: Flat[TailArrays | None]

    @classmethod
    def of(cls, state: PrefillState) -> "FlatPrefillState":
        """Flatten a state."""
        return cls(FlatState.of(state.batch), Flat.of(state.tails))

    def with_table(self, table: Array | None) -> PrefillState:
        """Return the whole state with a page table."""
        return PrefillState(self.batch.with_table(table), self.tails.whole)


def run_flat[S: (FlatState, FlatPrefillState)](
    step: Callable[..., tuple[Any, Any]], flat: Flat[Transformer], state: S, table: Array, packed: Array
) -> tuple[S, Any]:
    """Run a step with a page table; return the state and the result."""
    new, result = step(flat.whole, state.with_table(table), packed)
    return type(state).of(new), result


def advance_in_place(
    flat: Flat[Transformer],
    cache: Flat[KVCache],
    earlier: Frontier,
    last: Array,
    done: Array,
    table: Array,
    packed: Array,
) -> tuple[Flat[KVCache], Frontier]:
    """Run `decode_once` with a page table; the result takes the place of an earlier one.

    The step is a CUDA graph. If all its arrays keep their places, it starts without an update.
    """
    state = FlatState(cache, last, done).with_table(table)
    new, frontier = decode_once(flat.whole, state, packed)
    return FlatState.of(new).cache, frontier


def prefill_chunk(
    network: Transformer, state: PrefillState, packed: Array
) -> tuple[PrefillState, tuple[tuple[Frontier], HalfLayer, None]]:
    """Prefill one chunk of one sequence; return its frontier, and the last layer for all its tokens.

    The sequence's own part of the cache is taken out and put back. A snapshot is that of the chunk's end.
    """
    batch = state.batch
    row, begin, count, last, _, slot, needed_from = packed[:CHUNK_HEADER]
    cache, tokens, end = batch.cache.row(row), packed[CHUNK_HEADER:], begin + count
    cache = replace(cache, lengths=begin[None]).release(begin[None] == 0)
    half, cache = network.extend_half(cache, tokens[None], end[None], needed_from=needed_from[None])
    frontier = Frontier(network.finish_last(half, count[None]), last[None].astype(bool), end[None])
    tails = state.tails and state.tails.put(cache.own, slot[None])
    batch = batch._replace(cache=batch.cache.with_row(row, cache))
    return PrefillState(batch, tails), ((frontier,), half, None)


def prefill_and_decode(
    several: int, longest: int, rows: int, network: Transformer, state: PrefillState, packed: Array
) -> tuple[PrefillState, tuple[tuple[Frontier, ...], HalfLayer, Frontier]]:
    """Prefill chunks of `several` sequences and run one decode step of the first `rows` sequences.

    Each of several chunks has at most `longest` tokens. Sequences with chunks get no decode step.

    Returns the state, the frontiers of the chunks, the last layer for all their tokens, and the frontier of
    the active sequences.
    """
    headers_size, rows_at = several * CHUNK_HEADER, len(packed) - rows * (1 + WIDTH)
    headers = packed[:headers_size].reshape(several, CHUNK_HEADER)
    tokens, packed_rows = packed[headers_size:rows_at], packed[rows_at:].reshape(rows, 1 + WIDTH)
    row, begin, count, last, mark, slot, needed_from = headers.T
    place, (batch, tails) = Place(row, begin, begin + count, mark, slot), state
    wanted, numbers, lengths = packed_rows[:, 0].astype(bool), packed_rows[:, 1:], batch.cache.lengths
    decoding, active, end = select_active(batch.first(rows), wanted, numbers)
    result = extend_together(
        network,
        replace(batch.cache, lengths=jnp.concatenate([decoding.lengths, lengths[rows:]])),
        place,
        tokens,
        batch.last[:rows],
        end,
        longest=longest,
        # Tokens that attend one by one store snapshots only where chunks end.
        tails=None if network.reproducible else tails,
        needed_from=needed_from,
    )
    kept = jnp.concatenate([jnp.where(wanted, end, lengths[:rows]), lengths[rows:]])
    cache, new_tails = replace(result.cache, lengths=place.lengths_after(kept)), result.tails
    if network.reproducible and tails:
        own = [[jnp.take(leaf, row, axis=0, mode="clip") for leaf in layer] for layer in cache.own]
        new_tails = tails.put(own, slot)
    frontiers = tuple(
        Frontier(result.ends[one], last[one].astype(bool), place.end[one])
        for one in (slice(i, i + 1) for i in range(several))
    )
    state = PrefillState(batch._replace(cache=cache), new_tails)
    return state, (frontiers, result.half, Frontier(result.tokens, active, end))


def prefill_whole(
    network: Transformer, state: PrefillState, packed: Array
) -> tuple[PrefillState, tuple[tuple[Frontier], None, None]]:
    """Prefill the whole text of one sequence, split over the mesh axis `sequence`, and store it in pages."""
    batch = state.batch
    row, _, count, *_ = packed[:CHUNK_HEADER]
    tokens, cache = packed[CHUNK_HEADER:], batch.cache.row(row)
    capacity, pages = batch.cache.capacity, cast(Array, cache.table)
    hidden, prompt_cache = network.prefill(tokens[None], count[None], capacity=capacity)
    layers = tuple(
        cast(Paged, spec).put_prompt(layer, prompt_layer, len(tokens), count[None], pages)
        for spec, layer, prompt_layer in zip(cache.specs, cache.layers, prompt_cache.layers, strict=True)
    )
    cache = replace(cache, layers=layers, lengths=count[None])
    frontier = Frontier(hidden, jnp.ones(1, bool), count[None])
    batch = batch._replace(cache=batch.cache.with_row(row, cache))
    return state._replace(batch=batch), ((frontier,), None, None)


def decode_once(network: Transformer, state: DecodeState, packed: Array) -> tuple[DecodeState, Frontier]:
    """Run the layers of one decode step of all active sequences."""
    cache, frontier = advance(network, state, packed[:, 0].astype(bool), packed[:, 1:])
    return state._replace(cache=cache), frontier


def decode_loop(
    steps: int, choice: Choice, network: Transformer, state: DecodeState, packed: Array
) -> tuple[DecodeState, SampledTokens]:
    """Run `steps` decode steps of the first sequences of the batch, those in `packed`.

    The host is asked nothing in between.
    """
    some, wanted = state.first(len(packed)), packed[:, 0].astype(bool)
    some, chosen = decode_steps(network, some, wanted, packed[:, 1:], None, steps, choice)
    return state.with_first(some), chosen


def restore_tail(cache: Flat[KVCache], tails: Flat[TailArrays], pair: Array) -> Flat[KVCache]:
    """Copy a snapshot to a sequence's state outside pages; `pair` has the batch index and the slot."""
    (row, tail), whole = pair, cache.whole
    for index, copies in enumerate(tails.whole.take(tail)):
        whole = whole.with_copies(index, row, copies)
    return Flat.of(whole)


def clear(cache: Flat[KVCache], row: Array, pages: Array) -> Flat[KVCache]:
    """Fill pages, and the state of one sequence outside pages, with zeros; other page indices are dropped."""
    return Flat.of(cache.whole.clear(row, pages))


def name_prefill(width: int) -> str:
    """Name the program for one chunk of `width` tokens."""
    return f"prefill, {width} tokens"


def name_prefill_whole(width: int) -> str:
    """Name the program for a whole prompt of up to `width` tokens, split over devices."""
    return f"prefill whole prompt, {width} tokens"


def name_prefill_and_decode(count: int, width: int) -> str:
    """Name the program for `count` chunks of `width` tokens in total that also decodes other sequences."""
    return f"prefill {count} chunks and decode, {width} tokens"


def name_decode_loop(count: int, choice: Choice) -> str:
    """Name the program of several decode steps of the first `count` sequences.

    The sampling one serves every choice but `greedy`.
    """
    return f"decode loop of {count} sequences, {'greedy' if choice == 'greedy' else 'any'}"
