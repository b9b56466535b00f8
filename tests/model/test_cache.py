"""The cache compared with a plain list of all tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.cache.prefix_ring import PrefixRing, recent_rows, ring_slots
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.ops.slots import EMPTY, ring_positions, slot_of_token


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
        state = spec.write(state, NewKeys(piece), piece, positions, jnp.array([done]))
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
