"""Prompts of quantized caches on a mesh: keys and values travel in the cache's own codes (ours).

A cache on one device also attends to far tokens through their quantized values. So each device quantizes its
own tokens first, the exchange carries quantized values, and what arrives is the cache. Nothing is quantized
twice, and a mesh returns what one device returns. Only q and o travel unquantized, or as the payload says.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.cache.specs.coded_far import CodedFar
from zdc_jax.cache.specs.coded_ring import CodedRing
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.near_far import NearFarState
from zdc_jax.cache.specs.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.specs.spec import Call, NewTokens, State
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.ops.shift import ShiftedQueries
from zdc_jax.parallel.attention import attend_to_fetched, fetch_near
from zdc_jax.parallel.exchange import gather_head_groups, head_groups, kv_copies, scatter_head_groups
from zdc_jax.parallel.far import FarKeys, Near, block_scores_of
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.parallel.payload import AS_IS, Formats, Payload
from zdc_jax.parallel.prompt_cache import fit_slots, scatter_ring
from zdc_jax.plan import CompressionPlan

CodedSpec = CodedFar | CodedRing


def check_caches(plan: CompressionPlan, payload: Payload, devices: int) -> None:
    """Raise `NotImplementedError` if the caches of a plan cannot be divided by head over `devices` devices.

    The message gives the reason.
    """
    K = plan.num_kv_heads
    refused = f"method={plan.method!r}: does not run on a mesh"
    for layer, spec in enumerate(plan.layer_caches("bfloat16")):
        if spec.exchange is None:
            raise NotImplementedError(f"{refused}; use 'zdc' or a method that quantizes tokens one by one")
        if isinstance(spec, CodedStore) and spec.block > 1:
            raise NotImplementedError(
                f"{refused}, because layer {layer} quantizes {spec.block} tokens together; "
                "use a method that quantizes tokens one by one"
            )
        if spec.host_bytes(1024):
            raise NotImplementedError(
                f"{refused}, because layer {layer} has memory='host'; use memory='device'"
            )
        if spec.queries_apart and kv_copies(K, devices) > 1:
            raise NotImplementedError(
                f"{refused} of {devices} devices, because layer {layer} selects tokens by all queries of a "
                f"KV head; num_kv_heads={K} must be a multiple of the devices"
            )
    if payload == "float8" and plan.exchanges_quantized:
        raise NotImplementedError(
            f"payload='float8': not supported with method={plan.method!r}, which exchanges keys and values "
            "in its own codes; use 'native' or 'coded'"
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
    shift: ShiftedQueries | None = None,
) -> tuple[Float[Array, "B t N Hv"], State | None, Any]:
    """Attend from one device's tokens to all tokens, as `spec.attend` does; inside `jax.shard_map`.

    Near attention runs on the device, with a halo, while q and the quantized keys and values are in transit.

    Args:
      q: queries of this device's t tokens, T along `sequence`.
      k: keys of the same tokens.
      v: values of the same tokens.
      end: length of each sequence; later tokens are padding.
      aux: what the previous layer hands on for this device's heads.
      spec: the layer's cache.
      scale: factor on the scores.
      implementation: of attention; None chooses.
      formats: formats of q, o and the log-sum-exp.
      shift: queries for the scores that keys without their mean lack, or None.

    Returns:
      The output; the store of all tokens of this device's heads, None if there is none; and what the layer
      hands on.

    Raises:
      NotImplementedError: the requested implementation cannot serve this call; the message says why.
    """
    ring = spec.near if isinstance(spec, CodedFar) else spec
    sinks, window = ring.near(q.shape[1] * jax.lax.axis_size(SEQUENCE))
    near: Near | None = None
    if sinks or window:
        keys = FarKeys(scale, sinks, window, implementation, shift=shift)
        fetched = fetch_near(ring.as_read(k), ring.as_read(v), keys)
        # Fetch near keys first, as in `sharded_attention`.
        (q, k, v), fetched = jax.lax.optimization_barrier(((q, k, v), fetched))
        near = attend_to_fetched(q, fetched, keys)
    if not isinstance(spec, CodedFar):
        assert near is not None  # A ring always has near tokens.
        return near[0], None, aux
    call = Call(scale, implementation, end=end)
    quantized = _quantize(spec, k, v)
    o, lse, far, aux = _attend_far(q[..., : spec.R], quantized, near, spec, call, aux, formats, shift)
    if near is None:
        return o, far, aux
    assert lse is not None
    return merge_partial([near, (o, lse)])[0], far, aux


def _attend_far(
    q: Float[Array, "B t N R"],
    quantized: State,
    near: Near | None,
    spec: CodedFar,
    call: Call,
    aux: Any,
    formats: Formats,
    shift: ShiftedQueries | None,
) -> tuple[Float[Array, "B t N Z"], Float[Array, "B N t"] | None, State, Any]:
    """Compute far attention by all-to-alls, as `zdc_jax.parallel.far.ulysses`, on quantized keys and values.

    `quantized` is the result of `_quantize` for this device's tokens. The log-sum-exp is returned only to be
    merged with near attention.
    """
    leaves, tree = jax.tree.flatten(quantized)
    # Selection results cover all heads of a device, so heads cannot be split into groups.
    groups = 1 if spec.queries_apart else head_groups(leaves[0].shape[2], jax.lax.axis_size(SEQUENCE))
    sent, outputs, stores = [formats.q, *[AS_IS] * len(leaves)], [], []
    flat = [x.reshape(*x.shape[:3], math.prod(x.shape[3:])) for x in leaves]
    products = [] if shift is None else [shift.products]
    sent += [AS_IS] * len(products)
    parts = (q, *flat, *products)
    for heads, *arrived in scatter_head_groups(parts, SEQUENCE, sent, groups, overlapped=near):
        scores = block_scores_of(shift, [arrived.pop() for _ in products], call.scale)
        (B, T), own = heads.shape[:2], spec.on_heads(arrived[0].shape[2])
        like = jax.tree.leaves(jax.eval_shape(lambda B=B, T=T, own=own: own.create_far(B, T)))
        slots = [_arrange_by_slot(x, leaf) for x, leaf in zip(arrived, like, strict=True)]
        stores.append(jax.tree.unflatten(tree, slots))
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        own_call = replace(call, block_scores=scores)
        o, lse, aux = own.far_part(stores[-1], heads, None, positions, own_call, aux)
        outputs.append((o, None if near is None else lse))
    gathered, gathered_lse = gather_head_groups(outputs, SEQUENCE, formats.o, formats.lse)
    return gathered, gathered_lse, jax.tree.map(lambda *x: jnp.concatenate(x, 1), *stores), aux


def _quantize(spec: CodedFar, k: Float[Array, "B t K Hq"], v: Float[Array, "B t K Hv"]) -> State:
    """Return the quantized values that the store keeps of these tokens, leaves [B, t, K, …]."""
    (B, t), local = k.shape[:2], spec.on_heads(k.shape[2])
    state = NearFarState(local.near.create(B, t), local.create_far(B, t))
    positions, end = jnp.broadcast_to(jnp.arange(t), (B, t)), jnp.full(B, t, jnp.int32)
    far = local.write_far(state, NewTokens(NewKeys(k), v, positions, end))
    return jax.tree.map(lambda x: x[:, :, :t].swapaxes(1, 2), far)


def _arrange_by_slot(x: Shaped[Array, "B T k C"], like: jax.ShapeDtypeStruct) -> Shaped[Array, "B k S *rest"]:
    """Arrange quantized values of all tokens in the slots of a store's leaf."""
    x = x.swapaxes(1, 2).reshape(*like.shape[:2], x.shape[1], *like.shape[3:])
    return fit_slots(x, like.shape[2])


def coded_state(
    spec: CodedSpec,
    far: State | None,
    k: Float[Array, "B t K Hq"],
    v: Float[Array, "B t K Hv"],
    positions: Int[Array, "B t"],
    end: Int[Array, " B"],
    capacity: int,
) -> State:
    """Create one layer's cache on one device, for `capacity` tokens per sequence; inside `jax.shard_map`.

    Args:
      spec: the layer's cache.
      far: the store of all tokens, from `coded_attention`.
      k: keys of this device's tokens.
      v: values of this device's tokens.
      positions: positions of this device's tokens.
      end: length of each sequence.
      capacity: tokens per sequence.
    """
    if isinstance(spec, CodedRing):
        return _create_ring(spec, k, v, positions, end, capacity)
    B, heads = k.shape[0], jax.tree.leaves(far)[0].shape[1]
    own = spec.on_heads(heads)
    like = jax.eval_shape(lambda: own.create_far(B, capacity))
    far = jax.tree.map(lambda x, leaf: fit_slots(x, leaf.shape[2]), far, like)
    if not spec.has_near:
        return NearFarState(own.near.create(B, capacity), far)
    return NearFarState(_create_ring(spec.near, k, v, positions, end, capacity), far)


def _create_ring(
    ring: PrefixRing, k: Array, v: Array, positions: Array, end: Array, capacity: int
) -> PrefixRingState:
    """Create the ring of this device's heads."""
    near, H = ring.near(capacity), k.shape[-1]
    both = scatter_ring(jnp.concatenate([k, v], -1), near, positions, end, capacity)
    both = fit_slots(both, ring.ring_slots(capacity))
    empty = jnp.zeros((both.shape[0], both.shape[1], 1, 0), k.dtype)
    return ring.encode_state(PrefixRingState(empty, empty, both[..., :H], both[..., H:], near))
