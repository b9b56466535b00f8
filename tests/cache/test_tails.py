"""Snapshots of what sequences store outside pages."""

import jax
import jax.numpy as jnp
import numpy as np

from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.tails import TailArrays

ROWS, SLOTS = 3, 4
RINGS = [(64, FittedIntegers(8)), (80, FittedIntegers(8)), (64, FittedIntegers(8)), (8, None), (8, None)]
"""Windows and codes of rings."""


def make_cache() -> KVCache:
    """Return a cache of layers with quantized rings of other sizes, and with rings in the model's dtype."""
    shape = {"num_kv_heads": 2, "head_dim": 16, "dtype": "float32", "R": 16, "Z": 16}
    code = FittedIntegers(8)
    stores = (
        CodedStore(**shape, key_code=code, value_code=code, window=window, near_code=near)
        for window, near in RINGS
    )
    specs = tuple(Paged.of(store, page=16, pages=4) for store in stores)
    cache = KVCache.create(specs, batch=ROWS, capacity=128)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(9 * rng.random(leaf.shape), leaf.dtype), cache)


def test_a_snapshot_is_found_in_its_slot_and_others_stay():
    cache = make_cache()
    tails = TailArrays.empty(cache, SLOTS, in_place=True)
    # Layers with equal rings share their four arrays, if these are quantized; the others have two each.
    assert len([leaf for leaf in jax.tree.leaves(tails) if leaf.size]) == 2 * 4 + 2 * 2
    apart = TailArrays.empty(cache, SLOTS, in_place=False)
    assert len([leaf for leaf in jax.tree.leaves(apart) if leaf.size]) == 3 * 4 + 2 * 2

    rows = [[leaf[:2] for leaf in layer] for layer in cache.own]
    tails = tails.put(rows, jnp.array([3, 1]))
    tails = tails.put([[leaf + 1 for leaf in layer] for layer in rows], jnp.array([SLOTS, -1]))
    for slot, row in ((3, 0), (1, 1)):
        for found, layer in zip(tails.take(jnp.int32(slot)), cache.own, strict=True):
            for one, leaf in zip(found, layer, strict=True):
                np.testing.assert_array_equal(one[0], leaf[row])
    for slot in (0, 2):
        assert not any(leaf.any() for layer in tails.take(jnp.int32(slot)) for leaf in layer)


def test_a_layer_reads_and_writes_its_own_slots():
    cache = make_cache()
    tails = TailArrays.empty(cache, SLOTS, in_place=True)
    marks, slots = jnp.array([5, 6, 7]), jnp.array([2, SLOTS, 0])
    for layer, own in enumerate(cache.own):
        snapshots = tails.of_layer(layer, marks, slots)
        np.testing.assert_array_equal(snapshots.marks, marks)
        tails = tails.with_layer(layer, snapshots.put(own))
    for slot, row in ((2, 0), (0, 2)):
        for found, layer in zip(tails.take(jnp.int32(slot)), cache.own, strict=True):
            for one, leaf in zip(found, layer, strict=True):
                np.testing.assert_array_equal(one[0], leaf[row])
    assert not any(leaf.any() for layer in tails.take(jnp.int32(1)) for leaf in layer)
