"""A single row in 16 bits goes through weights twice, and through attention and its cache once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_contract import METHODS, PIECE, specs_of
from conftest import TinyModel

TOKENS = 4
"""That are decoded."""
ON_DEVICE = [name for name in METHODS if not any(spec.host_bytes(1024) for spec in specs_of(name))]
"""A row of what lies in the host's memory cannot be taken out."""


@pytest.mark.sampled
@pytest.mark.parametrize("name", ON_DEVICE)
def test_it_gives_what_one_of_two_equal_rows_gives(name):
    config, plan_of = METHODS[name]
    model = TinyModel(config)
    network = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.model(plan_of(config)).network)
    text = jnp.asarray(np.tile(model.tokens(1, PIECE + TOKENS), (2, 1)))
    cache = network.new_cache(batch=2, capacity=PIECE + TOKENS)
    _, two = network.extend(cache, text[:, :PIECE], jnp.full(2, PIECE))
    one = two.row(jnp.int32(0))
    for t in range(PIECE, PIECE + TOKENS):
        expected, two = network.extend(two, text[:, t : t + 1], jnp.full(2, t + 1))
        got, one = network.extend(one, text[:1, t : t + 1], jnp.full(1, t + 1))
        got, expected = (np.asarray(x, np.float32) for x in (got, expected[:1]))
        assert got.shape == expected.shape
        assert np.abs(got - expected).max() <= 2**-5 * np.abs(expected).max()
