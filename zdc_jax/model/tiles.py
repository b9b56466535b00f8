"""Layers whose results for a token depend on that token and on earlier ones of its sequence alone (ours).

Programs of different width round differently: matrix products of another shape sum in another order.
Answers then depend on chunk widths, cached prefixes and other requests, and quantized caches amplify that.
Here tokens pass through all products in tiles of one shape, and each token attends alone, as in decoding.
That is slow, but equal to the last bit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int, Shaped

from zdc_jax.axes import Array
from zdc_jax.cache.specs.spec import Attended, Call, LayerCacheSpec, NewTokens, State
from zdc_jax.ops.new_keys import NewKeys

TILE = 16
"""Tokens in a tile. Larger tiles read prompts faster and waste more work on single tokens."""


def by_tiles(compute: Callable[..., Any], *inputs: Shaped[Array, "B T *_"]) -> Any:
    """Return `compute(*inputs)` for inputs cut into tiles [1, TILE, …].

    Args:
      compute: function of tokens that treats each alone; it returns a tree of arrays [B, T, …].
      inputs: arrays of tokens, cut alike. The last tile is padded with zeros.
    """
    B, T = inputs[0].shape[:2]

    def cut(x: Array) -> Array:
        flat = x.reshape(B * T, *x.shape[2:])
        padded = jnp.pad(flat, ((0, -len(flat) % TILE), *((0, 0),) * (flat.ndim - 1)))
        return padded.reshape(-1, 1, TILE, *x.shape[2:])

    def run(tile: tuple[Array, ...]) -> Any:
        # XLA dissolves a loop of one tile. The barriers keep its operations from merging with others.
        return jax.lax.optimization_barrier(compute(*jax.lax.optimization_barrier(tile)))

    def join(x: Array) -> Array:
        return x.reshape(-1, *x.shape[3:])[: B * T].reshape(B, T, *x.shape[3:])

    return jax.tree.map(join, jax.lax.map(run, tuple(map(cut, inputs))))


def split_tokens(
    q: Array, k: NewKeys, v: Any
) -> tuple[list[Array], Callable[[list[Array]], tuple[Any, ...]]]:
    """Return the arrays of q, k and v that have a token axis, and a function that replaces them."""

    def collect(change: Callable[[Array], Array]) -> tuple[Any, ...]:
        return change(q), k.each(change), jax.tree.map(change, v)

    found: list[Array] = []

    def note(x: Array) -> Array:
        found.append(x)
        return x

    collect(note)

    def rebuild(arrays: list[Array]) -> tuple[Any, ...]:
        remaining = iter(arrays)
        return collect(lambda _: next(remaining))

    return found, rebuild


def attend_one_by_one(
    spec: LayerCacheSpec,
    state: State,
    q: Shaped[Array, "B T N R"],
    k: NewKeys,
    v: Any,
    rows: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    end: Int[Array, "B T"],
    aux: Any,
    call: Call,
) -> Attended:
    """Add tokens to a cache one after another, each of which attends as a decoded token does.

    Args:
      spec: cache of the layer.
      state: its arrays for all sequences.
      q, k, v: new tokens, as `LayerCacheSpec.attend` takes them; tokens of a sequence in order.
      rows: sequence of each token.
      positions: position of each token.
      end: length of the sequence, which is at most the token's position for padding.
      aux: values of the previous layer, with leaves [B * T, 1, …], or None.
      call: options, with the table of all sequences.

    Returns:
      The results of `LayerCacheSpec.attend` for all tokens.
    """
    arrays, rebuild = split_tokens(q, k, v)

    def flatten(x: Array) -> Array:
        return x.reshape(-1, 1, 1, *x.shape[2:])

    def add(state: State, token: Any) -> tuple[State, tuple[Array, Array, Any]]:
        arrays, row, position, end, aux = jax.lax.optimization_barrier(token)
        row, table = row.ravel(), call.table
        own = replace(call, table=None if table is None else jnp.take(table, row, axis=0, mode="clip"))
        length = jnp.minimum(end.ravel(), position.ravel() + 1)
        q, k, v = rebuild(arrays)
        token = NewTokens(k, v, position, length)
        attended = spec.attend(spec.of_rows(state, row), q, token, aux, own)
        state = spec.with_rows(state, row, attended.state)
        return state, jax.lax.optimization_barrier((attended.o, attended.lse, attended.aux))

    tokens = ([*map(flatten, arrays)], flatten(rows), flatten(positions), flatten(end), aux)
    state, (o, lse, aux) = jax.lax.scan(add, state, tokens)
    lse = lse.reshape(*q.shape[:2], -1).swapaxes(1, 2)
    return Attended(state, o.reshape(*q.shape[:2], *o.shape[3:]), lse, aux)
