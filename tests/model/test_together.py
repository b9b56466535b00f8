"""A piece of one row beside tokens of the others gives what one after the other gives."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from cache_contract import CAPACITY, METHODS, PIECE, ROWS, specs_of
from conftest import TinyModel

from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.paged import Paged
from zdc_jax.model.together import Place, extend_together

PAGE = 16
READER = 1
PAGED = [
    name
    for name in METHODS
    if all("pages" in spec.clauses and not spec.host_bytes(1024) for spec in specs_of(name))
]


def alone(network, cache: KVCache, place: Place, piece, tokens, end):
    """The piece, and then the tokens."""
    one = replace(cache.row(place.row), lengths=place.begin[None]).release(place.begin[None] == 0)
    hidden, one = network.extend(one, piece[None], place.end[None])
    cache = replace(cache.with_row(place.row, one), lengths=cache.lengths)
    decoded, cache = network.extend(cache, tokens[:, None], end)
    return hidden[0], decoded[:, 0], replace(cache, lengths=end.at[place.row].set(place.end))


@pytest.mark.sampled
@pytest.mark.parametrize("name", PAGED)
def test_together_is_one_after_the_other(name):
    config, plan_of = METHODS[name]
    model = TinyModel(config)
    network = model.model(plan_of(config)).network
    rows = CAPACITY // PAGE
    table = np.random.default_rng(0).permutation(2 * ROWS * rows)[: ROWS * rows].reshape(ROWS, rows)
    specs = tuple(Paged.of(spec, page=PAGE, pages=2 * table.size) for spec in network.layer_caches)
    text = jnp.asarray(model.tokens(ROWS, CAPACITY, seed=3))
    cache = KVCache.create(specs, batch=ROWS, capacity=CAPACITY)
    cache = replace(cache, table=jnp.asarray(table))
    # The reader's row served another text before.
    _, cache = network.extend(cache, text[:, :PIECE], jnp.array([PIECE, 9, 5]))

    held = {"alone": cache, "together": cache}
    for begin, count in ((0, PIECE), (PIECE, PIECE - 5)):
        place = Place(*(jnp.int32(n) for n in (READER, begin, begin + count)))
        piece, found = text[READER, begin : begin + PIECE], {}
        for way, run in (("alone", alone), ("together", extend_together)):
            # A row that reads has no token of its own.
            lengths = held[way].lengths.at[READER].set(0)
            tokens, end = text[jnp.arange(ROWS), lengths], lengths + jnp.array([1, 0, 1])
            given = replace(held[way], lengths=lengths), place, piece, tokens, end
            read, decoded, held[way] = run(network, *given)
            found[way] = np.concatenate([read[:count], decoded[np.array([0, 2])]])
        assert_same(specs, found)
        np.testing.assert_array_equal(held["together"].lengths, held["alone"].lengths)
    last = {way: network.extend(each, text[:, :1], each.lengths + 1)[0] for way, each in held.items()}
    assert_same(specs, last)


def assert_same(specs, found) -> None:
    """To a few float32 roundings of the largest; a coordinate in 8 bits may fall to the next level."""
    coded = any(getattr(spec.spec, "near_code", None) for spec in specs)
    expected, tolerance = np.asarray(found["alone"]), 2e-3 if coded else 2e-5
    error = np.abs(np.asarray(found["together"]) - expected).max()
    assert error <= tolerance * np.abs(expected).max(), error
