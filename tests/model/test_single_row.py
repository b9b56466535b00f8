"""Single tokens in 16 bits: two rows for weights, one for attention and its cache, and one array of heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_contract import METHODS, PIECE, specs_of
from conftest import LLAMA, TinyModel
from decoding_steps import assert_one_of_two

from zdc_jax.model.attention import Attention

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


@pytest.mark.parametrize("biased", [(), ("k_bias",), ("q_bias", "k_bias", "v_bias")], ids=len)
@pytest.mark.parametrize("has_mean", [False, True])
def test_a_token_is_projected_as_in_a_chunk(biased, has_mean):
    # The heads of a single token are one array, those of several tokens are three.
    rng, (D, N, K, H) = np.random.default_rng(0), (LLAMA.embed_dim, 4, 2, LLAMA.head_dim)
    shapes = {"q": (D, N, H), "k": (D, K, H), "v": (D, K, H), "o": (N, H, D)}
    shapes |= {"q_rotation": (K, H, H), "k_rotation": (K, H, H)}
    shapes |= {name: shapes[name[0]][1:] for name in biased} | ({"k_mean": (K, H)} if has_mean else {})
    weights = {name: jnp.float32(rng.normal(size=shape)) for name, shape in shapes.items()}
    attention = Attention(weights, LLAMA, LLAMA.layers[0])
    x, positions = jnp.float32(rng.normal(size=(3, 2, D))), jnp.array([[0, 1], [63, 64], [90, 91]])
    q, k, v = attention.project_unrotated(x, positions)
    for t in range(2):
        one = slice(t, t + 1)
        new_q, new_k, new_v = attention.project_unrotated(x[:, one], positions[:, one])
        for found, wanted in ((new_q, q), (new_k.keys, k.keys), (new_v, v)):
            np.testing.assert_allclose(found, wanted[:, one], rtol=1e-4, atol=1e-4)
        assert (new_k.shift is not None) == has_mean
