"""KV-Runahead in one program for all devices of a mesh, in one or several processes.

Chunks are padded to the longest (`Partition.padding`). In every layer the cache goes from device to device as
in `benchmarks.mesh.rivals.runahead`, one hop after the other. Each hop is a collective permute between two
devices, and the other devices go on. So the devices run staggered. Each runs the same program, so its
attention waits until its own cache has been passed on.

A device keeps its own chunk. After the last layer, one exchange by head leaves the cache in the layout of
`Transformer.prefill` (ours). No device ever stores all layers of all tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from benchmarks.mesh.rivals.partition import Partition, cache_slots, in_eights
from benchmarks.mesh.rivals.runahead import longer, no_tokens, with_slots
from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.specs.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.specs.spec import Attended, Call, NewTokens
from zdc_jax.errors import MeshError
from zdc_jax.model.block import Block
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.parallel.exchange import kv_copies, moved
from zdc_jax.parallel.layers import last_token
from zdc_jax.parallel.mesh import BY_TOKEN, SEQUENCE, layout, on_mesh
from zdc_jax.parallel.prompt_cache import fit_slots, with_new_empties
from zdc_jax.parallel.weights import weight_specs

_BY_CHUNK = PartitionSpec(None, None, SEQUENCE)
"""Layout of the chunks that devices keep, [B, K, t, R], and of the ring [B, K, M, C] of each device."""


class MeshRunahead:
    """Prompts in chunks over the devices of a network along `sequence`; every process makes the same calls.

    Raises:
      MeshError: the mesh has several devices along `data` or `model`.
      NotImplementedError: weights are gathered, or the payload is not native.
    """

    def __init__(self, network: Transformer):
        if network.mesh.size != network.mesh.shape[SEQUENCE]:
            raise MeshError(f"mesh={dict(network.mesh.shape)} must have one device along data and model")
        for name, allowed in (("weights", "replicated"), ("payload", "native")):
            if (value := getattr(network, name)) != allowed:
                raise NotImplementedError(f"{name}={value!r} does not run in chunks, {allowed!r} does")
        self.network = network

    def last_hidden(
        self,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        *,
        partition: Partition,
        implementation: Implementation | None = None,
    ) -> Float[Array, "B D"]:
        """Return the hidden state of the last of `end` tokens of each prompt; builds no cache.

        Args:
          tokens: prompts, padded on the right.
          partition: partition of T over the devices along `sequence`.
          implementation: implementation of attention on each device, see `zdc_jax.ops.attention`.

        Raises:
          MeshError: the partition is not one of T tokens over these devices.
          NotImplementedError: the implementation cannot serve a call.
        """
        capacity = in_eights(tokens.shape[1])
        return self._through_layers(tokens, end, partition, capacity, implementation, keep=lambda layer: None)

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        *,
        partition: Partition,
        capacity: int,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B D"], KVCache]:
        """Return `last_hidden`, and a cache of `capacity` tokens a sequence for `Transformer.extend`.

        The cache is divided by head, with KV heads repeated, as by `Transformer.prefill`.

        Raises:
          MeshError: T exceeds `capacity`, or the partition does not fit.
          CacheMemoryError: a device's share cannot fit in its free memory; before anything is computed.
          NotImplementedError: the implementation cannot serve a call.
        """
        network, kept = self.network, list[PrefixRingState]()
        network.check_fits(len(tokens), capacity)
        last = self._through_layers(tokens, end, partition, capacity, implementation, keep=kept.append)
        layers = tuple(by_head(layer, partition, capacity, network.mesh) for layer in kept)
        return last, KVCache(layers, end, network.layer_caches, capacity)

    def _through_layers(
        self,
        tokens: Array,
        end: Array,
        partition: Partition,
        capacity: int,
        implementation: Implementation | None,
        keep: Callable[[PrefixRingState], None],
    ) -> Array:
        network, devices = self.network, self.network.mesh.shape[SEQUENCE]
        partition.check(devices=devices, length=tokens.shape[1], capacity=capacity)
        x = _embed(network.embeddings, _padded(tokens, partition), partition, network.mesh)
        for block, spec in zip(network.prompt_layers, network.layer_caches, strict=True):
            x, layer = chunk_layer(block, x, end, spec, partition, capacity, network.mesh, implementation)
            keep(layer)
        return last_token(x, _row(end - 1, partition) + 1, network.mesh)


def _padded(tokens: Int[Array, "B T"], partition: Partition) -> Int[Array, "B T'"]:
    """Return chunks padded to the same length, one after another; T' = U times the longest."""
    chunks = jnp.split(tokens, partition.ends[:-1], axis=1)
    return jnp.concatenate([jnp.pad(x, ((0, 0), (0, partition.longest - x.shape[1]))) for x in chunks], 1)


def _row(position: Int[Array, " B"], partition: Partition) -> Int[Array, " B"]:
    """Return the row of a token among padded chunks."""
    chunk = jnp.searchsorted(jnp.array(partition.ends), position, side="right")
    return position - jnp.array(partition.starts)[chunk] + chunk * partition.longest


def _places(x: Array, partition: Partition) -> tuple[Int[Array, "B t"], Int[Array, ""]]:
    """Return positions of this device's rows of x [B, t, ...], and the position after its chunk."""
    device = jax.lax.axis_index(SEQUENCE)
    start, stop = (jnp.array(ends)[device] for ends in (partition.starts, partition.ends))
    return jnp.broadcast_to(start + jnp.arange(x.shape[1]), x.shape[:2]), stop


@partial(jax.jit, static_argnames=("partition", "mesh"))
def _embed(embeddings: Embeddings, tokens: Array, partition: Partition, mesh: Mesh) -> Array:
    def local(embeddings: Embeddings, tokens: Array) -> Array:
        # Padding has positions of its chunk, to stay within the table of learned positions.
        positions, stop = _places(tokens, partition)
        return embeddings.embed(tokens, jnp.minimum(positions, stop - 1))

    return on_mesh(mesh, local, (PartitionSpec(), layout("B T")), layout("B T D"))(embeddings, tokens)


@partial(jax.jit, static_argnames=("spec", "partition", "capacity", "mesh", "implementation"))
def chunk_layer(
    block: Block,
    x: Float[Array, "B T' D"],
    end: Int[Array, " B"],
    spec: PrefixRing,
    partition: Partition,
    capacity: int,
    mesh: Mesh,
    implementation: Implementation | None,
) -> tuple[Float[Array, "B T' D"], PrefixRingState]:
    """Run one layer on padded chunks, and return what each device keeps for `by_head`.

    A device keeps its chunk's first coordinates, [B, K, t, R] and [B, K, t, Z]. It also keeps the ring after
    its chunk, [B, K, M, H-R] and [B, K, M, H-Z]. The function is jitted, so that equal layers are compiled
    once. T' is that of `_padded`.

    Args:
      x: hidden states in the model's dtype, divided over `sequence`.
      end: tokens of each sequence.
      spec: cache spec of the layer.
      capacity: capacity of the final cache.

    Raises:
      NotImplementedError: the implementation cannot serve this call.
    """

    def local(block: Block, x: Array, end: Array) -> tuple[Array, PrefixRingState]:
        positions, _ = _places(x, partition)

        def attend(q: Array, new: NewKeys, v: Array) -> tuple[Array, PrefixRingState]:
            k = new.keys
            done = _attended(
                q, k, v, end, spec, partition, capacity, Call(block.attention.scale, implementation)
            )
            first_k, first_v = k[..., : spec.R].swapaxes(1, 2), v[..., : spec.Z].swapaxes(1, 2)
            return done.o, replace(done.state, k=first_k, v=first_v)

        return block(x, positions, attend, implementation)

    in_specs = (weight_specs(block, BY_TOKEN), layout("B T D"), layout("B"))
    return on_mesh(mesh, local, in_specs, (layout("B T D"), _BY_CHUNK))(block, x, end)


def runahead_attention(
    q: Float[Array, "B t N H"],
    k: Float[Array, "B t K H"],
    v: Float[Array, "B t K H"],
    *,
    scale: float,
    spec: PrefixRing,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B t N H"], None]:
    """Run one device's attention of `chunk_layer` inside a `shard_map`, with chunks of t tokens."""
    partition = Partition((q.shape[1],) * jax.lax.axis_size(SEQUENCE))
    end = jnp.full(len(q), partition.length)
    capacity, call = in_eights(partition.length), Call(scale, implementation)
    return _attended(q, k, v, end, spec, partition, capacity, call).o, None


def _attended(
    q: Array,
    k: Array,
    v: Array,
    end: Array,
    spec: PrefixRing,
    partition: Partition,
    capacity: int,
    call: Call,
) -> Attended:
    """Attend with this device's queries to all chunks up to its own."""
    positions, stop = _places(q, partition)
    before = _received(spec, k, v, end, partition, capacity)
    new = NewTokens(NewKeys(k), v, positions, jnp.minimum(end, stop))
    return spec.attend(before, q, new, None, call)


def _received(
    spec: PrefixRing, k: Array, v: Array, end: Array, partition: Partition, capacity: int
) -> PrefixRingState:
    """Return the cache of all tokens before this device's chunk, with room for the longest chunk.

    In each hop all devices run the sender's program with its sizes; only the receiver keeps the result.
    """
    device, (sinks, _) = jax.lax.axis_index(SEQUENCE), spec.near(capacity)
    room = in_eights(max(partition.starts[-1] + partition.longest, sinks))
    cache = no_tokens(spec, k.shape[0], capacity)
    received = with_slots(cache, room)
    counts = cache_slots(partition, sinks, capacity)
    for sender, count in enumerate(counts[:-1]):
        start, stop = partition.starts[sender], partition.ends[sender]
        positions = jnp.broadcast_to(jnp.arange(start, stop), (k.shape[0], stop - start))
        own_k, own_v = (x[:, : stop - start] for x in (k, v))
        cache = longer(spec, cache, NewKeys(own_k), own_v, positions, jnp.minimum(end, stop), count)
        cache = jax.tree.map(partial(_handed_on, sender=sender), cache)
        received = jax.tree.map(partial(jnp.where, device == sender + 1), with_slots(cache, room), received)
    return received


def _handed_on(x: Array, sender: int) -> Array:
    """Return the sender's x on the next device, and zeros on the others."""
    pair = [(sender, sender + 1)]
    return moved(lambda x: jax.lax.ppermute(x, SEQUENCE, pair), x) if x.size else x


@partial(jax.jit, static_argnames=("partition", "capacity", "mesh"))
def by_head(kept: PrefixRingState, partition: Partition, capacity: int, mesh: Mesh) -> PrefixRingState:
    """Return the cache of one layer by head, from what each device keeps of its chunk (`chunk_layer`).

    First coordinates go by an all-to-all. The ring of the last device is scattered. On a device k is [B, K/U,
    S, R] then, with S = `capacity` and K repeated to a multiple of U (`kv_copies`).
    """
    U, t = len(partition.tokens), partition.longest

    def repeated(x: Array) -> Array:
        return jnp.repeat(x, kv_copies(x.shape[1], U), axis=1)

    def gathered(x: Array) -> Array:
        x = repeated(x)
        x = moved(lambda x: jax.lax.all_to_all(x, SEQUENCE, 1, 2, tiled=True), x)
        chunks = [x[:, :, index * t : index * t + count] for index, count in enumerate(partition.tokens)]
        return fit_slots(jnp.concatenate(chunks, 2), capacity)

    def scattered(ring: Array) -> Array:
        last = jnp.where(jax.lax.axis_index(SEQUENCE) == U - 1, ring, 0)
        return jax.lax.psum_scatter(repeated(last), SEQUENCE, scatter_dimension=1, tiled=True)

    def local(kept: PrefixRingState) -> PrefixRingState:
        kept = with_new_empties(kept)
        first, ring = (gathered(kept.k), gathered(kept.v)), (scattered(kept.ring_k), scattered(kept.ring_v))
        return with_new_empties(PrefixRingState(*first, *ring, kept.near))

    return on_mesh(mesh, local, (_BY_CHUNK,), layout("B K S R"))(kept)
