"""Prompts of caches in codes on a mesh: keys and values travel as the codes that the cache keeps (ours).

A far token answers from its code on one device, too. So each device codes its own tokens first, the exchange
carries codes in place of numbers, and what arrives is the cache: nothing is coded twice, and a mesh gives
what one device gives. Only q and o travel as numbers, or as the payload says.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.cache.coded_far import CodedFar
from zdc_jax.cache.coded_ring import CodedRing
from zdc_jax.cache.coded_store import CodedStore
from zdc_jax.cache.near_far import NearFarState
from zdc_jax.cache.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.spec import Call, LayerCacheSpec, State
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.attention import attend_fetched, fetched_near
from zdc_jax.parallel.exchange import gather_head_groups, head_groups, kv_copies, scatter_head_groups
from zdc_jax.parallel.far import FarKeys, Near
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.parallel.payload import AS_IS, Formats, Payload
from zdc_jax.parallel.prompt_cache import scattered_ring, stored
from zdc_jax.plan import CompressionPlan

CodedSpec = CodedFar | CodedRing


def check_codes(plan: CompressionPlan, payload: Payload, devices: int) -> None:
    """Raises `NotImplementedError`, with the reason, where caches of a plan of another method than `zdc`
    cannot be divided by head over so many devices."""
    K = plan.num_kv_heads
    refused = f"method={plan.method!r} does not run on a mesh"
    for layer, spec in enumerate(plan.layer_caches("bfloat16")):
        if not isinstance(spec, PrefixRing | CodedFar):
            raise NotImplementedError(f"{refused}: 'zdc' does, and methods that code tokens one by one")
        if isinstance(spec, CodedStore) and spec.block > 1:
            raise NotImplementedError(f"{refused}: layer {layer} codes {spec.block} tokens together")
        if spec.host_bytes(1024):
            raise NotImplementedError(f"{refused}: layer {layer} has memory='host'")
        if spec.queries_apart and kv_copies(K, devices) > 1:
            raise NotImplementedError(
                f"{refused} of {devices}: layer {layer} chooses by all queries of a KV head, and "
                f"num_kv_heads={K} is no multiple of the devices"
            )
    if payload == "float8":
        raise NotImplementedError(
            f"payload='float8' with method={plan.method!r}, whose keys and values travel as its own codes; "
            "must be 'native' or 'coded'"
        )


def coded_attention(
    q: Float[Array, "B t N Hq"],
    k: Float[Array, "B t K Hq"],
    v: Float[Array, "B t K Hv"],
    end: Int[Array, " B"],
    aux: Any,
    *,
    spec: CodedSpec,
    scale: float,
    implementation: Implementation | None,
    formats: Formats,
) -> tuple[Float[Array, "B t N Hv"], State | None, Any]:
    """Attention of one device's tokens on all tokens, as `spec.attend` gives it; inside `jax.shard_map`.

    Near keys are attended to on the device, with a halo, while q and codes are on their way.

    Args:
      q, k, v: of this device's t tokens, T over `sequence`.
      end: tokens that each row holds; those behind are padding.
      aux: what the layer before handed on of this device's heads.
      formats: how q, o and the log-sum-exp travel.

    Returns:
      attention; the store of all tokens of this device's heads, None without one; and what is handed on.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    ring = spec.near if isinstance(spec, CodedFar) else spec
    sinks, window = ring.near(q.shape[1] * jax.lax.axis_size(SEQUENCE))
    near: Near | None = None
    if sinks or window:
        keys = FarKeys(scale, sinks, window, implementation)
        fetched = fetched_near(ring.as_read(k), ring.as_read(v), keys)
        # It goes first, as in `sharded_attention`.
        (q, k, v), fetched = jax.lax.optimization_barrier(((q, k, v), fetched))
        near = attend_fetched(q, fetched, keys)
    if not isinstance(spec, CodedFar):
        assert near is not None  # A ring has near tokens.
        return near[0], None, aux
    call = Call(scale, implementation, end=end)
    o, lse, far, aux = _far(q[..., : spec.R], _coded(spec, k, v), near, spec, call, aux, formats)
    if near is None:
        return o, far, aux
    assert lse is not None
    return merge_partial([near, (o, lse)])[0], far, aux


def _far(
    q: Float[Array, "B t N R"],
    coded: State,
    near: Near | None,
    spec: CodedFar,
    call: Call,
    aux: Any,
    formats: Formats,
) -> tuple[Float[Array, "B t N Z"], Float[Array, "B N t"] | None, State, Any]:
    """Far attention by all-to-alls, as `zdc_jax.parallel.far.ulysses`, with codes on the way there.

    coded: of this device's tokens, as `_coded` gives them. The log-sum-exp comes back where near attention
    is to be merged.
    """
    leaves, tree = jax.tree.flatten(coded)
    # What is chosen is of all heads of a device at once.
    groups = 1 if spec.queries_apart else head_groups(leaves[0].shape[2], jax.lax.axis_size(SEQUENCE))
    sent, found, stores = [formats.q, *[AS_IS] * len(leaves)], [], []
    flat = [x.reshape(*x.shape[:3], math.prod(x.shape[3:])) for x in leaves]
    for heads, *arrived in scatter_head_groups((q, *flat), SEQUENCE, sent, groups, beside=near):
        (B, T), own = heads.shape[:2], spec.on_heads(arrived[0].shape[2])
        like = jax.tree.leaves(jax.eval_shape(lambda B=B, T=T, own=own: own.create_far(B, T)))
        stores.append(
            jax.tree.unflatten(tree, [_by_slot(x, leaf) for x, leaf in zip(arrived, like, strict=True)])
        )
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        o, lse, aux = own.far_part(stores[-1], heads, None, positions, call, aux)
        found.append((o, None if near is None else lse))
    gathered = gather_head_groups(found, SEQUENCE, formats.o, formats.lse)
    return *gathered, jax.tree.map(lambda *x: jnp.concatenate(x, 1), *stores), aux


def _coded(spec: CodedFar, k: Float[Array, "B t K Hq"], v: Float[Array, "B t K Hv"]) -> State:
    """What the store says of these tokens, leaves [B, t, K, …]."""
    (B, t), local = k.shape[:2], spec.on_heads(k.shape[2])
    state = NearFarState(local.near.create(B, t), local.create_far(B, t))
    positions, end = jnp.broadcast_to(jnp.arange(t), (B, t)), jnp.full(B, t, jnp.int32)
    return jax.tree.map(lambda x: x[:, :, :t].swapaxes(1, 2), local.write_far(state, k, v, positions, end))


def _by_slot(x: Shaped[Array, "B T k C"], like: jax.ShapeDtypeStruct) -> Shaped[Array, "B k S *rest"]:
    """Codes of all tokens in the slots of a store's leaf."""
    x = x.swapaxes(1, 2).reshape(*like.shape[:2], x.shape[1], *like.shape[3:])
    return stored(x, like.shape[2])


def coded_state(
    spec: CodedSpec,
    far: State | None,
    k: Float[Array, "B t K Hq"],
    v: Float[Array, "B t K Hv"],
    positions: Int[Array, "B t"],
    end: Int[Array, " B"],
    capacity: int,
) -> State:
    """Cache of one layer on one device, for `capacity` tokens a row; inside `jax.shard_map`.

    Args:
      far: the store of all tokens, as `coded_attention` gives it.
      k, v: of this device's tokens, which stand at `positions`.
      end: tokens that each row holds.
    """
    if isinstance(spec, CodedRing):
        return _near_state(spec, k, v, positions, end, capacity)
    B, heads = k.shape[0], jax.tree.leaves(far)[0].shape[1]
    own = spec.on_heads(heads)
    like = jax.eval_shape(lambda: own.create_far(B, capacity))
    far = jax.tree.map(lambda x, leaf: stored(x, leaf.shape[2]), far, like)
    if not spec.has_near:
        return NearFarState(own.near.create(B, capacity), far)
    return NearFarState(_near_state(spec.near, k, v, positions, end, capacity), far)


def _near_state(
    ring: PrefixRing, k: Array, v: Array, positions: Array, end: Array, capacity: int
) -> PrefixRingState:
    """The ring of this device's heads."""
    near, H = ring.near(capacity), k.shape[-1]
    both = scattered_ring(jnp.concatenate([k, v], -1), near, positions, end, capacity)
    none = jnp.zeros((both.shape[0], both.shape[1], 1, 0), k.dtype)
    return ring.encode_state(PrefixRingState(none, none, both[..., :H], both[..., H:], near))


def stored_bytes(spec: LayerCacheSpec) -> int:
    """Bytes that the codes of one token and KV head take on their way; 0 of a layer without far tokens."""
    if not isinstance(spec, CodedFar):
        return 0
    own, tokens = spec.on_heads(1), 1024
    leaves = jax.tree.leaves(jax.eval_shape(lambda: own.create_far(1, tokens)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // leaves[0].shape[2]
