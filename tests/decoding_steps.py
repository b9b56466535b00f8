"""Decoding of fixed tokens in one program, and a check of a single sequence."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.model.transformer import Transformer


@jax.jit
def decoded(
    network: Transformer,
    cache: KVCache,
    tokens: Int[Array, "steps B"],
    ends: Int[Array, "steps B"],
) -> tuple[KVCache, Float[Array, "steps B D"]]:
    """Return the cache after all of `tokens`, and their hidden states.

    One call per token would compile twice on a mesh, because the prompt leaves the first cache in another
    layout.
    """

    def step(cache, given):
        token, end = given
        hidden, cache = network.extend(cache, token[:, None], end)
        return cache, hidden[:, 0]

    return jax.lax.scan(step, cache, (tokens, ends))


def assert_one_of_two(
    network: Transformer, cache: KVCache, tokens: Int[Array, "2 steps"], tolerance: float = 2**-5
) -> None:
    """Assert that the first of two sequences decodes alone to the same result in 16 bits.

    `tolerance` is relative to the largest number.
    """
    ends = cache.lengths + 1 + jnp.arange(tokens.shape[1])[:, None]
    _, both = decoded(network, cache, tokens.T, ends)
    _, got = decoded(network, cache.row(jnp.int32(0)), tokens.T[:, :1], ends[:, :1])
    got, expected = (np.asarray(x, np.float32) for x in (got, both[:, :1]))
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()
