"""Single sequences in 16 bits: two rows for weights, and one row for attention and its cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_contract import METHODS, PIECE, specs_of
from conftest import TinyModel
from decoding_steps import assert_one_of_two

TOKENS = 4
"""Number of decoded tokens."""
ON_DEVICE = [name for name in METHODS if not any(spec.host_bytes(1024) for spec in specs_of(name))]
"""Methods without tokens in host memory, from which no row can be extracted."""


@pytest.mark.matrix("token classes")
@pytest.mark.parametrize("name", ON_DEVICE)
@pytest.mark.full
def test_it_gives_what_one_of_two_equal_rows_gives(name):
    config, plan_of = METHODS[name]
    model = TinyModel(config)
    network = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.model(plan_of(config)).network)
    text = jnp.asarray(np.tile(model.tokens(1, PIECE + TOKENS), (2, 1)))
    cache = network.new_cache(batch=2, capacity=PIECE + TOKENS)
    _, cache = network.extend(cache, text[:, :PIECE], jnp.full(2, PIECE))
    # Rounding to 16 bits may flip a level of a new token; of four levels, each is a quarter of the range.
    tolerance = 2**-3 if name == "oscar without a window" else 2**-5
    assert_one_of_two(network, cache, text[:, PIECE:], tolerance)
