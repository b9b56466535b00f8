"""Decodes given tokens one after another, in one program."""

import jax
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel.transformer import ShardedTransformer


@jax.jit
def decoded(
    network: Transformer | ShardedTransformer,
    cache: KVCache,
    tokens: Int[Array, "steps B"],
    ends: Int[Array, "steps B"],
) -> tuple[KVCache, Float[Array, "steps B D"]]:
    """The cache behind all of `tokens`, and their hidden states.

    A call for each would compile twice on a mesh: the first cache lies there as the prompt left it.
    """

    def step(cache, given):
        token, end = given
        hidden, cache = network.extend(cache, token[:, None], end)
        return cache, hidden[:, 0]

    return jax.lax.scan(step, cache, (tokens, ends))
