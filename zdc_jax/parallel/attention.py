"""Attention of sequences whose tokens are divided over a mesh: several methods behind one function."""

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Float

from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.ops.attention import Implementation, near_attention, self_attention
from zdc_jax.parallel.exchange import gather_heads, scatter_heads
from zdc_jax.parallel.far import FarAttention, Keep, Keys, all_gather, ring, ulysses
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.parallel.near import first_tokens, with_halo
from zdc_jax.parallel.payload import Payload, Scales
from zdc_jax.plan import LayerRanks

Method = Literal["ulysses", "late_ulysses", "all_gather", "ring"]
METHODS: tuple[Method, ...] = get_args(Method)
"""`ulysses`: truncated coordinates are exchanged (dense Ulysses where the plan is full). `late_ulysses`: all
coordinates are exchanged and truncated after it, as methods do that compress only the cache. `all_gather`,
`ring`: truncated keys and values of all tokens come to the queries."""
_FAR: dict[Method, FarAttention] = {"all_gather": all_gather, "ring": ring}


def check_method(method: Method, payload: Payload) -> None:
    """Raises `ValueError` for an unknown method, `NotImplementedError` where it cannot send this payload."""
    if method not in METHODS:
        raise ValueError(f"{method=} must be one of {METHODS}")
    if payload == "float8" and method != "ulysses":
        raise NotImplementedError(f"{payload=} needs method='ulysses', {method=} has none")


def sharded_attention(
    q: Float[Array, "B t N Hq"],
    k: Float[Array, "B t K Hq"],
    v: Float[Array, "B t K Hv"],
    *,
    scale: float,
    ranks: LayerRanks,
    sinks: int,
    window: int,
    method: Method,
    implementation: Implementation | None = None,
    keep: Keep | None = None,
    scales: Scales | None = None,
) -> Float[Array, "B t N Hv"]:
    """`self_attention` of all tokens, for those of one device: inside `jax.shard_map`, T over `sequence`.

    Near keys are attended to on the device, at full rank, with a halo from the devices before it; that does
    not depend on what is exchanged for far keys, so that both may go on at once (ours).

    Args:
      q, k, v: as `self_attention` takes them, of this device's t tokens; coordinates past `ranks` are dropped
        where a plan without near keys is run on arrays that hold more.
      scale: factor on the scores, 1/√H of the original head dim.
      ranks: coordinates that far keys count with; sinks, window: near set, in tokens.
      method: see `METHODS`. implementation: of the attention, see `zdc_jax.ops.attention`.
      keep: only with `ulysses`; is given the far keys and values, for a cache, as they arrived.
      scales: only with `ulysses`; of a float8 payload, None for a native one (`zdc_jax.parallel.payload`).

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    near = bool(sinks or window) and (q.shape[-1] > ranks.qk or v.shape[-1] > ranks.v)
    if not near:
        sinks = window = 0
    length = q.shape[1] * jax.lax.axis_size(SEQUENCE)
    keys = Keys(scale, min(sinks, length), min(window, length), implementation)
    if method == "late_ulysses":
        return _late(q, k, v, ranks, keys)
    attend_far = partial(ulysses, keep=keep, scales=scales) if method == "ulysses" else _FAR[method]
    far = lambda: attend_far(q[..., : ranks.qk], k[..., : ranks.qk], v[..., : ranks.v], keys)
    if not near:
        return _widened(far()[0], v.shape[-1])
    parts = [attend_near(q, k, v, keys)]
    if ranks.qk:
        o, lse = far()
        assert lse is not None  # Every method gives it where there is a near set.
        parts.append((o, lse))
    return merged(parts)[0]


def merged(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """`merge_partial` of near attention and of what an exchange brings back, or of one of them alone."""
    if len(parts) == 1:
        return parts[0]
    # Wanted at once: else XLA's scheduler puts near attention behind the exchange instead of beside it.
    return merge_partial(jax.lax.optimization_barrier(parts))


def attend_near(
    q: Float[Array, "B t N H"], k: Float[Array, "B t K H"], v: Float[Array, "B t K H"], keys: Keys
) -> tuple[Float[Array, "B t N H"], Float[Array, "B N t"]]:
    """Near attention of one device's tokens, with the halo and the sinks that it fetches, and log-sum-exp.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    sink_k, sink_v = first_tokens(k, v, keys.sinks, SEQUENCE)
    k, v = with_halo(k, v, keys.window, SEQUENCE)
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


def _late(q: Array, k: Array, v: Array, ranks: LayerRanks, keys: Keys) -> Array:
    width = v.shape[-1]
    q, k, v = scatter_heads((q, k, v), SEQUENCE)
    if keys.are_all:
        q, k, v = q[..., : ranks.qk], k[..., : ranks.qk], v[..., : ranks.v]
    o, _ = self_attention(
        q,
        k,
        v,
        scale=keys.scale,
        qk_rank=ranks.qk,
        v_rank=ranks.v,
        sinks=keys.sinks,
        window=keys.window,
        implementation=keys.implementation,
    )
    return gather_heads(_widened(o, width), SEQUENCE)


def _widened(o: Array, width: int) -> Array:
    """Zeros for the coordinates that were dropped and W_O still has."""
    return jnp.pad(o, [(0, 0)] * 3 + [(0, width - o.shape[-1])])
