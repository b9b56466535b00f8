"""Attention to a ring of near tokens, compared with float64 attention to its slots."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded_case import SCALE, Case, interpreted_with_registers, planes_like, shape
from rings import listed

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
    """Assert that a ring gives attention to its slots."""
    M, sinks, window, ends = ring
    (keys, values), (N, K) = kind, heads
    it, end = Case(keys, values, heads, S=M), jnp.asarray(ends)
    it.slots, it.blocks, it.end = map(np.asarray, listed((sinks, window), (3, K, M), end))
    it.begin = np.zeros(3, int)
    if gains:
        blocks = -(-max(ends) // 64) + 1
        it.gains = np.random.default_rng(1).normal(size=(3, N, blocks)).astype(np.float32)
    planes, table = [*it.keys, it.values], None
    if page:  # Rings in another order, as if they were pages.
        order = np.array([2, 0, 3, 1])
        planes = [jax.tree.map(lambda x: x[order % 3], each) for each in planes]
        table = jnp.asarray([[1], [3], [0]], jnp.int32)
    of_blocks = None if it.gains is None else jnp.asarray(it.gains)
    given = it.q, planes[:-1], planes[-1], jnp.zeros(3, jnp.int32), end
    (parts,) = coded_parts(
        [CodedPass(*given, block_table=table, gains=of_blocks, ring=(sinks, window))], scale=SCALE
    )
    it.compare(*(np.asarray(x, np.float64) for x in merged(parts, N // K, jnp.float32)))


@pytest.mark.parametrize("page", [False, True])
@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.matrix("ring0-True-True", "ring2-False-False")
def test_a_ring_is_read_as_its_slots(interpreted, ring, gains, page):
    check_ring((((64, 8),), (64, 8)), ring, (4, 2), page=page, gains=gains)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [False, True])
@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("heads", [(8, 2), (12, 2), (16, 1)])
@pytest.mark.parametrize("ring", RINGS)
def test_a_ring_is_read_as_its_slots_on_the_device(ring, gains, page, heads):
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
    refusal = coded_refusal(CodedPass(q, [keys], values, row, row, ring=ring))
    assert refusal is not None
    assert f"ring={ring} in {slots} slots: sinks and window must fit" in refusal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": shape(2, 2, 9, dtype=jnp.int32)}, "with slots: must be None"),
        ({"block_table": shape(2, 2, dtype=jnp.int32)}, "in 2 pages per sequence: must be 1"),
        ({"ring": (-1, 128)}, r"ring=\(-1, 128\) in 136 slots: sinks and window must fit"),
    ],
)
def test_other_arguments_of_rings_are_refused(change, message):
    keys, values = planes_like(((64, 8), (64, 8)), 2, 2, 136)
    row, q = shape(2, dtype=jnp.int32), shape(2, 4, 64, dtype=jnp.bfloat16)
    refusal = coded_refusal(CodedPass(q, [keys], values, row, row, **{"ring": (4, 128)} | change))
    assert refusal is not None
    assert re.search(message, refusal)
