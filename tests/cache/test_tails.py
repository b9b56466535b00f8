"""Snapshots of what sequences store outside pages."""

import jax
import jax.numpy as jnp
import numpy as np

from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.tails import Tails

ROWS, SLOTS, WINDOWS = 3, 4, (8, 16, 8, 0)


def make_cache() -> KVCache:
    """Return a cache of layers with rings of other sizes, or none, of other numbers."""
    shape = {"num_kv_heads": 2, "head_dim": 16, "dtype": "float32", "R": 8, "Z": 8}
    rings = (PrefixRing(**shape, window=window) for window in WINDOWS)
    specs = tuple(Paged.of(ring, page=16, pages=4) for ring in rings)
    cache = KVCache.create(specs, batch=ROWS, capacity=32)
    rng = np.random.default_rng(0)
    own = [[jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) for leaf in layer] for layer in cache.own]
    return cache.with_own(own)


def test_a_snapshot_is_found_in_its_slot_and_others_stay():
    cache = make_cache()
    tails = Tails.empty(cache, SLOTS)
    # Two layers of one kind share their arrays; leaves without numbers are in no program.
    assert len([leaf for leaf in jax.tree.leaves(tails) if leaf.size]) == 4

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
    tails = Tails.empty(cache, SLOTS)
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
