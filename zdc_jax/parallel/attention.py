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
from zdc_jax.plan import CompressionPlan

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

    Near keys are attended to on the device, at full rank, with a halo from the devices before it, while far
    keys are on their way (ours). A `coded` payload has near keys also where the plan has none, with the
    coordinates that the plan keeps.

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

    def cut(q: Array, k: Any, v: Array) -> tuple[Array, Any, Array]:
        return q[..., : spec.R], k[..., : spec.R], v[..., : spec.Z]

    if keys.are_all:
        o, _, exchanged = far(*cut(q, k, v), keys, None)
        return widened(o, v.shape[-1]), exchanged
    own_q, own_k, own_v = (q, k, v) if keys.of_plan else cut(q, k, v)
    # What near attention needs of other devices goes first: it is little, and near attention hides the rest.
    (q, k, v), fetched = jax.lax.optimization_barrier(((q, k, v), fetched_near(own_k, own_v, keys)))
    near = attend_fetched(own_q, fetched, keys)
    if not spec.R:
        return widened(near[0], v.shape[-1]), None
    o, lse, exchanged = far(*cut(q, k, v), keys, near)
    assert lse is not None  # It is there where there is a near set.
    return widened(merge_partial([near, (o, lse)])[0], v.shape[-1]), exchanged


def check_attention(attention: ShardedAttention, payload: Payload, plan: CompressionPlan) -> None:
    """Raises `NotImplementedError` where a payload, token classes or codes need `sharded_attention`, not
    another."""
    if attention is sharded_attention:
        return
    if payload != "native":
        raise NotImplementedError(f"{payload=} needs sharded_attention, {attention=} has none")
    for needed, it_is in (("token classes", plan.classes is not None), ("codes", plan.method != "zdc")):
        if it_is:
            raise NotImplementedError(f"{attention=} cannot do this call: {needed} need sharded_attention")


Fetched = tuple[Array, Array, Array, Array]
"""Near keys and values of one device's tokens with their halo, and those of the sinks."""


def attend_near(
    q: Float[Array, "B t N H"], k: Float[Array, "B t K H"], v: Float[Array, "B t K Z"], keys: FarKeys
) -> tuple[Float[Array, "B t N Z"], Float[Array, "B N t"]]:
    """Near attention of one device's tokens, with the halo and the sinks that it fetches, and log-sum-exp.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    return attend_fetched(q, fetched_near(k, v, keys), keys)


def fetched_near(k: Float[Array, "B t K H"], v: Float[Array, "B t K Z"], keys: FarKeys) -> Fetched:
    """What near attention needs, from this device and from others."""
    sinks = first_tokens(k, v, keys.sinks, SEQUENCE)
    return *with_halo(k, v, keys.window, SEQUENCE, keys.halo), *sinks


def attend_fetched(
    q: Float[Array, "B t N H"], fetched: Fetched, keys: FarKeys
) -> tuple[Float[Array, "B t N Z"], Float[Array, "B N t"]]:
    """`attend_near` with what was fetched."""
    start = jax.lax.axis_index(SEQUENCE) * q.shape[1]
    options: Any = {"scale": keys.scale, "window": keys.window, "implementation": keys.implementation}
    return near_attention(q, *fetched, start, **options)


def widened(o: Float[Array, "B t N Z"], width: int) -> Float[Array, "B t N Hv"]:
    """Zeros for the coordinates that were dropped and W_O still has, `width` in all."""
    return jnp.pad(o, [(0, 0)] * 3 + [(0, width - o.shape[-1])])
