"""KV-Runahead (Cho et al., 2024): chunks of a prompt on several devices of one process.

Device i stores all weights. In every layer it receives the KV cache of all earlier tokens
from device i - 1 and appends its own chunk. It passes the longer cache on to device i + 1, and then computes
attention (§4.1). Nothing
is gathered. The devices run staggered, and the last one ends up with the whole cache. The cache of the plan
is sent: first coordinates of all tokens, and the ring of trailing coordinates.

Chunks differ in length, so every device has its own programs, compiled once for equal layers. One process
dispatches the work of all devices ahead; `benchmarks.mesh.rivals.runahead_mesh` serves several processes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from benchmarks.mesh.rivals.partition import Partition, cache_slots, in_eights
from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache, check_fits, free_bytes
from zdc_jax.cache.specs.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.errors import MeshError
from zdc_jax.model.block import Block
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.parallel.coded import check_caches
from zdc_jax.parallel.prompt_cache import fit_slots


def no_tokens(spec: PrefixRing, batch: int, capacity: int) -> PrefixRingState:
    """Return the cache of the first device: no room for any token, but with its ring.

    Args:
      batch: sequences.
      capacity: capacity of the final cache in tokens a sequence, which determines the size of the ring.
    """
    state = spec.create(batch, capacity)
    return replace(state, k=state.k[:, :, :0], v=state.v[:, :, :0])


def with_slots(state: PrefixRingState, slots: int) -> PrefixRingState:
    """Return the same tokens with room for S = `slots` in all; the ring stays."""
    return replace(state, k=fit_slots(state.k, slots), v=fit_slots(state.v, slots))


@partial(jax.jit, static_argnames=("spec", "slots"))
def longer(
    spec: PrefixRing, state: PrefixRingState, k: NewKeys, v: Array, positions: Array, end: Array, slots: int
) -> PrefixRingState:
    """Return the cache to pass on, with this chunk's k, v [B, t, K, H] at `positions` [B, t].

    Args:
      end: tokens of each sequence after this chunk, [B].
      slots: slots of the longer cache.
    """
    return spec.write(with_slots(state, slots), NewTokens(k, v, positions, end))


class RunaheadTransformer:
    """A `Transformer` on each of several devices, for prompts in chunks.

    Attributes:
      networks: copies in order of `devices`; the last one decodes with the cache of `prefill`.

    Raises:
      MeshError: no device.
      NotImplementedError: the method of the plan does not run on a mesh.
    """

    def __init__(self, network: Transformer, devices: Sequence[jax.Device]):
        if not devices:
            raise MeshError(f"{devices=} must name at least one device")
        check_caches(network.plan, "native", 1)
        self.plan, self.devices = network.plan, tuple(devices)
        self.networks = tuple(jax.device_put(network, device) for device in devices)

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        end: Int[Array, " B"],
        *,
        partition: Partition,
        capacity: int,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B D"], KVCache]:
        """Return the hidden state of the last of `end` tokens of each prompt, and a cache.

        Both are on the last device, and equal to those of `Transformer.extend` on an empty cache.

        Args:
          tokens: prompts, padded on the right.
          partition: partition of T over these devices.
          implementation: implementation of attention on each device, see `zdc_jax.ops.attention`.

        Raises:
          MeshError: the partition is not one of T tokens over these devices, or T exceeds `capacity`.
          CacheMemoryError: the cache cannot fit in free memory of a device; before anything is computed.
          NotImplementedError: the implementation cannot serve a call.
        """
        batch, length = tokens.shape
        partition.check(devices=len(self.devices), length=length, capacity=capacity)
        specs, dtype = self.networks[0].layer_caches, self.networks[0].dtype
        check_fits(specs, batch=batch, capacity=capacity, free=free_bytes())
        layers, ahead = list[PrefixRingState](), 2 * len(self.devices)
        chunks = self._chunks(tokens, end, partition, capacity)
        empty = {spec: no_tokens(spec, batch, capacity) for spec in specs}
        for index, spec in enumerate(specs):
            if index >= ahead:
                # Memory for a transfer is taken when it is dispatched, so not all layers at once.
                jax.block_until_ready(layers[index - ahead])
            cache = empty[spec]
            for chunk in chunks:
                cache = chunk.run(index, spec, jax.device_put(cache, chunk.device), implementation)
            layers.append(cache)
        last = jnp.zeros((batch, chunks[0].x.shape[-1]), dtype)
        for chunk in chunks:
            end, last = jax.device_put((end, last), chunk.device)
            last = _last_token(chunk.x, chunk.positions, end, last)
        return last, KVCache(tuple(layers), end, specs, capacity)

    def _chunks(self, tokens: Array, end: Array, partition: Partition, capacity: int) -> list["_Chunk"]:
        chunks = []
        spans = zip(partition.starts, partition.ends, strict=True)
        slots = cache_slots(partition, self.plan.sinks, capacity)
        for device, network, (start, stop), room in zip(
            self.devices, self.networks, spans, slots, strict=True
        ):
            positions = jnp.broadcast_to(jnp.arange(start, stop), (len(tokens), stop - start))
            placed = tokens[:, start:stop], positions, jnp.minimum(end, stop)
            own, positions, stored = jax.device_put(placed, device)
            x = _embedded(network.embeddings, own, positions)
            chunks.append(_Chunk(device, network, positions, stored, room, x))
        return chunks


@dataclass
class _Chunk:
    """Work of one device.

    Attributes:
      positions: positions of its tokens, [B, t].
      end: tokens of each sequence after this chunk, [B].
      slots: slots of its caches.
      x: hidden states, [B, t, D].
    """

    device: jax.Device
    network: Transformer
    positions: Array
    end: Array
    slots: int
    x: Array

    def run(
        self, index: int, spec: PrefixRing, cache: PrefixRingState, implementation: Implementation | None
    ) -> PrefixRingState:
        """Run one layer on the cache of all earlier tokens; return the cache with this chunk.

        Three programs keep projections from waiting for the cache, and the next device from waiting for
        attention (§4.3, receive during the projections and send during the softmax).
        """
        block, own = self.network.layers[index], (self.positions, self.end)
        qkv = _projected(block, self.x, self.positions, implementation)
        handed = longer(spec, cache, *qkv[1:], *own, self.slots)
        self.x = _attended(block, spec, self.x, qkv, cache, *own, self.slots, implementation)
        return handed


@jax.jit
def _embedded(embeddings: Embeddings, tokens: Array, positions: Array) -> Array:
    return embeddings.embed(tokens, positions)


@partial(jax.jit, static_argnames="implementation")
def _projected(
    block: Block, x: Array, positions: Array, implementation: Implementation | None
) -> tuple[Array, NewKeys, Array]:
    """Return q, k, v of one layer; jitted, so that equal layers are compiled once a device."""
    return block.projected(x, positions, implementation)


@partial(jax.jit, static_argnames=("spec", "slots", "implementation"))
def _attended(
    block: Block,
    spec: PrefixRing,
    x: Array,
    qkv: tuple[Array, NewKeys, Array],
    cache: PrefixRingState,
    positions: Array,
    end: Array,
    slots: int,
    implementation: Implementation | None,
) -> Array:
    """Run one layer on projected tokens, which attend to all earlier tokens and to themselves.

    The cache is appended once more here, because attention needs the ring from before this chunk.
    """

    def attend(q: Array, k: NewKeys, v: Array) -> tuple[Array, None]:
        call = Call(block.attention.scale, implementation)
        new = NewTokens(k, v, positions, end)
        done = spec.attend(with_slots(cache, slots), q, new, None, call)
        return done.o, None

    return block(x, positions, attend, implementation, project=lambda *_: qkv)[0]


@jax.jit
def _last_token(x: Array, positions: Array, end: Array, last: Array) -> Array:
    """Return hidden states [B, D] at position end - 1 if this chunk has it, else those found earlier."""
    place = end - 1 - positions[:, 0]
    picked = jnp.take_along_axis(x, jnp.clip(place, 0, x.shape[1] - 1)[:, None, None], axis=1)[:, 0]
    return jnp.where(((place >= 0) & (place < x.shape[1]))[:, None], picked, last)


def measure_partitions(
    model: RunaheadTransformer,
    tokens: Int[Array, "B T"],
    partitions: Sequence[Partition],
    *,
    implementation: Implementation | None = None,
    repeats: int = 5,
) -> dict[Partition, float]:
    """Return median seconds to the first token's logits of each partition, without compilation.

    If all devices of the model are the same one, its chunks run one by one, as `ChunkCost.fit` needs.

    Args:
      tokens: prompts; each partition uses as many tokens as it has.
      repeats: runs that count.

    Raises:
      MeshError, CacheMemoryError, NotImplementedError: from `RunaheadTransformer.prefill`.
    """
    embeddings = model.networks[-1].embeddings

    def once(partition: Partition) -> float:
        began = time.perf_counter()
        prompts = tokens[:, : partition.length]
        end = jnp.full(len(tokens), partition.length, jnp.int32)
        prefill = partial(model.prefill, partition=partition, implementation=implementation)
        last, _ = prefill(prompts, end, capacity=in_eights(partition.length))
        jax.block_until_ready(_logits(embeddings, last))
        return time.perf_counter() - began

    return {each: median([once(each) for _ in range(repeats + 1)][1:]) for each in partitions}


@jax.jit
def _logits(embeddings: Embeddings, last: Array) -> Array:
    return embeddings.unembed(last)


def link_bandwidth(source: jax.Device, target: jax.Device, *, size: int = 2**28, repeats: int = 5) -> float:
    """Return bytes per second of an array of `size` bytes sent to another device, median of `repeats`."""
    array = jax.block_until_ready(jax.device_put(jnp.zeros(size, jnp.uint8), source))

    def once() -> float:
        began = time.perf_counter()
        jax.block_until_ready(jax.device_put(array, target))
        return time.perf_counter() - began

    return size / median([once() for _ in range(repeats + 1)][1:])
