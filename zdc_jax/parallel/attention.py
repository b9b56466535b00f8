"""Attention of tokens divided over a mesh: near keys on each device with a halo, far ones by an exchange."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.ops.attention import Implementation, near_attention
from zdc_jax.parallel.far import Exchanged, FarAttention, FarKeys, ulysses
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.parallel.near import first_tokens, with_halo
from zdc_jax.parallel.payload import NATIVE, Formats, Payload
from zdc_jax.plan import TokenClasses

ShardedAttention = Callable[..., tuple[Array, Any]]
"""Is called as `sharded_attention`, and with `far` only where it is that very function."""


def sharded_attention(
    q: Float[Array, "B t N Hq"],
    k: Float[Array, "B t K Hq"],
    v: Float[Array, "B t K Hv"],
    *,
    scale: float,
    spec: PrefixRing,
    implementation: Implementation | None = None,
    far: FarAttention = ulysses,
    formats: Formats = NATIVE,
) -> tuple[Float[Array, "B t N Hv"], Exchanged | None]:
    """`self_attention` of all tokens, for those of one device: inside `jax.shard_map`, T over `sequence`.

    Near keys are attended to on the device, at full rank, with a halo from the devices before it; that does
    not depend on what is exchanged for far keys, so that both may go on at once (ours). A `coded` payload has
    near keys also where the plan has none, with the coordinates that the plan keeps.

    Args:
      q, k, v: as `self_attention` takes them, of this device's t tokens; coordinates past R and Z are dropped
        where a plan without near keys is run on arrays that hold more.
      scale: factor on the scores, 1/√H of the original head dim.
      spec: coordinates that far keys count with; near set.
      implementation: of the attention, see `zdc_jax.ops.attention`.
      far: how queries and far keys of other devices come together.
      formats: how they travel; for `ulysses`.

    Returns:
      attention, and the far keys and values as they arrived, for a cache; None where `far` has none.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    keys = FarKeys.of(q, v, spec, scale=scale, implementation=implementation, formats=formats)
    cut = q[..., : spec.R], k[..., : spec.R], v[..., : spec.Z]
    if keys.are_all:
        o, _, exchanged = far(*cut, keys)
        return widened(o, v.shape[-1]), exchanged
    near = (q, k, v) if keys.of_plan else cut
    parts, exchanged = [attend_near(*near, keys)], None
    if spec.R:
        o, lse, exchanged = far(*cut, keys)
        assert lse is not None  # It is there where there is a near set.
        parts.append((o, lse))
    return widened(merged(parts)[0], v.shape[-1]), exchanged


def check_attention(attention: ShardedAttention, payload: Payload, classes: TokenClasses | None) -> None:
    """Raises `NotImplementedError` where a payload or token classes need `sharded_attention`, not another."""
    if attention is sharded_attention:
        return
    if payload != "native":
        raise NotImplementedError(f"{payload=} needs sharded_attention, {attention=} has none")
    if classes is not None:
        raise NotImplementedError(f"{attention=} cannot do this call: token classes need sharded_attention")


def merged(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """`merge_partial` of near attention and of what an exchange brings back, or of one of them alone."""
    if len(parts) == 1:
        return parts[0]
    # Wanted at once: else XLA's scheduler puts near attention behind the exchange instead of beside it.
    return merge_partial(jax.lax.optimization_barrier(parts))


def attend_near(
    q: Float[Array, "B t N H"], k: Float[Array, "B t K H"], v: Float[Array, "B t K Z"], keys: FarKeys
) -> tuple[Float[Array, "B t N Z"], Float[Array, "B N t"]]:
    """Near attention of one device's tokens, with the halo and the sinks that it fetches, and log-sum-exp.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    sink_k, sink_v = first_tokens(k, v, keys.sinks, SEQUENCE)
    k, v = with_halo(k, v, keys.window, SEQUENCE, keys.halo)
    return near_attention(
        q,
        k,
        v,
        sink_k,
        sink_v,
        jax.lax.axis_index(SEQUENCE) * q.shape[1],
        scale=keys.scale,
        window=keys.window,
        implementation=keys.implementation,
    )


def widened(o: Float[Array, "B t N Z"], width: int) -> Float[Array, "B t N Hv"]:
    """Zeros for the coordinates that were dropped and W_O still has, `width` in all."""
    return jnp.pad(o, [(0, 0)] * 3 + [(0, width - o.shape[-1])])
