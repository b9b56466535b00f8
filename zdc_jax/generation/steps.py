"""Compiled prefill and decode, shared by batch generation and streaming."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.generation.sampling import SamplingArrays, choose
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.mesh import whole_on
from zdc_jax.parallel.transformer import ShardedTransformer

PREFILL_CHUNK = 2048
"""Longest prompt piece of one prefill call, in tokens."""
SMALLEST_BUCKET = 32
"""Prompt pieces are padded to powers of two from here to `PREFILL_CHUNK`, so new lengths rarely recompile."""
MAX_STOP_TOKENS = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """State between decode calls.

    cache; tokens [B, O] int32 generated so far; count [B] of them; last [B] the newest token, not yet in the
    cache; done [B].
    """

    cache: KVCache
    tokens: Array
    count: Array
    last: Array
    done: Array


def bucket(length: int, smallest: int = SMALLEST_BUCKET) -> int:
    """The next power of two, at least `smallest`."""
    return max(smallest, 1 << (length - 1).bit_length())


def prefill(
    network: Transformer,
    cache: KVCache,
    prompts: Sequence[np.ndarray],
    sampling: SamplingArrays | None,
    stop_tokens: Array,
    max_new_tokens: int,
    *,
    chunk: int = PREFILL_CHUNK,
    implementation: Implementation | None = None,
) -> DecodeState:
    """Fills a cache with right-padded prompts, `chunk` tokens at a time, and chooses the first token.

    cache: may hold the first tokens of each prompt, but not all of any; those behind them are read. Padding
    may stand past its capacity. max_new_tokens is the number of columns of the output buffer.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    held = np.asarray(cache.lengths)
    longest = int((lengths - held).max())
    last_hidden = jnp.zeros((len(prompts), network.config.embed_dim), network.dtype)
    for start in range(0, longest, chunk):
        width = min(bucket(longest - start), chunk, cache.capacity)
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in enumerate(prompts):
            piece = prompt[held[row] + start :][:width]
            tokens[row, : len(piece)] = piece
        last_hidden, cache = _prefill_chunk(
            network,
            cache,
            last_hidden,
            jnp.asarray(tokens),
            jnp.asarray(lengths),
            implementation=implementation,
        )
    return _first_token(network, cache, last_hidden, sampling, stop_tokens, max_new_tokens)


def prefill_on_mesh(
    network: ShardedTransformer,
    prompts: Sequence[np.ndarray],
    width: int,
    capacity: int,
    sampling: SamplingArrays | None,
    stop_tokens: Array,
    max_new_tokens: int,
    *,
    implementation: Implementation | None = None,
) -> DecodeState:
    """`prefill` of whole prompts, padded to `width`, on a mesh; the cache is divided by head."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    last_hidden, cache = network.prefill(
        jnp.asarray(tokens), jnp.asarray(lengths), capacity=capacity, implementation=implementation
    )
    return _first_token(network, cache, last_hidden, sampling, stop_tokens, max_new_tokens)


@partial(jax.jit, donate_argnums=(1, 2), static_argnames="implementation")
def _prefill_chunk(
    network: Transformer,
    cache: KVCache,
    last_hidden: Array,
    tokens: Array,
    lengths: Array,
    *,
    implementation: Implementation | None,
) -> tuple[Array, KVCache]:
    # Rows that ended in an earlier chunk keep their length; their padding stands past it and is dropped.
    last = lengths - 1 - cache.lengths
    end = jnp.minimum(lengths, cache.lengths + tokens.shape[1])
    hidden, cache = network.extend(cache, tokens, end, implementation)
    inside = (last >= 0) & (last < tokens.shape[1])
    picked = jnp.take_along_axis(hidden, jnp.clip(last, 0, tokens.shape[1] - 1)[:, None, None], axis=1)
    return jnp.where(inside[:, None], picked[:, 0], last_hidden), cache


@partial(jax.jit, static_argnames="max_new_tokens", donate_argnums=1)
def _first_token(
    network: Transformer | ShardedTransformer,
    cache: KVCache,
    last_hidden: Array,
    sampling: SamplingArrays | None,
    stop_tokens: Array,
    max_new_tokens: int,
) -> DecodeState:
    token = choose(network.embeddings.unembed(last_hidden), sampling, cache.lengths)
    batch = token.shape[0]
    state = DecodeState(
        cache,
        jnp.zeros((batch, max_new_tokens), jnp.int32).at[:, 0].set(token),
        jnp.ones(batch, jnp.int32),
        token,
        jnp.isin(token, stop_tokens),
    )
    return _readable(network, state)


def _readable(network: Transformer | ShardedTransformer, state: DecodeState) -> DecodeState:
    """With all rows on every device, so that each of several processes sees them; the cache stays divided."""
    if isinstance(network, Transformer):
        return state
    rows = (state.tokens, state.count, state.last, state.done)
    return DecodeState(state.cache, *jax.lax.with_sharding_constraint(rows, whole_on(network.mesh)))


@partial(jax.jit, donate_argnums=1, static_argnames="implementation")
def decode(
    network: Transformer | ShardedTransformer,
    state: DecodeState,
    limit: Array,
    sampling: SamplingArrays | None,
    stop_tokens: Array,
    *,
    implementation: Implementation | None = None,
) -> DecodeState:
    """Decodes on the device until every row is done or holds `limit` tokens; no host round trip per token."""

    def unfinished(state: DecodeState) -> Array:
        return jnp.any(~state.done & (state.count < limit))

    def step(state: DecodeState) -> DecodeState:
        active = ~state.done & (state.count < limit)
        end = state.cache.lengths + active
        hidden, cache = network.extend(state.cache, state.last[:, None], end, implementation)
        token = choose(network.embeddings.unembed(hidden[:, 0]), sampling, end)
        token = jnp.where(active, token, state.last)
        column = jnp.where(active, state.count, state.tokens.shape[1])
        rows = jnp.arange(token.shape[0])
        return DecodeState(
            cache,
            state.tokens.at[rows, column].set(token, mode="drop"),
            state.count + active,
            token,
            state.done | (active & jnp.isin(token, stop_tokens)),
        )

    return _readable(network, jax.lax.while_loop(unfinished, step, state))
