"""The truth that timed rows are held to, and the density that they tell."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.bench_block_lists import SCALE, density, exact_rows
from benchmarks.quality.block_caches import list_attention
from benchmarks.quality.key_blocks import BlockChoice, block_lists


@pytest.mark.sampled
def test_rows_are_those_of_attention_to_lists():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(2 * rng.normal(size=shape), jnp.float32)

    S, blocks = 150, (32, 16)
    q, k, v = draw(1, S, 4, 128), draw(1, 2, S, 128), draw(1, 2, S, 128)
    start, end = jnp.zeros(1, jnp.int32), jnp.full(1, S)
    choice = BlockChoice("share", 0.5, coordinates=32, samples=8, blocks=blocks)
    lists = block_lists(q, k, start, end, scale=SCALE, choice=choice)
    expected, _ = list_attention(q, k, v, lists, start, scale=SCALE, blocks=blocks)
    positions = [0, 31, 100, 149]
    found = exact_rows(q[0, jnp.array(positions)], k, v, lists, positions, blocks)
    np.testing.assert_allclose(found, expected[0, jnp.array(positions)], atol=1e-5)
    assert 0.5 < density(lists, blocks, S) < 0.65, "sinks, window, and half of a block is a whole one"
    everything = BlockChoice("share", 1.0, blocks=blocks)
    lists = block_lists(q, k, start, end, scale=SCALE, choice=everything)
    assert density(lists, blocks, S) == pytest.approx(1)
