"""Chunks of some sequences together with tokens of others, compared with one after the other."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_contract import CAPACITY, METHODS, PIECE, ROWS, specs_of
from conftest import TinyModel

from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.tails import TailArrays
from zdc_jax.model.mixed_batch import Place, extend_together

PAGE, NOWHERE = 16, ROWS
"""Tokens of a page; the row of an empty chunk."""
STEPS = {
    "one chunk": [[(1, 0, PIECE)], [(1, PIECE, PIECE - 5)]],
    "two chunks and none": [
        [(1, 0, PIECE // 2), (0, 0, 7), (NOWHERE, 0, 0)],
        [(0, 7, 5), (1, PIECE // 2, PIECE // 2 + 3), (NOWHERE, 0, 0)],
    ],
}
"""Rows, first positions and tokens of the chunks of two successive steps."""
PAGED = [
    name
    for name in METHODS
    if all("pages" in spec.clauses and not spec.host_bytes(1024) for spec in specs_of(name))
]


def alone(network, cache: KVCache, place: Place, pieces, tokens, end, tails: TailArrays):
    """Run each chunk, then the tokens. Chunks are padded to one length, for one program.

    A snapshot is what a chunk that ends there leaves outside pages.

    Returns hidden states of all chunks, of their ends, and of all tokens; the cache; the snapshots.
    """
    states, ends, first, lengths = [], [], 0, cache.lengths
    for row, begin, last, mark, slot in zip(*place, strict=True):
        if row == NOWHERE:
            continue
        one = replace(cache.row(row), lengths=begin[None]).release(begin[None] == 0)
        count = last - begin
        piece = jnp.pad(pieces[first : first + count], (0, PIECE - count))
        tails = tails.put(network.extend(one, piece[None], mark[None])[1].own, slot[None])
        hidden, one = network.extend(one, piece[None], last[None])
        cache, first = cache.with_row(row, one), first + count
        states.append(hidden[0, :count])
        ends.append(hidden[:, count - 1])
    decoded, cache = network.extend(replace(cache, lengths=lengths), tokens[:, None], end)
    cache = replace(cache, lengths=place.lengths_after(end))
    return np.concatenate([*states, *ends]), decoded[:, 0], cache, tails


def together(network, cache: KVCache, place: Place, pieces, tokens, end, tails: TailArrays):
    """Return what `alone` does, from one pass."""
    result = extend_together(network, cache, place, pieces, tokens, end, longest=PIECE // 2 + 3, tails=tails)
    of_chunks = network.finish(result.half)[0, : int((place.end - place.begin).sum())]
    read = np.concatenate([of_chunks, result.ends[place.row != NOWHERE]])
    return read, result.tokens, result.cache, result.tails


@pytest.mark.matrix("fp8-two chunks and none")
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", PAGED)
@pytest.mark.full
def test_together_is_one_after_the_other(name, steps):
    config, plan_of = METHODS[name]
    model = TinyModel(config)
    network = model.model(plan_of(config)).network
    rows = CAPACITY // PAGE
    table = np.random.default_rng(0).permutation(2 * ROWS * rows)[: ROWS * rows].reshape(ROWS, rows)
    specs = tuple(Paged.of(spec, page=PAGE, pages=2 * table.size) for spec in network.layer_caches)
    text = jnp.asarray(model.tokens(ROWS, CAPACITY, seed=3))
    cache = KVCache.create(specs, batch=ROWS, capacity=CAPACITY)
    cache = replace(cache, table=jnp.asarray(table))
    # The rows that read chunks served other texts before.
    _, cache = network.extend(cache, text[:, :PIECE], jnp.array([PIECE, 9, 5]))

    held = {"alone": cache, "together": cache}
    for step in STEPS[steps]:
        row, begin, count = jnp.array(step, jnp.int32).T
        slot = jnp.where(row < ROWS, jnp.arange(len(row)) * 2, 2**30)
        place = Place(row, begin, begin + count, begin + (count + 1) // 2, slot)
        readers = [row for row, _, _ in step if row != NOWHERE]
        pieces = jnp.concatenate([text[row, begin : begin + count] for row, begin, count in step])
        padded, found, tails = jnp.pad(pieces, (0, PIECE - len(pieces))), {}, {}
        decode = np.array([row not in readers for row in range(ROWS)])
        for way, run in (("alone", alone), ("together", together)):
            # A row that reads a chunk has no token of its own.
            lengths = jnp.where(decode, held[way].lengths, 0)
            tokens, end = text[jnp.arange(ROWS), lengths], lengths + decode
            given = replace(held[way], lengths=lengths), place, padded, tokens, end
            read, decoded, held[way], tails[way] = run(
                network, *given, tails=TailArrays.empty(held[way], 2 * len(row), in_place=True)
            )
            found[way] = np.concatenate([read, decoded[decode]])
        assert_same(specs, found)
        for expected, tail in zip(
            jax.tree.leaves(tails["alone"]), jax.tree.leaves(tails["together"]), strict=True
        ):
            assert_close_tail(tail, expected)
        np.testing.assert_array_equal(held["together"].lengths, held["alone"].lengths)
    last = {way: network.extend(each, text[:, :1], each.lengths + 1)[0] for way, each in held.items()}
    assert_same(specs, last)


def assert_close_tail(tail, expected) -> None:
    """Assert that snapshots are equal; levels of quantized tokens may differ by one in few places."""
    if jnp.issubdtype(expected.dtype, jnp.integer):
        difference = np.abs(np.asarray(tail, np.int32) - np.asarray(expected, np.int32)) % 256
        assert (np.minimum(difference, 256 - difference) > 1).sum() <= 0.01 * difference.size
    else:
        np.testing.assert_allclose(tail, expected, rtol=2e-3, atol=2e-3)


def assert_same(specs, found) -> None:
    """Assert equality within a few float32 roundings of the largest.

    A coordinate in 8 bits may round to the next level.
    """
    coded = any(getattr(spec.spec, "near_code", None) for spec in specs)
    expected, tolerance = np.asarray(found["alone"]), 2e-3 if coded else 2e-5
    error = np.abs(np.asarray(found["together"]) - expected).max()
    assert error <= tolerance * np.abs(expected).max(), error
