"""Layers that share their arrays store what layers with arrays of their own store."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import Plane
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.kv_cache import KVCache, LayerPlace, place_layers
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.ops.cache_attention import table_of_rings

ROWS, PAGES, PAGE = 3, 4, 16
SHAPE = {"num_kv_heads": 2, "head_dim": 16, "dtype": "bfloat16"}


def store(window: int, **changes) -> Paged:
    code = FittedIntegers(8)
    given = {"R": 16, "Z": 16, "key_code": code, "value_code": code, "window": window, "near_code": code}
    return Paged.of(CodedStore(**SHAPE, **(given | changes)), page=PAGE, pages=PAGES)


SPECS = (store(8), store(16), store(8), store(8), store(16))


@pytest.fixture
def joined(monkeypatch) -> KVCache:
    """Return a cache with random numbers, in which at most two equal layers share their arrays."""
    monkeypatch.setattr(Paged, "count_sharing", lambda self, layers, batch, capacity: min(2, layers))
    cache = KVCache.create(SPECS, batch=ROWS, capacity=2 * PAGE, join=True)
    rng = np.random.default_rng(0)
    filled = jax.tree.map(lambda leaf: jnp.asarray(9 * rng.random(leaf.shape), leaf.dtype), cache)
    return replace(filled, table=jnp.arange(ROWS)[:, None])


def read(cache: KVCache, index: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return a layer's pages, and what it stores outside pages."""
    view, spec = cache.of_layer(index), SPECS[index]
    page, row = view.table[0, 0], 0 if view.first is None else view.first
    leaves = list(zip(jax.tree.leaves(view.state), spec.pooled(view.state), strict=True))
    pools = [np.asarray(leaf[page : page + PAGES]) for leaf, is_pool in leaves if is_pool]
    return pools, [np.asarray(leaf[row : row + ROWS]) for leaf, is_pool in leaves if not is_pool]


def test_each_layer_has_a_place_of_its_own(joined):
    assert joined.places == (
        LayerPlace(0, 0, 0),
        LayerPlace(1, 0, 0),
        LayerPlace(0, PAGES, ROWS),
        LayerPlace(3, 0, 0),
        LayerPlace(1, PAGES, ROWS),
    )
    apart = KVCache.create(SPECS, batch=ROWS, capacity=2 * PAGE)
    assert joined.bytes() - joined.table.nbytes == apart.bytes()
    for index, state in enumerate(apart.layers):
        pools, own = read(joined, index)
        leaves = jax.tree.leaves(state)
        assert sorted(map(np.shape, pools + own)) == sorted(leaf.shape for leaf in leaves)


def test_a_layer_that_is_replaced_changes_no_other(joined):
    view = joined.of_layer(2)
    ends = {True: (PAGES, 2 * PAGES), False: (ROWS, 2 * ROWS)}
    leaves, tree = jax.tree.flatten(view.state)
    pooled = SPECS[2].pooled(view.state)
    new = [leaf.at[slice(*ends[is_pool])].set(0) for leaf, is_pool in zip(leaves, pooled, strict=True)]
    changed = joined.with_layer(2, jax.tree.unflatten(tree, new))
    for index in range(len(SPECS)):
        for part, before in zip(read(changed, index), read(joined, index), strict=True):
            for found, old in zip(part, before, strict=True):
                np.testing.assert_array_equal(found, 0 * old if index == 2 else old)


def test_pages_and_rows_of_all_layers_are_cleared(joined):
    cleared = joined.clear(jnp.int32(1), jnp.array([2, PAGES, 0]))
    for index in range(len(SPECS)):
        for part, before, zeros in zip(read(cleared, index), read(joined, index), ([0, 2], [1]), strict=True):
            for found, old in zip(part, before, strict=True):
                expected = old.copy()
                expected[zeros] = 0
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("index", range(len(SPECS)))
def test_copies_of_one_sequence_are_put_where_it_lies(joined, index):
    _, own = read(joined, index)
    copies = [jnp.asarray(leaf[:1] + 1) for leaf in own]
    changed = joined.with_copies(index, jnp.int32(2), copies)
    for other in range(len(SPECS)):
        (pools, rows), (old_pools, old_rows) = read(changed, other), read(joined, other)
        for found, old in zip(pools, old_pools, strict=True):
            np.testing.assert_array_equal(found, old)
        for found, old in zip(rows, old_rows, strict=True):
            expected = old.copy()
            expected[2] = old[0] + 1 if other == index else old[2]
            np.testing.assert_array_equal(found, expected)


def test_a_layer_alone_in_its_arrays_is_as_in_other_caches(joined):
    view = joined.of_layer(3)
    assert view.first is None
    assert view.table is joined.table


def test_layers_share_arrays_only_where_kernels_write_all(monkeypatch):
    def list_holders(specs, batch=ROWS, capacity=2 * PAGE):
        return [place.holder for place in place_layers(specs, batch, capacity)]

    assert list_holders(SPECS) == []  # There is no GPU.
    monkeypatch.setattr("zdc_jax.cache.paging.paged.device_refusal", lambda _: None)
    assert list_holders(SPECS) == [0, 1, 0, 0, 1]
    exact, plain = store(8, near_code=None), PrefixRing(**SHAPE, R=16, Z=16)
    assert list_holders([exact] * 3) == []
    assert list_holders([Paged.of(plain, page=PAGE, pages=PAGES)] * 3) == []
    assert list_holders([*SPECS, plain]) == []
    # Triton cannot address arrays of 2^31 to 2^32 bytes: three layers would have them.
    large = replace(store(8), pages=2**30 // (2 * PAGE * 16))
    assert list_holders([large] * 3) == [0, 0, 2]
    assert list_holders([large] * 5) == [0] * 5
    window = 4 * PAGE
    assert list_holders([store(window)] * 3, 2**30 // (2 * window * 16), 2 * window) == [0, 0, 2]


def test_rings_of_a_layer_are_found_by_its_first_one():
    plane = Plane(jnp.zeros((12, 2, 8, 16), jnp.uint8), jnp.zeros((12, 2, 8), jnp.uint8), 8)
    np.testing.assert_array_equal(table_of_rings([plane], 3, jnp.int32(6)), [[6], [7], [8]])
    np.testing.assert_array_equal(table_of_rings([plane], 3, None), [[0], [1], [2]])
    assert table_of_rings([plane], 12, None) is None
