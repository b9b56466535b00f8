"""Rival exchanges of sequence parallelism: all-gather, ring attention, late Ulysses, and zigzag shards.

`all_gather` and `ring` are `FarAttention` functions of what one device stores (`zdc_jax.parallel.far`). The
functions named `…_attention` add recent tokens and serve `Transformer.hidden`.

In zigzag shards, device i of U stores chunks i and 2U-1-i of 2U chunks of a prompt. So all devices have the
same amount of causal attention, as in Llama 3's context parallelism and in zigzag ring attention. Tokens are
permuted once, before they are embedded. `all_gather_zigzag` and `ring_zigzag` accept q [B, 2c, N, H] and k, v
[B, 2c, K, H] in chunks of c tokens. They serve `ZigzagTransformer`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation, self_attention
from zdc_jax.parallel.attention import ShardedAttention, check_attention, sharded_attention, widened
from zdc_jax.parallel.exchange import gather_head_groups, moved, scatter_head_groups
from zdc_jax.parallel.far import FarKeys, Near
from zdc_jax.parallel.layers import embed_prompts, last_token, prompt_layer
from zdc_jax.parallel.mesh import SEQUENCE


def all_gather(
    q: Array, k: Array, v: Array, keys: FarKeys, near: Near | None
) -> tuple[Array, Array | None, None]:
    """Gather all keys and values on every device; queries stay (Megatron-LM's context parallelism)."""

    def gather(x):
        return jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True)

    both, _ = jax.lax.optimization_barrier((moved(gather, jnp.concatenate([k, v], -1)), near))
    k, v = jnp.split(both, [k.shape[-1]], axis=-1)
    return *keys.attend(q, k, v, jax.lax.axis_index(SEQUENCE) * q.shape[1]), None


def ring(q: Array, k: Array, v: Array, keys: FarKeys, near: Near | None) -> tuple[Array, Array | None, None]:
    """Send keys and values round, and merge partial results in float32 (Ring Attention, Liu et al., 2023).

    Tokens are divided in order, so the last device has most to do. Keys later than all queries of a device
    are skipped.
    """
    del near  # Attention to older tokens alone hides the transfer of the next keys.
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
    """Run `sharded_attention` with `all_gather`; `options` are those of `sharded_attention`."""
    return sharded_attention(q, k, v, far=all_gather, **options)


def ring_attention(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, None]:
    """Run `sharded_attention` with `ring`; `options` are those of `sharded_attention`."""
    return sharded_attention(q, k, v, far=ring, **options)


def late_ulysses(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    spec: PrefixRing,
    implementation: Implementation | None = None,
) -> tuple[Array, None]:
    """Exchange all coordinates and truncate afterwards, as methods do that compress only the cache.

    Shapes are those of `sharded_attention`. Recent tokens too are computed by head, after the exchange.

    Raises:
      NotImplementedError: the chosen implementation cannot serve this call, with the reason.
    """
    keys = FarKeys.of(q, v, spec, scale=scale, implementation=implementation)
    width = v.shape[-1]
    ((q, k, v),) = scatter_head_groups((q, k, v), SEQUENCE)
    if keys.are_all:
        q, k, v = q[..., : spec.R], k[..., : spec.R], v[..., : spec.Z]
    o, _ = self_attention(
        q,
        k,
        v,
        scale=keys.scale,
        qk_rank=spec.R,
        v_rank=spec.Z,
        sinks=keys.sinks,
        window=keys.window,
        implementation=keys.implementation,
    )
    return gather_head_groups([(widened(o, width), None)], SEQUENCE)


def zigzag_order(length: int, degree: int) -> Int[np.ndarray, " T"]:
    """Return the position of the token in each row of all devices; 2 `degree` divides `length` T."""
    chunks = np.arange(length).reshape(2 * degree, -1)
    return np.stack([chunks[:degree], chunks[: degree - 1 : -1]], 1).ravel()


def all_gather_zigzag(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, None]:
    """Gather keys and values of all tokens in order; each query chunk reads those up to its own.

    Args:
      options: `scale`, `spec` and `implementation` of `sharded_attention`.

    Raises:
      NotImplementedError: the plan has recent tokens at full rank, or the implementation cannot serve this
        call.
    """
    return _attended(q, k, v, _all_gather, **options)


def ring_zigzag(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, None]:
    """Send keys and values round and merge in float32; options and errors are those of `all_gather_zigzag`.

    All queries see the first chunk of an earlier device. The second query chunk sees both chunks of a later
    one.
    """
    return _attended(q, k, v, _ring, **options)


def _attended(
    q: Array,
    k: Array,
    v: Array,
    far: Callable[[Array, Array, Array, FarKeys], Array],
    *,
    scale: float,
    spec: PrefixRing,
    implementation: Implementation | None = None,
) -> tuple[Array, None]:
    keys = FarKeys.of(q, v, spec, scale=scale, implementation=implementation)
    if not keys.are_all:
        raise NotImplementedError(f"zigzag shards have no near set, not {keys.sinks=}, {keys.window=}")
    return widened(far(q[..., : spec.R], k[..., : spec.R], v[..., : spec.Z], keys), v.shape[-1]), None


def _all_gather(q: Array, k: Array, v: Array, keys: FarKeys) -> Array:
    U, c = jax.lax.axis_size(SEQUENCE), q.shape[1] // 2

    def gather(x):
        return jax.lax.all_gather(x, SEQUENCE, axis=1)

    both = moved(gather, jnp.concatenate([k, v], -1))  # [B, U, 2c, K, R+Z]
    in_order = [both[:, device, :c] for device in range(U)]
    in_order += [both[:, device, c:] for device in reversed(range(U))]
    k, v = jnp.split(jnp.concatenate(in_order, 1), [k.shape[-1]], axis=-1)
    chunks = zip((q[:, :c], q[:, c:]), _chunks(), strict=True)
    return jnp.concatenate([keys.attend(chunk, k, v, index * c)[0] for chunk, index in chunks], 1)


def _ring(q: Array, k: Array, v: Array, keys: FarKeys) -> Array:
    U, me = jax.lax.axis_size(SEQUENCE), jax.lax.axis_index(SEQUENCE)
    onward = [(source, (source + 1) % U) for source in range(U)]
    (_, T, N, R), c = q.shape, q.shape[1] // 2

    def attend(q: Array, both: Array, start: int) -> tuple[Array, Array]:
        o, lse = keys.attend(q, both[..., :R], both[..., R:], start)
        return o.astype(jnp.float32), lse

    def of_one_before(both: Array) -> tuple[Array, Array]:
        return attend(q, both[:, :c], c)

    def of_one_behind(both: Array) -> tuple[Array, Array]:
        o, lse = attend(q[:, c:], both, T)
        unseen = jnp.zeros_like(o), jnp.full((len(q), N, c), -jnp.inf, lse.dtype)
        return jnp.concatenate([unseen[0], o], 1), jnp.concatenate([unseen[1], lse], 2)

    both = jnp.concatenate([k, v], -1)
    # A device's own two chunks attend to each other as one sequence.
    result = attend(q, both, 0)
    for distance in range(1, U):
        both = moved(lambda x: jax.lax.ppermute(x, SEQUENCE, onward), both)
        part = jax.lax.cond((me - distance) % U < me, of_one_before, of_one_behind, both)
        result = merge_partial([result, part])
    return result[0].astype(v.dtype)


def _chunks() -> tuple[Array, Array]:
    """Return the numbers of the two chunks that this device stores."""
    me = jax.lax.axis_index(SEQUENCE)
    return me, 2 * jax.lax.axis_size(SEQUENCE) - 1 - me


class ZigzagTransformer:
    """Prompts in zigzag shards over the devices of a network along `sequence`.

    Attributes:
      attention: `all_gather_zigzag` or `ring_zigzag`.

    Raises:
      NotImplementedError: the plan has shifted or quantized keys, or the payload is not native.
    """

    def __init__(self, network: Transformer, attention: ShardedAttention):
        check_attention(attention, network.payload, network.plan)
        self.network, self.attention = network, attention

    def hidden(
        self, tokens: Int[Array, "B T"], implementation: Implementation | None = None
    ) -> Float[Array, "B T' D"]:
        """Return the last hidden states, padded to a multiple of 2U, in `zigzag_order`.

        Raises:
          NotImplementedError: the plan has recent tokens at full rank, or the implementation cannot serve a
            call.
        """
        network, length = self.network, tokens.shape[1]
        tokens = jnp.pad(tokens, ((0, 0), (0, self.padded(length) - length)))[:, self.order(length)]
        x = embed_prompts(network.embeddings, tokens, jnp.int32(length), network.mesh, zigzag_positions)
        run_layer = partial(
            prompt_layer,
            end=jnp.full(len(x), length),
            aux=None,
            capacity=None,
            mesh=network.mesh,
            implementation=implementation,
            weights=network.weights,
            payload=network.payload,
            attention=self.attention,
            positions=zigzag_positions,
        )
        for block, spec in zip(network.prompt_layers, network.layer_caches, strict=True):
            x, _, _ = run_layer(block, x, spec=spec)
        return x

    def last_hidden(
        self,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        implementation: Implementation | None = None,
    ) -> Float[Array, "B D"]:
        """Return the hidden state of the last of `end` tokens of each prompt; raises as `hidden`."""
        row = jnp.asarray(np.argsort(self.order(tokens.shape[1])))[end - 1]
        return last_token(self.hidden(tokens, implementation), row + 1, self.network.mesh)

    def padded(self, length: int) -> int:
        """Return the padded length T'."""
        chunks = 2 * self.network.mesh.shape[SEQUENCE]
        return -(-length // chunks) * chunks

    def order(self, length: int) -> Int[np.ndarray, " T'"]:
        """Return `zigzag_order` for a prompt of `length` tokens."""
        return zigzag_order(self.padded(length), self.network.mesh.shape[SEQUENCE])


def zigzag_positions(x: Array) -> Int[Array, "B t"]:
    """Return positions of this device's tokens, for x [B, t, ...]; inside `on_mesh`."""
    B, c = x.shape[0], x.shape[1] // 2
    positions = jnp.concatenate([index * c + jnp.arange(c) for index in _chunks()])
    return jnp.broadcast_to(positions, (B, 2 * c))
