"""Far attention without Ulysses: truncated keys and values of all tokens come to the queries.

`all_gather` and `ring` are `FarAttention` functions of what one device holds (`zdc_jax.parallel.far`). Those
with `_attention` put near attention beside them and are given to `ShardedTransformer.hidden`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.parallel.attention import sharded_attention
from zdc_jax.parallel.exchange import moved
from zdc_jax.parallel.far import FarKeys, Near
from zdc_jax.parallel.mesh import SEQUENCE


def all_gather(
    q: Array, k: Array, v: Array, keys: FarKeys, near: Near | None
) -> tuple[Array, Array | None, None]:
    """Keys and values of all tokens on every device, queries stay (Megatron-LM's context parallelism)."""

    def gather(x):
        return jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True)

    both, _ = jax.lax.optimization_barrier((moved(gather, jnp.concatenate([k, v], -1)), near))
    k, v = jnp.split(both, [k.shape[-1]], axis=-1)
    return *keys.attend(q, k, v, jax.lax.axis_index(SEQUENCE) * q.shape[1]), None


def ring(q: Array, k: Array, v: Array, keys: FarKeys, near: Near | None) -> tuple[Array, Array | None, None]:
    """Keys and values go round, partial results are merged in float32 (Ring Attention, Liu et al., 2023).

    Tokens are divided in order, so that the last device has most to do; keys later than all queries of a
    device pass it by.
    """
    del near  # Far attention hides the way of the next keys alone.
    U, me = jax.lax.axis_size(SEQUENCE), jax.lax.axis_index(SEQUENCE)
    onward = [(source, (source + 1) % U) for source in range(U)]
    (B, t, N, R), Z = q.shape, v.shape[-1]
    unseen = jnp.zeros((B, t, N, Z), jnp.float32), jnp.full((B, N, t), -jnp.inf, jnp.float32)
    result, both = unseen, jnp.concatenate([k, v], -1)
    for distance in range(U):
        source = (me - distance) % U

        def attend(both: Array, source: Array = source) -> tuple[Array, Array]:
            o, lse = keys.attend(q, both[..., :R], both[..., R:], me * t, source * t)
            return o.astype(jnp.float32), lse

        part = jax.lax.cond(source <= me, attend, lambda _: unseen, both)
        result = merge_partial([result, part])
        if distance < U - 1:
            both = moved(lambda x: jax.lax.ppermute(x, SEQUENCE, onward), both)
    return result[0].astype(v.dtype), result[1], None


def all_gather_attention(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, None]:
    """`sharded_attention`, whose options it takes, with `all_gather`."""
    return sharded_attention(q, k, v, far=all_gather, **options)


def ring_attention(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, None]:
    """`sharded_attention`, whose options it takes, with `ring`."""
    return sharded_attention(q, k, v, far=ring, **options)
