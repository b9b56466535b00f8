"""Shapes of well-known models with random weights, and how benchmarks read and decode with them.

Times do not depend on the values of weights. A *side* is one implementation under test, with four methods:
`cache(batch, capacity)`, `prefill(cache, tokens)`, `filled(cache, length)` and `decode(cache, token, count)`.
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.bench_coded import SCALE_BYTES
from benchmarks.model.transferred_plans import transferred
from benchmarks.random_weights import random_tree
from zdc_jax.cache.kv_cache import KVCache, cache_bytes
from zdc_jax.config import LayerSpec, ModelConfig, RopeConfig
from zdc_jax.generation.chunks import SMALLEST_BUCKET
from zdc_jax.generation.packed_parameters import pack_parameters
from zdc_jax.generation.sampling import Sampling
from zdc_jax.generation.steps import DecodeState, Flat, decode
from zdc_jax.loading import LanguageModel, load
from zdc_jax.methods.coded import Settings
from zdc_jax.model.params import embedding_shapes, layer_shapes
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.contract import duplicate_single_token
from zdc_jax.plan import CompressionPlan

LLAMA_2_13B = ModelConfig(
    family="llama",
    layers=LayerSpec(rope=RopeConfig(theta=10_000.0)).repeated(40),
    norm="rms",
    embed_dim=5120,
    ffn_dim=13824,
    vocab_size=32000,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    max_positions=4096,
    norm_eps=1e-5,
    activation="silu",
    dtype="bfloat16",
    tie_embeddings=False,
)
LLAMA_2_7B = replace(
    LLAMA_2_13B,
    layers=LLAMA_2_13B.layers[:32],
    embed_dim=4096,
    ffn_dim=11008,
    num_heads=32,
    num_kv_heads=32,
    max_positions=2**18,
)
LLAMA_3_8B = replace(
    LLAMA_2_7B,
    ffn_dim=14336,
    num_kv_heads=8,
    vocab_size=128256,
    layers=LayerSpec(rope=RopeConfig(theta=500_000.0)).repeated(32),
)
QWEN_1_5B = replace(
    LLAMA_2_7B,
    layers=LayerSpec(rope=RopeConfig(theta=1_000_000.0)).repeated(28),
    embed_dim=1536,
    ffn_dim=8960,
    vocab_size=151936,
    num_heads=12,
    num_kv_heads=2,
    max_positions=32768,
    norm_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=True,
)
QWEN_7B = replace(
    QWEN_1_5B,
    embed_dim=3584,
    ffn_dim=18944,
    vocab_size=152064,
    num_heads=28,
    num_kv_heads=4,
    tie_embeddings=False,
)
SHAPES = {
    "llama-2-7b": LLAMA_2_7B,
    "llama-2-13b": replace(LLAMA_2_13B, max_positions=2**18),
    "llama-3-8b": LLAMA_3_8B,
    "qwen2.5-1.5b": QWEN_1_5B,
    "qwen2.5-7b": QWEN_7B,
    "tiny": replace(
        LLAMA_2_7B,
        layers=LLAMA_2_7B.layers[:2],
        embed_dim=64,
        ffn_dim=96,
        vocab_size=97,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
    ),
}
ShapeName = Literal[*SHAPES]
SINKS, WINDOW = 4, 512
ROOM = 128
"""Largest number of tokens decoded after those that a cache stores."""
BEGUN = 4
"""Tokens of the shorter run, whose time is subtracted from that of the longer run."""
MOST = SMALLEST_BUCKET
"""Largest number of tokens of one call, as in the smallest program of `generate`."""


def load_side(*, shape: str, folder: Path | None, plan: Path | None, layers: int | None) -> LanguageModel:
    """Return a converted folder's model, or one of a shape with random weights, under a plan or none."""
    if folder is not None:
        return load(folder, plan)
    config = find_shape(shape, layers)
    if plan is None:
        return LanguageModel(build(config))
    chosen = transferred(CompressionPlan.load(plan), config, growth=1)
    return LanguageModel(build(config, chosen, rotated=True))


def find_shape(name: str, layers: int | None) -> ModelConfig:
    """Return the configuration of a shape, cut to its first layers if a number is given."""
    config = SHAPES[name]
    return replace(config, layers=config.layers[:layers])


def fits(plan: CompressionPlan, *, tokens: int, share: float) -> int:
    """Return how many sequences of `tokens` tokens have caches that fit into a share of the free memory.

    A device without memory statistics (a CPU) has room for one.
    """
    stats = jax.local_devices()[0].memory_stats()
    if not stats:
        return 1
    free = share * (stats["bytes_limit"] - stats["bytes_in_use"])
    return int(free // cache_bytes(plan.layer_caches("bfloat16"), tokens))


def write_config(shape: str, folder: Path, *, layers: int | None, config: Path | None) -> int:
    """Write config.json of a Llama or Qwen2 of this shape, or copy one, and return its vocabulary's size."""
    if config is not None:
        shutil.copy(config, folder / "config.json")
        return json.loads(config.read_text())["vocab_size"]
    model = find_shape(shape, layers)
    rope = model.layers[0].rope
    assert rope is not None
    family, name = ("qwen2", "Qwen2ForCausalLM") if model.qkv_bias else ("llama", "LlamaForCausalLM")
    values = {
        "architectures": [name],
        "model_type": family,
        "hidden_size": model.embed_dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "hidden_act": "silu",
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    return model.vocab_size


def build(config: ModelConfig, plan: CompressionPlan | None = None, *, rotated: bool = False) -> Transformer:
    """Return a model of this shape with random weights, made layer by layer on the device.

    Args:
      plan: the plan that the model runs; the full plan without one.
      rotated: whether queries and keys are multiplied by a random orthogonal basis after the rotary
        embedding, as in plans with a basis.
    """
    key = jax.random.key(0)

    @jax.jit
    def make_layer(key: jax.Array) -> Any:
        weights = random_tree(layer_shapes(config, 0), config, key)
        if rotated:
            shape = (config.num_kv_heads, config.head_dim, config.head_dim)
            basis = jnp.linalg.qr(jax.random.normal(key, shape))[0].astype(jnp.float16)
            weights["attention"] |= {"q_rotation": basis, "k_rotation": basis}
        return weights

    layers = (make_layer(jax.random.fold_in(key, 1 + index)) for index in range(config.num_layers))
    embeddings = random_tree(embedding_shapes(config), config, key)
    return Transformer(config, plan or CompressionPlan.full(config), embeddings, layers)


def coded_plan(config: ModelConfig) -> CompressionPlan:
    """Return the plan that quantizes all coordinates to 4 bits in every layer and reads all tokens."""
    H, settings = config.head_dim, Settings(index=0, read=0)
    plan = CompressionPlan.uniform(config, qk=H, v=H, sinks=SINKS, window=WINDOW)
    layers = tuple(replace(ranks, settings=settings) for ranks in plan.layers)
    return replace(plan, method="coded", settings=settings, layers=layers)


@partial(jax.jit, donate_argnums=0)
def random_codes(codes: jax.Array, key: jax.Array) -> jax.Array:
    """Replace zeros by random levels, or by random scales if there is one byte a token."""
    if codes.shape[-1] == 1:
        return codes * 0 + jax.random.randint(key, codes.shape, *SCALE_BYTES).astype(jnp.uint8)
    return codes ^ jax.random.bits(key, codes.shape, jnp.uint8)  # An unused argument could not be donated.


class InOneCall:
    """Greedy decoding of all sequences as `generate` does it, several tokens in one call."""

    def __init__(self, network: Transformer, implementation: Implementation):
        self._flat = Flat.of(network)
        self._where = network.on_all_devices
        self._options: Any = {"steps": MOST, "choice": "greedy", "implementation": implementation}

    def __call__(self, cache: KVCache, token: jax.Array, count: int) -> tuple[jax.Array, KVCache]:
        """Return the last of `count` more tokens of each sequence, int32 [B, 1], and the cache.

        Raises:
          ValueError: `count` exceeds `MOST`.
        """
        if count > MOST:
            raise ValueError(f"{count=} must be <= {MOST}")
        ended = jnp.zeros(len(token), bool)
        state = DecodeState(cache, *jax.device_put((token[:, 0], ended), self._where))
        state, _ = decode(*self._arguments(state, count), **self._options)
        return state.last[:, None], state.cache

    def compile(self, cache: KVCache) -> None:
        """Compile the program for a cache of these shapes."""

        def like(dtype):
            return jax.ShapeDtypeStruct(cache.lengths.shape, dtype, sharding=self._where)

        state = DecodeState(cache, like(jnp.int32), like(bool))
        decode.lower(*self._arguments(state, 1), **self._options).compile()

    def _arguments(self, state: DecodeState, count: int) -> tuple[Any, ...]:
        """Return the arguments of `decode` where every sequence is active until the cache is full."""
        batch, room = len(state.last), state.cache.capacity
        numbers = pack_parameters(1, room, (), Sampling(), np.zeros(2, np.uint32))
        return self._flat, state, np.ones(batch, bool), np.tile(numbers, (batch, 1)), np.int32(count)


class OnKernels:
    """Side that runs the library's own path: `Transformer.extend` and `generate`'s loop on our kernels.

    Attributes:
      chunk: tokens of one prefill chunk.
    """

    def __init__(self, network: Transformer, chunk: int):
        self.network, self.chunk = network, chunk
        self.flat, self.decode = Flat.of(network), InOneCall(network, "pallas")

    def cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache."""
        return self.network.new_cache(batch=batch, capacity=capacity)

    def prefill(self, cache: KVCache, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
        """Read a prompt [B, T] in chunks; return the first token of each sequence and the cache."""
        for start in range(0, tokens.shape[1], self.chunk):
            token, cache = extended(self.flat, cache, tokens[:, start : start + self.chunk])
        return token, cache

    def filled(self, cache: KVCache, length: int) -> KVCache:
        """Return the cache as if it stored `length` tokens: random quantized values, zeros in 16 bits."""
        keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(cache))))

        def fill(leaf):
            return random_codes(leaf, next(keys)) if leaf.dtype == jnp.uint8 else leaf

        layers = jax.tree.map(fill, cache.layers)
        return replace(cache, layers=layers, lengths=jnp.full_like(cache.lengths, length))


@partial(jax.jit, donate_argnums=1)
def extended(flat: Flat[Transformer], cache: KVCache, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
    """Read tokens [B, T] on our kernels; return the next token [B, 1] and the cache."""
    network = flat.whole
    hidden, cache = network.extend(cache, tokens, cache.lengths + tokens.shape[1], "pallas")
    return network.embeddings.unembed(hidden[:, -1]).argmax(-1).astype(jnp.int32)[:, None], cache


class OnCudnn:
    """Side of the peer: the same layers at full rank, with cuDNN's attention.

    Each layer has one pair of caches [B, S, K, H], updated in place. Layers are unrolled, so that cuDNN reads
    each cache where it is stored: nothing is copied or transposed.
    """

    def __init__(self, network: Transformer):
        self.config, self.flat = network.config, Flat.of(network)

    def cache(self, batch: int, capacity: int) -> Any:
        """Return an empty cache."""
        c = self.config

        def zeros():
            return jnp.zeros((batch, capacity, c.num_kv_heads, c.head_dim), jnp.bfloat16)

        return {
            "lengths": jnp.zeros(batch, jnp.int32),
            "kv": [(zeros(), zeros()) for _ in range(c.num_layers)],
        }

    def prefill(self, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """Read a whole prompt [B, T] at once; return the first token of each sequence and the cache."""
        return _cudnn_step(self.flat, cache, tokens)

    def filled(self, cache: Any, length: int) -> Any:
        """Return the cache as if it stored `length` tokens."""
        return {**cache, "lengths": jnp.full_like(cache["lengths"], length)}

    def decode(self, cache: Any, token: jax.Array, count: int) -> tuple[jax.Array, Any]:
        """Decode tokens by one call each, dispatched ahead; this is faster here than a loop on the device."""
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
            q, k, v = (x[: len(tokens)] for x in (q, k.keys, v))

            def put(buffer, new):
                return jax.lax.dynamic_update_slice(buffer, new, (0, lengths[0], 0, 0))

            keys, values = put(keys, k), put(values, v)
            kv.append((keys, values))
            attention = partial(jax.nn.dot_product_attention, q, scale=scale, implementation="cudnn")
            if T > 1:
                return attention(k, v, is_causal=True), None
            o = attention(keys, values, key_value_seq_lengths=lengths + 1)
            return jnp.broadcast_to(o, (rows, *o.shape[1:])), None

        x, _ = block(x, positions, attend)
    token = network.embeddings.unembed(x[: len(tokens), -1]).argmax(-1).astype(jnp.int32)[:, None]
    return token, {"lengths": lengths + T, "kv": kv}


def seconds(f: Callable[[], Any]) -> float:
    """Return the wall time of one synchronized call."""
    began = time.perf_counter()
    jax.block_until_ready(f())
    return time.perf_counter() - began


def capacity_for(tokens: int) -> int:
    """Return the capacity of a cache that stores `tokens` and accepts the tokens decoded after them."""
    return tokens + ROOM


def prefill_times(side: Any, tokens: int, repeats: int) -> list[float]:
    """Return seconds from a prompt of one sequence to its first token, without the call that compiles."""
    prompt = jnp.asarray(np.random.default_rng(0).integers(32000, size=(1, tokens)), jnp.int32)
    times = []
    for _ in range(repeats + 1):
        cache = jax.block_until_ready(side.cache(1, capacity_for(tokens)))
        times.append(seconds(lambda cache=cache: side.prefill(cache, prompt)[0]))
        del cache
    return times[1:]


def decode_times(side: Any, batch: int, tokens: int, steps: int, *, repeats: int = 4) -> list[float]:
    """Return seconds per decoded token of `batch` sequences of `tokens` each.

    Each time is the difference of two runs, one of `BEGUN` tokens and one of `steps` more. So the constant
    cost of a call cancels out.

    Raises:
      ValueError: a cache of `capacity_for(tokens)` has no room for the tokens of all runs.
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
