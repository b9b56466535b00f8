"""How far does a GPU of little memory reach with coded tokens on its host, and what does a token cost?

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.17 python -m benchmarks.bench_host_memory

`XLA_PYTHON_CLIENT_PREALLOCATE` must not be false: memory taken bit by bit cannot be used to the full. A model
of a large shape with random weights decodes behind a context that is said to be there: its codes are
random, so that what is chosen lies anywhere. Each plan is timed at each context that fits, and at the largest
that does, with what a step takes beside the cache. `XLA_PYTHON_CLIENT_MEM_FRACTION` caps the GPU: 0.17 of
141 GB are 24 GB.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled

from benchmarks.bench_generate import LLAMA_2_7B, build
from benchmarks.common import RESULTS, commit, write_result
from zdc_jax.cache.hosted_choosing import HOST_MEMORY
from zdc_jax.cache.kv_cache import KVCache, check_fits, device_bytes, free_bytes, host_bytes
from zdc_jax.config import ModelConfig
from zdc_jax.errors import CacheMemoryError
from zdc_jax.methods.coded import Settings
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

LLAMA_3_8B = replace(LLAMA_2_7B, num_kv_heads=8, ffn_dim=14336, vocab_size=128256, max_positions=2**22)
SHARED = 4
"""Consecutive layers that read what the first of them chose."""
LARGEST_STEP = 4096
"""Tokens by which the largest context is found."""
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Of free memory that the cache may take: the first that leaves room for a step gives the largest context."""
SLACK = 0.97
"""Share of free memory that may be asked for: the allocator loses some between arrays."""


@dataclass(frozen=True)
class Options:
    """contexts: in tokens. index, read, bits: of coded plans, all layers. steps: timed, `repeats` times.

    caches: those to measure (default all). most: no largest context is above it.
    """

    contexts: tuple[int, ...] = (32768, 131072)
    caches: tuple[str, ...] = ()
    index: int = 32
    read: int = 1024
    bits: int = 4
    layers: int = 32
    steps: int = 16
    repeats: int = 5
    most: int = 2**21
    name: str = "host-memory-llama-3-8b-shape"
    results: Path = RESULTS


def plans(config: ModelConfig, options: Options) -> dict[str, CompressionPlan]:
    """The unmodified cache, and coded ones: all is read, or what each layer chooses, or one of `SHARED`."""
    H, bits = config.head_dim, options.bits
    full = CompressionPlan.full(config)
    whole = Settings(bits_k=bits, bits_v=bits, bits_index=bits, index=0, read=0)
    chosen = replace(whole, index=options.index, read=options.read)
    hosted = replace(chosen, memory="host")

    def coded(*each: Settings) -> CompressionPlan:
        """Layers in turn have these settings."""
        near = CompressionPlan.uniform(config, qk=H, v=H, sinks=4, window=512)
        layers = [replace(ranks, settings=each[i % len(each)]) for i, ranks in enumerate(near.layers)]
        return replace(near, method="coded", settings=each[0], layers=tuple(layers))

    def shared(settings: Settings) -> CompressionPlan:
        return coded(settings, *[replace(settings, index=0)] * (SHARED - 1))

    return {
        "dense": full,
        "all is read": coded(whole),
        "on the device": coded(chosen),
        "on the device, shared": shared(chosen),
        "on the host": coded(hosted),
        "on the host, shared": shared(hosted),
    }


@partial(jax.jit, donate_argnums=0)
def _any(codes: jax.Array, key: jax.Array) -> jax.Array:
    """Random codes in the place of zeros. The largest byte of a scale is none: it means NaN."""
    return codes ^ (jax.random.bits(key, codes.shape, jnp.uint8) & 0x7F)  # An unused argument has no place.


def held(network: Transformer, context: int, options: Options) -> KVCache:
    """A cache of `context` random tokens, with room for what is decoded.

    Raises:
      CacheMemoryError: it does not fit.
    """
    cache = network.new_cache(batch=1, capacity=capacity_for(context, options))
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(cache))))

    def random(leaf: jax.Array) -> jax.Array:
        """Codes that choose are bytes on the device; what they choose, and the ring, may be zeros."""
        codes = leaf.dtype == jnp.uint8 and leaf.sharding.memory_kind == "device"
        return _any(leaf, next(keys)) if codes else leaf

    layers = jax.tree.map(random, cache.layers)
    return replace(cache, layers=layers, lengths=jnp.full_like(cache.lengths, context))


@partial(jax.jit, donate_argnums=1)
def _decoded(network: Transformer, cache: KVCache, token: jax.Array) -> tuple[jax.Array, KVCache]:
    hidden, cache = network.extend(cache, token, cache.lengths + 1)
    return network.embeddings.unembed(hidden[:, -1]).argmax(-1).astype(jnp.int32)[:, None], cache


def capacity_for(context: int, options: Options) -> int:
    """Of a cache of so many tokens, with room for what is decoded."""
    return context + options.steps * (options.repeats + 2)


def compiled(network: Transformer, context: int, options: Options) -> Compiled:
    """A decoding step, compiled before the cache is there: compiling tries kernels, which takes memory."""
    on_host = SingleDeviceSharding(jax.local_devices()[0], memory_kind=HOST_MEMORY)

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        host = jax.typeof(leaf).memory_space == jax.memory.Space.Host
        return leaf.update(sharding=on_host) if host else leaf

    cache = jax.eval_shape(partial(network.new_cache, batch=1, capacity=capacity_for(context, options)))
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return _decoded.lower(network, jax.tree.map(placed, cache), token).compile()


def step_bytes(step: Compiled) -> int:
    """What a decoding step takes beside its arguments."""
    analysis = step.memory_analysis()
    assert analysis is not None
    return int(analysis.temp_size_in_bytes)


def seconds_a_token(network: Transformer, step: Compiled, context: int, options: Options) -> list[float]:
    """Means over `steps` tokens that are dispatched one after another, after a warm-up."""
    cache, token, times = held(network, context, options), jnp.zeros((1, 1), jnp.int32), []
    for count in (2, *[options.steps] * options.repeats):
        jax.block_until_ready((token, cache))
        began = time.perf_counter()
        for _ in range(count):
            token, cache = step(network, cache, token)
        jax.block_until_ready(token)
        times.append((time.perf_counter() - began) / count)
    return times[1:]


def fits(network: Transformer, context: int, options: Options, share: float = 1.0) -> bool:
    """Whether this share of the free memory holds the cache, by its bytes alone."""
    free = free_bytes()
    try:
        check_fits(
            network.layer_caches,
            batch=1,
            capacity=capacity_for(context, options),
            free=None if free is None else int(share * free),
        )
    except CacheMemoryError:
        return False
    return True


def largest(network: Transformer, options: Options, share: float) -> int:
    """The longest context whose cache fits so, a multiple of `LARGEST_STEP`, up to `most`."""
    low, high = 0, options.most // LARGEST_STEP
    while low < high:
        middle = (low + high + 1) // 2
        found = fits(network, middle * LARGEST_STEP, options, share)
        low, high = (middle, high) if found else (low, middle - 1)
    return low * LARGEST_STEP


def rows(name: str, network: Transformer, options: Options) -> Iterator[dict[str, Any]]:
    """A row a context, the last of the largest that memory holds with what a step takes beside the cache."""
    specs = network.layer_caches

    def row(context: int, kind: str, step: Compiled) -> dict[str, Any]:
        times = seconds_a_token(network, step, context, options)
        print(f"{name:22} {kind:8} {context:9,} tokens: {1e3 * float(np.median(times)):.2f} ms", flush=True)
        return {
            "cache": name,
            "kind": kind,
            "context": context,
            "ms": [1e3 * each for each in times],
            "device_bytes": device_bytes(specs, context),
            "host_bytes": host_bytes(specs, context),
            "step_bytes": step_bytes(step),
            "read_bytes": sum(spec.bytes_read(context) for spec in specs),
            "commit": commit(),
        }

    for context in options.contexts:
        if fits(network, context, options):
            yield row(context, "given", compiled(network, context, options))
    for share in SHARES:
        context = largest(network, options, share)
        step = compiled(network, context, options)
        if device_bytes(specs, context) + step_bytes(step) <= SLACK * (free_bytes() or 0):
            yield row(context, "largest", step)
            break


def main(options: Options) -> None:
    """Writes one JSON, again after each row."""
    config = replace(LLAMA_3_8B, layers=LLAMA_3_8B.layers[: options.layers])
    found: list[dict[str, Any]] = []
    settings = {key: value for key, value in asdict(options).items() if key not in ("results", "caches")}
    for name, plan in plans(config, options).items():
        if options.caches and name not in options.caches:
            continue
        network = build("folded" if name == "dense" else "post_rope", config)
        network.plan = plan
        settings |= {"free_bytes": free_bytes()}
        for row in rows(name, network, options):
            found.append(row)
            path = write_result(options.name, settings, found, options.results)
        del network
    print(path)


if __name__ == "__main__":
    main(tyro.cli(Options))
