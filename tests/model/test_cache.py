"""The cache compared with a plain list of all tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.cache.kv_cache import LAYERS_AT_ONCE, KVCache
from zdc_jax.cache.specs.prefix_ring import PrefixRing, recent_rows, ring_slots
from zdc_jax.cache.specs.spec import NewTokens
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.ops.slots import EMPTY, ring_positions, slot_of_token
from zdc_jax.plan import CompressionPlan


@pytest.mark.parametrize(("sinks", "window"), [(3, 5), (0, 5), (3, 0), (9, 8)])
def test_a_ring_holds_what_was_put_in_its_slots(sinks, window):
    # The reference is a list, token by token. A last token that is padding changes nothing.
    slots = ring_slots(sinks, window, 40)
    held, near = [EMPTY] * slots, {"sinks": sinks, "window": window}
    for position in range(20):
        for end, taken in ((position, False), (position + 1, position < sinks or window > 0)):
            slot, found = slot_of_token(jnp.array([[position]]), jnp.array([end]), **near)
            assert found.tolist() == [[taken]]
        if taken:
            held[int(slot[0, 0])] = position
        assert ring_positions(slots, jnp.array([[position]]), **near).tolist() == [held]
        assert {j for j in range(position + 1) if j < sinks or j > position - window} <= set(held)
    assert ring_positions(slots, jnp.array([[-1]]), **near).tolist() == [[EMPTY] * slots]


@settings(deadline=None, max_examples=8)
@given(
    sinks=st.integers(0, 8),
    window=st.sampled_from([8, 16, 24]),
    pieces=st.lists(st.sampled_from([3, 17, 40]), min_size=1, max_size=4),
    new=st.sampled_from([2, 30]),
    alignment=st.sampled_from([8, 32]),
)
@pytest.mark.full
def test_recent_rows_are_those_of_their_positions(sinks, window, pieces, new, alignment):
    # Each key near a new token has its own coordinates, and so do sinks where rows begin at zero.
    start, capacity = sum(pieces), sum(pieces) + new
    tokens = np.arange(1.0, capacity + 1)[None, :, None, None] * np.ones((1, 1, 1, 2))
    spec = PrefixRing(num_kv_heads=1, head_dim=2, dtype="float32", R=1, Z=1, sinks=sinks, window=window)
    state, done = spec.create(1, capacity), 0
    for width in pieces:
        piece = jnp.asarray(tokens[:, done : done + width])
        positions = jnp.arange(done, done + width)[None]
        done += width
        state = spec.write(state, NewTokens(NewKeys(piece), piece, positions, jnp.array([done])))
    first = max(start - window + 1, 0) // alignment * alignment
    rows = recent_rows(
        state.ring_k,
        jnp.asarray(tokens[:, start:, :, 1:]),
        jnp.array([start]),
        jnp.array([first]),
        sinks=min(sinks, capacity),
        window=min(window, capacity),
        past=window + alignment,
    )
    near = np.array([j for j in range(first, capacity) if j < sinks or j > start - window])
    np.testing.assert_array_equal(rows[0, 0, near - first, 0], tokens[0, near, 0, 1])


def test_many_layers_are_created_like_few():
    config = replace(LLAMA, layers=LLAMA.layers[:1] * LAYERS_AT_ONCE)
    plan = CompressionPlan.uniform(config, qk=16, v=16, window=8, sinks=2)
    specs = plan.layer_caches("float32")
    together = KVCache.create(specs, batch=2, capacity=32)
    alone = [KVCache.create([spec], batch=2, capacity=32).layers[0] for spec in specs]
    found, expected = jax.tree.leaves(together.layers), jax.tree.leaves(alone)
    assert len({leaf.unsafe_buffer_pointer() for leaf in found}) == len(found)  # Steps donate each array.
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
