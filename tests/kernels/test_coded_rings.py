"""Attention to a ring of near tokens, compared with attention to a list of its slots."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rings import listed
from test_coded_decode import SCALE, Case, interpreted_with_registers, planes_like, shape

from kernels_pallas import CodedPass, coded_parts, coded_refusal, merged


@pytest.fixture
def interpreted():
    with interpreted_with_registers():
        yield


RINGS = [
    # Slots, sinks, window and ends of three sequences.
    (136, 4, 128, (0, 77, 1000)),
    (72, 8, 64, (5, 64, 131)),
    (200, 4, 150, (3, 151, 777)),
    (136, 70, 64, (50, 71, 900)),
    (72, 8, 0, (0, 5, 90)),
    (520, 4, 512, (513, 100_001, 516)),
]


def check_ring(kind, ring, heads, *, page: bool, gains: bool):
    """Assert that a ring gives what a list of its slots gives."""
    M, sinks, window, ends = ring
    (keys, values), (N, K) = kind, heads
    it, end = Case(keys, values, heads, S=M), jnp.asarray(ends)
    blocks = -(-max(ends) // 64) + 1
    of_blocks = np.random.default_rng(1).normal(size=(3, N, blocks)).astype(np.float32) if gains else None
    slots, of_slots, end_of_list = listed((sinks, window), (3, K, M), end)
    planes, table = [*it.keys, it.values], None
    if page:  # Rings in another order, as if they were pages.
        order = np.array([2, 0, 3, 1])
        planes = [jax.tree.map(lambda x: x if isinstance(x, int) else x[order % 3], each) for each in planes]
        table = jnp.asarray([[1], [3], [0]], jnp.int32)
    more = {"gains": None if of_blocks is None else jnp.asarray(of_blocks), "block_table": table}
    given = it.q, planes[:-1], planes[-1], jnp.zeros(3, jnp.int32)
    as_list = CodedPass(*given, end_of_list, slots, blocks=of_slots if gains else None, **more)
    passes = [as_list, CodedPass(*given, end, ring=(sinks, window), **more)]
    found = [merged(*coded_parts([each], scale=SCALE), N // K, jnp.float32) for each in passes]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("page", [False, True])
@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.matrix("ring0-True-True", "ring2-False-False")
def test_a_ring_is_a_list_of_its_slots(interpreted, ring, gains, page):
    check_ring((((64, 8),), (64, 8)), ring, (4, 2), page=page, gains=gains)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [False, True])
@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("heads", [(8, 2), (12, 2), (16, 1)])
@pytest.mark.parametrize("ring", RINGS)
def test_a_ring_is_a_list_of_its_slots_on_the_device(ring, gains, page, heads):
    check_ring((((128, 8),), (128, 8)), ring, heads, page=page, gains=gains)


@pytest.mark.parametrize(
    ("kind", "ring"),
    [(((64, 3), (64, 8)), (4, 128)), (((64, 8), (64, 8)), (4, 200)), (((64, 8),) * 2, (0, 32))],
)
def test_rings_that_do_not_fit_are_refused(kind, ring):
    slots = 136 if ring[1] > 32 else 40
    keys, values = planes_like(kind, 2, 2, slots)
    row = shape(2, dtype=jnp.int32)
    q = shape(2, 4, 64, dtype=jnp.bfloat16)
    refusal = coded_refusal(q, [keys], values, row, row, ring=ring)
    assert refusal is not None
    assert f"ring={ring}: must be one that `ring_fits` allows, with {slots} slots" in refusal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": shape(2, 2, 9, dtype=jnp.int32)}, "with slots: must be None"),
        ({"block_table": shape(2, 2, dtype=jnp.int32)}, "in 2 pages per sequence: must be 1"),
        ({"ring": (-1, 128)}, r"ring=\(-1, 128\): must be one that `ring_fits` allows"),
    ],
)
def test_other_arguments_of_rings_are_refused(change, message):
    keys, values = planes_like(((64, 8), (64, 8)), 2, 2, 136)
    row, q = shape(2, dtype=jnp.int32), shape(2, 4, 64, dtype=jnp.bfloat16)
    refusal = coded_refusal(q, [keys], values, row, row, **{"ring": (4, 128)} | change)
    assert refusal is not None
    assert re.search(message, refusal)
