"""KV-Runahead in one program for all devices of a mesh, which may be those of several processes.

Pieces are padded to the longest; `Partition.padding` tells what that computes for nothing. In every layer the
cache goes from device to device as in `benchmarks.rivals.runahead`, one hop after the other: each hop is a
collective permute between two devices, of as many bytes as there, and the others go on. So the devices run
staggered, but as each runs the same program, its attention waits until its own cache is handed on as well.

A device keeps what it has of its own piece. After the last layer one exchange by head leaves the cache as
`ShardedTransformer.prefill` leaves it (ours): no device ever holds all layers of all tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from benchmarks.rivals.handed_cache import longer, no_tokens, with_slots
from benchmarks.rivals.partition import Partition, cache_slots, in_eights
from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.spec import Attended, Call
from zdc_jax.errors import MeshError
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Embeddings
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.exchange import kv_copies, moved
from zdc_jax.parallel.mesh import BY_TOKEN, SEQUENCE, layout, on_mesh
from zdc_jax.parallel.prompt_cache import fit_slots, with_new_empties
from zdc_jax.parallel.transformer import ShardedTransformer, last_token
from zdc_jax.parallel.weights import weight_specs

_BY_PIECE = PartitionSpec(None, None, SEQUENCE)
"""How what devices keep of their pieces lies, [B, K, t, R], and the ring [B, K, M, C] that each has."""


class MeshRunahead:
    """Prompts in pieces over the devices of a network along `sequence`; every process makes the same calls.

    Raises:
      MeshError: the mesh has several devices along `data` or `model`.
      NotImplementedError: the plan has token classes; weights are gathered, for which all devices would wait
        in every layer; there is a float8 payload, which is one of exchanges.
    """

    def __init__(self, network: ShardedTransformer):
        if network.mesh.size != network.mesh.shape[SEQUENCE]:
            raise MeshError(f"mesh={dict(network.mesh.shape)} must have one device along data and model")
        if network.plan.classes is not None:
            raise NotImplementedError("plans with token classes do not run in pieces")
        for name, allowed in (("weights", "replicated"), ("payload", "native")):
            if (value := getattr(network, name)) != allowed:
                raise NotImplementedError(f"{name}={value!r} does not run in pieces, {allowed!r} does")
        self.network = network

    def last_hidden(
        self,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        *,
        partition: Partition,
        implementation: Implementation | None = None,
    ) -> Float[Array, "B D"]:
        """Hidden states of the last of `end` tokens of each prompt, on every device; leaves no cache.

        Args:
          tokens: padded on the right. partition: of T, over the devices along `sequence`.
          implementation: of attention on each device, see `zdc_jax.ops.attention`.

        Raises:
          MeshError: the partition is not one of T tokens over these devices.
          NotImplementedError: the implementation cannot do a call.
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
        """`last_hidden`, and a cache of `capacity` tokens a row for `ShardedTransformer.extend`.

        It is divided by head, its KV heads repeated, as by `ShardedTransformer.prefill`.

        Raises:
          what `last_hidden` does, and
          MeshError: T is more than `capacity`.
          CacheMemoryError: a device's share of the cache cannot fit in its free memory; before anything is
            computed.
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
            x, layer = piece_layer(block, x, end, spec, partition, capacity, network.mesh, implementation)
            keep(layer)
        return last_token(x, _row(end - 1, partition) + 1, network.mesh)


def _padded(tokens: Int[Array, "B T"], partition: Partition) -> Int[Array, "B T'"]:
    """Pieces of the same length one after another; T' = U times the longest."""
    pieces = jnp.split(tokens, partition.ends[:-1], axis=1)
    return jnp.concatenate([jnp.pad(x, ((0, 0), (0, partition.longest - x.shape[1]))) for x in pieces], 1)


def _row(position: Int[Array, " B"], partition: Partition) -> Int[Array, " B"]:
    """Where a token lies among padded pieces."""
    piece = jnp.searchsorted(jnp.array(partition.ends), position, side="right")
    return position - jnp.array(partition.starts)[piece] + piece * partition.longest


def _places(x: Array, partition: Partition) -> tuple[Int[Array, "B t"], Int[Array, ""]]:
    """Positions of this device's rows of x [B, t, ...], and that of the first behind its piece."""
    device = jax.lax.axis_index(SEQUENCE)
    start, stop = (jnp.array(ends)[device] for ends in (partition.starts, partition.ends))
    return jnp.broadcast_to(start + jnp.arange(x.shape[1]), x.shape[:2]), stop


@partial(jax.jit, static_argnames=("partition", "mesh"))
def _embed(embeddings: Embeddings, tokens: Array, partition: Partition, mesh: Mesh) -> Array:
    def local(embeddings: Embeddings, tokens: Array) -> Array:
        # Padding takes positions of its piece, so that it stays within the table of learned ones.
        positions, stop = _places(tokens, partition)
        return embeddings.embed(tokens, jnp.minimum(positions, stop - 1))

    return on_mesh(mesh, local, (PartitionSpec(), layout("B T")), layout("B T D"))(embeddings, tokens)


@partial(jax.jit, static_argnames=("spec", "partition", "capacity", "mesh", "implementation"))
def piece_layer(
    block: Block,
    x: Float[Array, "B T' D"],
    end: Int[Array, " B"],
    spec: PrefixRing,
    partition: Partition,
    capacity: int,
    mesh: Mesh,
    implementation: Implementation | None,
) -> tuple[Float[Array, "B T' D"], PrefixRingState]:
    """One layer on padded pieces, and what each device keeps of it for `by_head`; T' as in `_padded`.

    That is its piece's first coordinates [B, K, t, R] and [B, K, t, Z], and the ring as its piece leaves it
    [B, K, M, H-R] and [B, K, M, H-Z]. Jitted, so that layers alike are traced and compiled once.

    Args:
      x: hidden states in the model's dtype, divided over `sequence`. end: tokens that each row holds.
      spec: how the layer keeps tokens. capacity: of the cache that will be.

    Raises:
      NotImplementedError: the implementation cannot do this call.
    """

    def local(block: Block, x: Array, end: Array) -> tuple[Array, PrefixRingState]:
        positions, _ = _places(x, partition)

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, PrefixRingState]:
            done = _attended(
                q, k, v, end, spec, partition, capacity, Call(block.attention.scale, implementation)
            )
            first_k, first_v = k[..., : spec.R].swapaxes(1, 2), v[..., : spec.Z].swapaxes(1, 2)
            return done.o, replace(done.state, k=first_k, v=first_v)

        return block(x, positions, attend, implementation)

    in_specs = (weight_specs(block, BY_TOKEN), layout("B T D"), layout("B"))
    return on_mesh(mesh, local, in_specs, (layout("B T D"), _BY_PIECE))(block, x, end)


def runahead_attention(
    q: Float[Array, "B t N H"],
    k: Float[Array, "B t K H"],
    v: Float[Array, "B t K H"],
    *,
    scale: float,
    spec: PrefixRing,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B t N H"], None]:
    """One device's attention of `piece_layer`, inside of a `shard_map`, where all pieces have t tokens."""
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
    """What this device's queries see of all pieces up to its own."""
    positions, stop = _places(q, partition)
    before = _received(spec, k, v, end, partition, capacity)
    return spec.attend(before, q, k, v, positions, jnp.minimum(end, stop), None, call)


def _received(
    spec: PrefixRing, k: Array, v: Array, end: Array, partition: Partition, capacity: int
) -> PrefixRingState:
    """The cache of all tokens before this device's piece, with room for the longest behind any of them.

    Hop by hop all devices do what the sender does, with its sizes; only the receiver keeps what comes.
    """
    device, (sinks, _) = jax.lax.axis_index(SEQUENCE), spec.near(capacity)
    room = in_eights(max(partition.starts[-1] + partition.longest, sinks))
    cache = no_tokens(spec, k.shape[0], capacity)
    held = with_slots(cache, room)
    counts = cache_slots(partition, sinks, capacity)
    for sender, count in enumerate(counts[:-1]):
        start, stop = partition.starts[sender], partition.ends[sender]
        positions = jnp.broadcast_to(jnp.arange(start, stop), (k.shape[0], stop - start))
        own = (x[:, : stop - start] for x in (k, v))
        cache = longer(spec, cache, *own, positions, jnp.minimum(end, stop), count)
        cache = jax.tree.map(partial(_handed_on, sender=sender), cache)
        held = jax.tree.map(partial(jnp.where, device == sender + 1), with_slots(cache, room), held)
    return held


def _handed_on(x: Array, sender: int) -> Array:
    """What the next device gets of the sender's x; the others get zeros."""
    pair = [(sender, sender + 1)]
    return moved(lambda x: jax.lax.ppermute(x, SEQUENCE, pair), x) if x.size else x


@partial(jax.jit, static_argnames=("partition", "capacity", "mesh"))
def by_head(kept: PrefixRingState, partition: Partition, capacity: int, mesh: Mesh) -> PrefixRingState:
    """The cache of one layer by head, from what each device keeps of its piece (`piece_layer`).

    First coordinates go by an all-to-all; of the rings the last device's counts, and is scattered. On a
    device k is [B, K/U, S, R] then, with S = `capacity` and K copied to a multiple of U (`kv_copies`).
    """
    U, t = len(partition.tokens), partition.longest

    def repeated(x: Array) -> Array:
        return jnp.repeat(x, kv_copies(x.shape[1], U), axis=1)

    def gathered(x: Array) -> Array:
        x = repeated(x)
        x = moved(lambda x: jax.lax.all_to_all(x, SEQUENCE, 1, 2, tiled=True), x)
        pieces = [x[:, :, index * t : index * t + count] for index, count in enumerate(partition.tokens)]
        return fit_slots(jnp.concatenate(pieces, 2), capacity)

    def scattered(ring: Array) -> Array:
        last = jnp.where(jax.lax.axis_index(SEQUENCE) == U - 1, ring, 0)
        return jax.lax.psum_scatter(repeated(last), SEQUENCE, scatter_dimension=1, tiled=True)

    def local(kept: PrefixRingState) -> PrefixRingState:
        kept = with_new_empties(kept)
        first, ring = (gathered(kept.k), gathered(kept.v)), (scattered(kept.ring_k), scattered(kept.ring_v))
        return with_new_empties(PrefixRingState(*first, *ring, kept.near))

    return on_mesh(mesh, local, (_BY_PIECE,), layout("B K S R"))(kept)
