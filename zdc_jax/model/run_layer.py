"""Programs that run one layer on one device: on whole sequences, on prompts, and on new tokens."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from zdc_jax.axes import Array
from zdc_jax.cache.specs.spec import Call, LayerCacheSpec, NewTokens, State
from zdc_jax.model.block import Block, HalfLayer, map_tokens
from zdc_jax.model.tiles import attend_one_by_one
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.new_keys import NewKeys


@partial(jax.jit, static_argnames=("spec", "capacity"))
def read_layer_exactly(
    block: Block, spec: LayerCacheSpec, x: Array, positions: Array, end: Array, capacity: int
) -> tuple[Array, State]:
    """Run one layer on whole prompts with exact attention; return its output and its compressed cache."""
    call = Call(block.attention.scale)

    def attend(q: Array, k: NewKeys, v: Array) -> tuple[Array, State]:
        q, k = k.rotate(q, None)
        o, lse = block.attention.attend(q, k, v)
        return o, spec.keep_prompt(q, NewTokens(k, v, positions, end), lse, capacity, call)

    return block(x, positions, attend, project=spec.project)


@partial(jax.jit, static_argnames=("spec", "implementation"))
def run_whole_layer(
    block: Block,
    spec: LayerCacheSpec,
    x: Array,
    positions: Array,
    aux: Any,
    implementation: Implementation | None,
) -> tuple[Array, Any]:
    """Run one layer on whole sequences. Jitted so that equal layers are traced and compiled once."""
    call, (B, T) = Call(block.attention.scale, implementation), positions.shape

    def attend(q: Array, k: NewKeys, v: Any) -> tuple[Array, Any]:
        new = NewTokens(k, v, positions, jnp.full(B, T, jnp.int32))
        attended = spec.attend_whole(q, new, aux, call)
        return attended.o, attended.aux

    return block(x, positions, attend, implementation, spec.project)


def start_layer(
    block: Block,
    spec: LayerCacheSpec,
    x: Array,
    state: State,
    aux: Any,
    positions: Array,
    end: Array,
    implementation: Implementation | None,
    table: Array | None = None,
    first: Array | None = None,
    needed_from: Array | None = None,
) -> tuple[HalfLayer, State, Any]:
    """Run one layer on new tokens x [B, T, D] until its heads have attended.

    See `LayerCacheSpec.attend` for the arguments, and `Call` for `table`, `first` and `needed_from`. `x` may
    come from `duplicate_single_token`: the weights then see two copies, attention and cache the first.

    Returns:
      The layer, its extended cache and auxiliary results.
    """
    call = Call(block.attention.scale, implementation, table, first, needed_from=needed_from)
    batch = len(end)

    def attend(q: Array, k: NewKeys, v: Array) -> tuple[Array, tuple[State, Any]]:
        if block.reproducible:
            assert first is None
            rows, ends = (
                jnp.broadcast_to(each[:, None], positions.shape) for each in (jnp.arange(batch), end)
            )
            attended = attend_one_by_one(spec, state, q, k, v, rows, positions, ends, aux, call)
            return attended.o, (attended.state, attended.aux)
        q, k, v = map_tokens(lambda array: array[:batch], q, k, v)
        copied = replace(call, copies=len(x) // batch)
        attended = spec.attend(state, q, NewTokens(k, v, positions, end), aux, copied)
        o = jnp.broadcast_to(attended.o, (len(x), *attended.o.shape[1:]))
        return o, (attended.state, attended.aux)

    wide = jnp.broadcast_to(positions, (len(x), positions.shape[1]))
    half, (state, aux) = block.start(x, wide, attend, implementation, spec.project)
    return half, state, aux


start_layer_alone = jax.jit(start_layer, static_argnames=("spec", "implementation"))
"""Program of `start_layer`, compiled once for equal layers."""


@partial(jax.jit, static_argnames=("spec", "implementation"))
def extend_layer_alone(
    block: Block, spec: LayerCacheSpec, *inputs: Any, **options: Any
) -> tuple[Array, State, Any]:
    """Run one layer on new tokens; return its output and the other results of `start_layer`.

    The arguments are those of `start_layer`. Compiled once for equal layers.
    """
    half, state, aux = start_layer(block, spec, *inputs, **options)
    return block.finish(half), state, aux


@jax.jit
def finish_layer(block: Block, half: HalfLayer) -> Array:
    """Return the output of a layer after `Block.start`, for the tokens that `half` has."""
    return block.finish(half)
