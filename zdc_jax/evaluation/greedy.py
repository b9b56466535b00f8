"""Greedy generation after contexts that are in a cache, for measurements of generated tokens."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.generation.packed_parameters import MAX_STOP_TOKENS, pack_parameters
from zdc_jax.generation.sampling import Sampling
from zdc_jax.generation.steps import DecodeState, Flat, decode, first
from zdc_jax.model.transformer import Transformer


def generate_greedy(
    network: Transformer,
    hidden: Float[Array, "B D"],
    cache: KVCache,
    count: int,
    *,
    stop: Sequence[int] = (),
    steps: int | None = None,
) -> tuple[Int[np.ndarray, "B tokens"], Int[np.ndarray, " B"]]:
    """Generate the most likely tokens after each context, as `zdc_jax.generate` does.

    Args:
      network: network that read the contexts.
      hidden: last hidden states of the contexts.
      cache: cache of the contexts, with room for `count` tokens. It is donated, so copy it to use it later.
      count: most tokens to generate for each context.
      stop: token ids that end a sequence; only the first `MAX_STOP_TOKENS` are used.
      steps: static size of the program's result, at least `count`. Calls with the same size share a program.
        Default: `count`.

    Returns:
      token ids, int32 [B, count], and the number of tokens of each sequence up to and including a stop token.
      Tokens after that number are unspecified.
    """
    stop, key = tuple(stop)[:MAX_STOP_TOKENS], np.zeros(2, np.uint32)  # Greedy steps use no key.
    numbers = np.stack(
        [pack_parameters(length, count, stop, Sampling(), key) for length in cache.lengths.tolist()]
    )
    wanted, flat = np.ones(len(numbers), bool), Flat.of(network)
    state, begun = first(flat, DecodeState.of(cache), hidden, wanted, numbers, choice="greedy")
    _, later = decode(flat, state, wanted, numbers, np.int32(count), steps=steps or count, choice="greedy")
    tokens = np.concatenate([begun.tokens, later.tokens], axis=1)[:, :count]
    return tokens, 1 + np.asarray(later.counts)
