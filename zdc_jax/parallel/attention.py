"""Attention of tokens divided over a mesh: near keys by a halo, far keys by an exchange."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.ops.attention import Implementation, near_attention
from zdc_jax.ops.shift import ShiftedQueries
from zdc_jax.parallel.far import Exchanged, FarAttention, FarKeys, ulysses
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.parallel.near import first_tokens, with_halo
from zdc_jax.parallel.payload import NATIVE, Formats, Payload
from zdc_jax.plan import CompressionPlan

ShardedAttention = Callable[..., tuple[Array, Any]]
"""Function with the signature of `sharded_attention`; only that function itself also accepts `far`."""


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
    shift: ShiftedQueries | None = None,
) -> tuple[Float[Array, "B t N Hv"], Exchanged | None]:
    """Compute `self_attention` for one device's tokens inside `jax.shard_map`, with T along `sequence`.

    Near keys stay on the device, at full rank, with a halo from the preceding devices. Near attention runs
    while far keys are in transit (ours). A `coded` payload has near keys even if the plan has none; they then
    keep the plan's coordinates.

    Args:
      q: queries of this device's t tokens, as in `self_attention`. Coordinates of q, k and v after R and Z
        are dropped if a plan without near keys runs on wider arrays.
      k: keys of the same tokens.
      v: values of the same tokens.
      scale: factor on the scores, 1/√H of the original head dimension.
      spec: ranks of far keys, and the near set.
      implementation: of attention, see `zdc_jax.ops.attention`.
      far: exchange of queries and far keys between devices.
      formats: formats of the exchange, for `ulysses`.
      shift: queries for the scores that keys without their mean lack, for `ulysses`; or None.

    Returns:
      The output, and far keys and values as they arrived, for a cache; None if `far` provides none.

    Raises:
      NotImplementedError: the requested implementation cannot serve this call; the message says why.
    """
    options: Any = {"scale": scale, "implementation": implementation, "formats": formats, "shift": shift}
    keys = FarKeys.of(q, v, spec, **options)

    def cut(q: Array, k: Any, v: Array) -> tuple[Array, Any, Array]:
        return q[..., : spec.R], k[..., : spec.R], v[..., : spec.Z]

    if keys.are_all:
        o, _, exchanged = far(*cut(q, k, v), keys, None)
        return widened(o, v.shape[-1]), exchanged
    own_q, own_k, own_v = (q, k, v) if keys.of_plan else cut(q, k, v)
    # Fetch near keys first: they are few, and near attention then hides the exchange of far keys.
    (q, k, v), fetched = jax.lax.optimization_barrier(((q, k, v), fetch_near(own_k, own_v, keys)))
    near = attend_to_fetched(own_q, fetched, keys)
    if not spec.R:
        return widened(near[0], v.shape[-1]), None
    o, lse, exchanged = far(*cut(q, k, v), keys, near)
    assert lse is not None  # `far` returns it if there is a near set.
    return widened(merge_partial([near, (o, lse)])[0], v.shape[-1]), exchanged


def check_attention(attention: ShardedAttention, payload: Payload, plan: CompressionPlan) -> None:
    """Raise `NotImplementedError` if payload or plan need `sharded_attention`, but `attention` is another."""
    if attention is sharded_attention:
        return
    name = getattr(attention, "__name__", repr(attention))
    if payload != "native":
        raise NotImplementedError(f"{payload=}: not supported by attention={name}; use sharded_attention")
    if any(ranks.shift for ranks in plan.layers):
        raise NotImplementedError(f"attention={name}: shifted keys need sharded_attention")
    if plan.exchanges_quantized:
        raise NotImplementedError(f"attention={name}: method={plan.method!r} needs sharded_attention")


NearInputs = tuple[Array, Array, Array, Array]
"""Near keys and values of one device's tokens with their halo, then keys and values of the sinks."""


def fetch_near(k: Float[Array, "B t K H"], v: Float[Array, "B t K Z"], keys: FarKeys) -> NearInputs:
    """Fetch the keys and values that near attention needs from this device and others."""
    sinks = first_tokens(k, v, keys.sinks, SEQUENCE)
    return *with_halo(k, v, keys.window, SEQUENCE, keys.halo), *sinks


def attend_to_fetched(
    q: Float[Array, "B t N H"], fetched: NearInputs, keys: FarKeys
) -> tuple[Float[Array, "B t N Z"], Float[Array, "B N t"]]:
    """Compute near attention of one device's tokens.

    Returns:
      The output and its log-sum-exp.

    Raises:
      NotImplementedError: the requested implementation cannot serve this call; the message says why.
    """
    start = jax.lax.axis_index(SEQUENCE) * q.shape[1]
    options: Any = {"scale": keys.scale, "window": keys.window, "implementation": keys.implementation}
    if keys.shift is not None:
        length = q.shape[1] * jax.lax.axis_size(SEQUENCE)
        options["block_scores"] = keys.shift.block_scores(length, keys.scale)
    return near_attention(q, *fetched, start, **options)


def widened(o: Float[Array, "B t N Z"], width: int) -> Float[Array, "B t N Hv"]:
    """Pad outputs with zeros to `width` coordinates, for a W_O that was not truncated."""
    return jnp.pad(o, [(0, 0)] * 3 + [(0, width - o.shape[-1])])
