"""KV-Runahead (Cho et al., 2024): chunks of a prompt on several devices, each on the keys of all before it.

Device i holds all weights. In every layer it receives the KV cache of all earlier tokens from device i - 1,
appends those of its own chunk, hands the longer cache on to device i + 1, and then computes attention (§4.1).
Nothing is gathered and nobody waits for all: the devices run staggered, the last one ends up with the whole
cache. What travels is the cache of the plan: first coordinates of all tokens, and the ring of trailing ones.

Pieces differ in length, so every device has programs of its own, compiled once for layers alike. All devices
are of this process, which gives them their work in advance; for several: `benchmarks.mesh.rivals.runahead_mesh`.
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
from zdc_jax.cache.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.spec import Call
from zdc_jax.errors import MeshError
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Embeddings, Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.prompt_cache import stored


def no_tokens(spec: PrefixRing, batch: int, capacity: int) -> PrefixRingState:
    """What the first device begins with: a layer's cache with no room for any token, but with its ring.

    Args:
      batch: rows. capacity: of the cache that will be, in tokens a row; it says how large the ring is.
    """
    state = spec.create(batch, capacity)
    return replace(state, k=state.k[:, :, :0], v=state.v[:, :, :0])


def with_slots(state: PrefixRingState, slots: int) -> PrefixRingState:
    """The same tokens with room for S = `slots` in all; of first coordinates, the ring stays."""
    return replace(state, k=stored(state.k, slots), v=stored(state.v, slots))


@partial(jax.jit, static_argnames=("spec", "slots"))
def longer(
    spec: PrefixRing, state: PrefixRingState, k: Array, v: Array, positions: Array, end: Array, slots: int
) -> PrefixRingState:
    """The cache to hand on: with this chunk's k, v [B, t, K, H] at `positions` [B, t], as `spec.write` does.

    end [B]: tokens that each row holds after this chunk. slots: of the longer cache.
    """
    return spec.write(with_slots(state, slots), k, v, positions, end)


class RunaheadTransformer:
    """A `Transformer` on each of several devices, for prompts that come in chunks.

    networks: the copies, in order of `devices`; the last one decodes on the cache that `prefill` gives.

    Raises:
      MeshError: no device.
      NotImplementedError: the plan has token classes.
    """

    def __init__(self, network: Transformer, devices: Sequence[jax.Device]):
        if not devices:
            raise MeshError(f"{devices=} must name at least one device")
        if network.plan.classes is not None:
            raise NotImplementedError("plans with token classes do not run in chunks")
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
        """Hidden states of the last of `end` tokens of each prompt, and a cache of `capacity` tokens a row.

        Both are on the last device, as `Transformer.extend` on an empty cache leaves them on one.

        Args:
          tokens: padded on the right. partition: of T, over these devices.
          implementation: of attention on each device, see `zdc_jax.ops.attention`.

        Raises:
          MeshError: the partition is not one of T tokens over these devices, or T is more than `capacity`.
          CacheMemoryError: the cache cannot fit in free memory of a device; before anything is computed.
          NotImplementedError: the implementation cannot do a call.
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
                # What a device will receive takes memory once it is asked for: so not all layers at once.
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
            held = tokens[:, start:stop], positions, jnp.minimum(end, stop)
            own, positions, stored = jax.device_put(held, device)
            x = _embedded(network.embeddings, own, positions)
            chunks.append(_Chunk(device, network, positions, stored, room, x))
        return chunks


@dataclass
class _Chunk:
    """What one device works on: its tokens' positions [B, t] and hidden states x [B, t, D].

    end [B]: tokens that each row holds after this chunk. slots: tokens that its caches have room for.
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
        """One layer, on the cache of all tokens before; gives the cache with this chunk.

        Three programs, so that projections do not wait for the cache, nor the next device for attention
        (§4.3, receive beside the projections and send beside the softmax).
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
) -> tuple[Array, Array, Array]:
    """q, k, v of one layer. Jitted, as those below, so that layers alike are compiled once a device."""
    return block.projected(x, positions, implementation)


@partial(jax.jit, static_argnames=("spec", "slots", "implementation"))
def _attended(
    block: Block,
    spec: PrefixRing,
    x: Array,
    qkv: tuple[Array, Array, Array],
    cache: PrefixRingState,
    positions: Array,
    end: Array,
    slots: int,
    implementation: Implementation | None,
) -> Array:
    """One layer on projected tokens: attention on the cache of all before and on themselves, feed-forward.

    Takes the cache as it came and appends once more: attention needs the ring as it was before this chunk.
    """

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
        call = Call(block.attention.scale, implementation)
        done = spec.attend(with_slots(cache, slots), q, k, v, positions, end, None, call)
        return done.o, None

    return block(x, positions, attend, implementation, project=lambda *_: qkv)[0]


@jax.jit
def _last_token(x: Array, positions: Array, end: Array, last: Array) -> Array:
    """Hidden states [B, D] of position end - 1 where this chunk has it, else those found before."""
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
    """Median seconds to the first token's logits, on the devices of the model, without compilation.

    Where all of these are one and the same, its chunks run one by one, which is what `ChunkCost.fit` takes.

    Args:
      tokens: prompts, of which each partition takes as many tokens as it has. repeats: runs that count.

    Raises:
      what `RunaheadTransformer.prefill` does.
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
    """Bytes per second of an array of `size` bytes on its way to another device, median of `repeats`."""
    array = jax.block_until_ready(jax.device_put(jnp.zeros(size, jnp.uint8), source))

    def once() -> float:
        began = time.perf_counter()
        jax.block_until_ready(jax.device_put(array, target))
        return time.perf_counter() - began

    return size / median([once() for _ in range(repeats + 1)][1:])
