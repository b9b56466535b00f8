"""What does a whole model gain? Llama-2-7B's shape, random weights, one GPU, beside the same model on cuDNN.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m benchmarks.bench_generate --rows cudnn window

Each row is one build of the model: `cudnn`, unmodified, full rank, attention and cache in the layout cuDNN
reads in place; `folded`, unmodified weights on our kernels, which is what a basis inside the weights costs at
run time; `post_rope`, a random orthogonal basis really applied at full rank after the rotary embedding;
`window`, the same with 512 tokens and 4 sinks at full rank and the rest at (32, 64). Times do not depend on
the values. Wall clock after a warm-up: a prompt from call to token; decoding as `decode_times` says, ours in
`generate`'s loop and cuDNN's by a call for each token, which is the faster way for it. Rows of
one run share a process and are merged by name with those of earlier runs, each with its commit.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.bench_calibration import LLAMA_2_13B
from benchmarks.common import RESULTS, commit, earlier, write_result
from benchmarks.one_call import InOneCall
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.config import ModelConfig
from zdc_jax.generation.steps import Flat
from zdc_jax.model.params import embedding_shapes, layer_shapes, random_tree
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.contract import duplicate_single_token
from zdc_jax.plan import CompressionPlan

LLAMA_2_7B = replace(
    LLAMA_2_13B,
    layers=LLAMA_2_13B.layers[:32],
    embed_dim=4096,
    ffn_dim=11008,
    num_heads=32,
    num_kv_heads=32,
    max_positions=2**18,
)
ROOM = 128
"""Tokens that are decoded behind those that a cache holds, at most."""
BEGUN = 4
"""Tokens of the shorter run, whose time is taken off the longer one's."""
RowName = Literal["cudnn", "folded", "post_rope", "window"]


@dataclass(frozen=True)
class Options:
    """`layers` shortens the model for a trial; `long` and `short` are prompts in tokens, `steps` decoded."""

    rows: tuple[RowName, ...] = ("cudnn", "folded", "post_rope", "window")
    layers: int = 32
    long: int = 131072
    short: int = 8192
    chunk: int = 16384
    steps: int = 20
    name: str = "generate-llama-2-7b-shape"
    results: Path = RESULTS


def plan_of(name: RowName, config: ModelConfig) -> CompressionPlan:
    """Ranks and window of a row."""
    if name == "window":
        return CompressionPlan.uniform(config, qk=32, v=64, window=512, sinks=4)
    return CompressionPlan.full(config)


def build(name: RowName, config: ModelConfig) -> Transformer:
    """Random weights made on the device; with the rotations of `post_rope` where the row has them."""
    key = jax.random.key(0)

    @jax.jit
    def layer(key: jax.Array) -> Any:
        weights = random_tree(layer_shapes(config, 0), config, key)
        if name in ("post_rope", "window"):
            shape = (config.num_kv_heads, config.head_dim, config.head_dim)
            basis = jnp.linalg.qr(jax.random.normal(key, shape))[0].astype(jnp.float16)
            weights["attention"] |= {"q_rotation": basis, "k_rotation": basis}
        return weights

    layers = (layer(jax.random.fold_in(key, 1 + index)) for index in range(config.num_layers))
    return Transformer(
        config, plan_of(name, config), random_tree(embedding_shapes(config), config, key), layers
    )


class Ours:
    """The product's own path: `Transformer.extend` on a `KVCache`."""

    def __init__(self, network: Transformer, chunk: int):
        self.chunk, self.plan = chunk, network.plan
        self.flat, self.decode = Flat.of(network), InOneCall(network, "pallas")

    def cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache.create(self.plan.layer_caches("bfloat16"), batch=batch, capacity=capacity)

    def prefill(self, cache: KVCache, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
        for start in range(0, tokens.shape[1], self.chunk):
            token, cache = extended(self.flat, cache, tokens[:, start : start + self.chunk])
        return token, cache

    def filled(self, cache: KVCache, length: int) -> KVCache:
        """As if `length` tokens were held (zeros): time does not depend on values."""
        return replace(cache, lengths=jnp.full_like(cache.lengths, length))


@partial(jax.jit, donate_argnums=1)
def extended(flat: Flat[Transformer], cache: KVCache, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
    """The token [B, 1] behind more tokens [B, T] of each row, on our kernels; the cache that holds them."""
    network = flat.whole
    hidden, cache = network.extend(cache, tokens, cache.lengths + tokens.shape[1], "pallas")
    return network.embeddings.unembed(hidden[:, -1]).argmax(-1).astype(jnp.int32)[:, None], cache


class OnCudnn:
    """The peer: the same blocks, full rank, one [B, S, K, H] pair of caches a layer, updated in place.

    Layers are unrolled so that cuDNN reads each cache where it lies; nothing is copied or transposed.
    """

    def __init__(self, network: Transformer):
        self.config, self.flat = network.config, Flat.of(network)

    def cache(self, batch: int, capacity: int) -> Any:
        c = self.config

        def zeros():
            return jnp.zeros((batch, capacity, c.num_kv_heads, c.head_dim), jnp.bfloat16)

        return {
            "lengths": jnp.zeros(batch, jnp.int32),
            "kv": [(zeros(), zeros()) for _ in range(c.num_layers)],
        }

    def prefill(self, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return _cudnn_step(self.flat, cache, tokens)

    def filled(self, cache: Any, length: int) -> Any:
        return {**cache, "lengths": jnp.full_like(cache["lengths"], length)}

    def decode(self, cache: Any, token: jax.Array, count: int) -> tuple[jax.Array, Any]:
        """By a call for each token, asked for ahead.

        In a loop of the device's each took 0.2 to 0.7 ms more on an H100.
        """
        for _ in range(count):
            token, cache = _cudnn_step(self.flat, cache, token)
        return token, cache


@partial(jax.jit, donate_argnums=1)
def _cudnn_step(flat: Flat[Transformer], cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    network = flat.whole
    lengths = cache["lengths"]
    T, scale = tokens.shape[1], network.layers[0].attention.scale
    positions = lengths[:, None] + jnp.arange(T)
    x, kv = duplicate_single_token(network.embeddings.embed(tokens, positions)), []
    rows = len(x)
    for block, (keys, values) in zip(network.layers, cache["kv"], strict=True):

        def attend(q: Any, k: Any, v: Any, keys: Any = keys, values: Any = values) -> Any:
            q, k, v = (given[: len(tokens)] for given in (q, k, v))

            def put(buffer, new):
                return jax.lax.dynamic_update_slice(buffer, new, (0, lengths[0], 0, 0))

            keys, values = put(keys, k), put(values, v)
            kv.append((keys, values))
            own = partial(jax.nn.dot_product_attention, q, scale=scale, implementation="cudnn")
            if T > 1:
                return own(k, v, is_causal=True), None
            o = own(keys, values, key_value_seq_lengths=lengths + 1)
            return jnp.broadcast_to(o, (rows, *o.shape[1:])), None

        x, _ = block(x, positions, attend)
    token = network.embeddings.unembed(x[: len(tokens), -1]).argmax(-1).astype(jnp.int32)[:, None]
    return token, {"lengths": lengths + T, "kv": kv}


def seconds(f: Callable[[], Any]) -> float:
    """Wall time of one synchronised call."""
    began = time.perf_counter()
    jax.block_until_ready(f())
    return time.perf_counter() - began


def capacity_for(tokens: int) -> int:
    """Of a cache that holds so many tokens and takes what is decoded."""
    return tokens + ROOM


def prefill_times(side: Any, tokens: int, repeats: int) -> list[float]:
    """Seconds from a prompt of one row to its first token; the first, which compiles, is left out."""
    prompt = jnp.asarray(np.random.default_rng(0).integers(32000, size=(1, tokens)), jnp.int32)
    times = []
    for _ in range(repeats + 1):
        cache = jax.block_until_ready(side.cache(1, capacity_for(tokens)))
        times.append(seconds(lambda cache=cache: side.prefill(cache, prompt)[0]))
        del cache
    return times[1:]


def decode_times(side: Any, batch: int, tokens: int, steps: int, *, repeats: int = 4) -> list[float]:
    """Seconds per decoded token, `batch` rows of `tokens` each.

    Of `steps` more than `BEGUN`: what a run costs besides its tokens is not in them, be it one call or a call
    for each, if those are asked for ahead.

    Raises:
      ValueError: a cache of `capacity_for` has no room for so many.
    """
    counts = (2, 2, *[BEGUN, BEGUN + steps] * repeats)
    if sum(counts) > ROOM:
        raise ValueError(f"{steps=}, {repeats=}: {sum(counts)} tokens must be <= {ROOM}")
    cache = side.filled(side.cache(batch, capacity_for(tokens)), tokens)
    token, times = jnp.zeros((batch, 1), jnp.int32), []
    for count in counts:
        jax.block_until_ready((token, cache))
        began = time.perf_counter()
        token, cache = side.decode(cache, token, count)
        jax.block_until_ready(token)
        times.append(time.perf_counter() - began)
    few, more = times[2::2], times[3::2]
    return [(b - a) / steps for a, b in zip(few, more, strict=True)]


def decode_once(side: Any, batch: int, tokens: int) -> None:
    """A token of `batch` rows of `tokens` each; nothing of it is kept, nor where it fails."""
    cache = side.filled(side.cache(batch, capacity_for(tokens)), tokens)
    jax.block_until_ready(side.decode(cache, jnp.zeros((batch, 1), jnp.int32), 1)[0])


def largest_batch(side: Any, plan: CompressionPlan, tokens: int) -> int:
    """Rows of `tokens` whose cache fits beside the weights: computed, then allocated and decoded once."""
    stats = jax.local_devices()[0].memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    batch = int(free // plan.bytes(capacity_for(tokens)))
    while batch:
        try:
            decode_once(side, batch, tokens)
            return batch
        except Exception as error:  # XLA raises its own type for memory that cannot be had.
            if "RESOURCE_EXHAUSTED" not in str(error) and "memory" not in str(error):
                raise
        batch -= 1
    return 0


def measure(name: RowName, options: Options) -> dict[str, Any]:
    """All figures of one row, printed as they are seen."""
    config = replace(LLAMA_2_7B, layers=LLAMA_2_7B.layers[: options.layers])
    network = build(name, config)
    plan = network.plan
    side: Any = OnCudnn(network) if name == "cudnn" else Ours(network, options.chunk)
    out: dict[str, Any] = {"kv_bytes_16k": plan.bytes(16384)}

    def record(key: str, value: Any) -> None:
        out[key] = value
        shown = value if isinstance(value, int) else f"{1e3 * float(np.median(value)):.2f} ms"
        print(f"{name:10} {key:28} {shown}", flush=True)

    record("decode_b16_8k", decode_times(side, 16, 8192, options.steps))
    record("prefill_8k", prefill_times(side, options.short, 5))
    if name in ("cudnn", "window"):
        record("decode_b8_16k", decode_times(side, 8, 16384, options.steps))
        record("prefill_128k", prefill_times(side, options.long, 1))
        record("largest_batch_16k", largest_batch(side, plan, 16384))
    return out


def main(options: Options) -> None:
    """Measures the rows and writes one JSON file, anew after each."""
    settings = {k: v for k, v in asdict(options).items() if k not in ("results", "name", "rows")}
    results: dict[str, Any] = earlier(options.results / f"{options.name}.json", settings) or {}
    for name in options.rows:
        results[name] = measure(name, options) | {"commit": commit()}
        print(write_result(options.name, settings, results, options.results), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
