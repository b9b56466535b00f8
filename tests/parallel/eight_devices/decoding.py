"""A prompt divided by token, then decoding divided by head: every step as on one device, and `generate`."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel
from decoding_steps import assert_one_of_two, decoded
from tiny_tokenizers import byte_tokenizer

from zdc_jax import Sampling, generate, stream
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.errors import MeshError
from zdc_jax.generation.packed_parameters import pack_parameters
from zdc_jax.generation.request import Request
from zdc_jax.generation.run import Run
from zdc_jax.generation.steps import DecodeState, Flat, decode
from zdc_jax.parallel.mesh import MeshConfig, whole_on
from zdc_jax.plan import CompressionPlan, LayerRanks

FULL, HALF, MIXED, NONE = LayerRanks(32, 32), LayerRanks(16, 16), LayerRanks(16, 32), LayerRanks(0, 0)
PLANS = {
    "ranks": ((FULL, MIXED), {}),
    "window": ((HALF, NONE), {"window": 9, "sinks": 3}),
    "window of several devices": ((MIXED, FULL), {"window": 37, "sinks": 20}),
    "shifted": ((replace(HALF, shift=True), NONE), {"window": 9, "sinks": 3}),
}
MODELS = {
    "llama, K < U": (replace(LLAMA, layers=LLAMA.layers[:1] * 2, num_heads=8, num_kv_heads=2), "sequence=4"),
    "opt": (
        replace(OPT, layers=OPT.layers[:1] * 2, num_heads=8, num_kv_heads=8),
        "data=2,sequence=2,model=2",
    ),
}
PROMPTS = [[5, 6, 7] * 15, [3, 9], [80, 4, 4, 60, 11], [12]]
LENGTHS, CAPACITY, STEPS = np.array([61, 20]), 96, 12


def replay(network, prefill):
    """Return last hidden states of prompts of two lengths and of tokens after them, [B, 1 + STEPS, D]."""
    tokens = np.random.default_rng(0).integers(3, 90, (2, CAPACITY), dtype=np.int32)
    last, cache = prefill(jnp.asarray(tokens[:, : LENGTHS.max()]), jnp.asarray(LENGTHS))
    at = LENGTHS + np.arange(STEPS)[:, None]
    cache, states = decoded(network, cache, jnp.asarray(tokens[np.arange(2), at]), jnp.asarray(at + 1))
    return np.stack([last, *states], 1), cache


@pytest.mark.full
def test_a_single_row_in_16_bits_is_one_of_two_equal_rows():
    config, mesh = MODELS["llama, K < U"]
    model, plan = TinyModel(config), CompressionPlan.uniform(config, qk=16, v=16, window=9, sinks=3)
    network = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.model(plan).network)
    sharded = network.on_mesh(MeshConfig.parse(mesh).create())
    text = jnp.asarray(np.tile(model.tokens(1, 44), (2, 1)))
    _, cache = sharded.prefill(text[:, :40], jnp.full(2, 40), capacity=48)
    assert_one_of_two(sharded, cache, text[:, 40:])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.matrix("window-llama, K < U", "shifted-llama, K < U")
def test_as_on_one_device(plan, name):
    config, mesh = MODELS[name]
    model = TinyModel(config)
    layers, near = PLANS[plan]
    compression = CompressionPlan(layers, model.config.num_kv_heads, 32, **near)
    network = model.model(compression).network
    sharded = network.on_mesh(MeshConfig.parse(mesh).create())

    def on_one(tokens, end):
        empty = KVCache.create(compression.layer_caches("float32"), batch=2, capacity=CAPACITY)
        hidden, cache = network.extend(empty, tokens, end)
        return hidden[np.arange(2), LENGTHS - 1], cache

    expected, cache = replay(network, on_one)
    got, divided = replay(sharded, lambda tokens, end: sharded.prefill(tokens, end, capacity=CAPACITY))
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
    copies = divided.layers[0].k.shape[1] // cache.layers[0].k.shape[1]
    assert copies == max(1, 4 // model.config.num_kv_heads)
    assert sum(x.nbytes for x in jax.tree.leaves(divided.layers)) == copies * sum(
        x.nbytes for x in jax.tree.leaves(cache.layers)
    )


@pytest.mark.parametrize("ready", [True, False])
def test_processes_ask_for_the_same_pieces(ready):
    """Ask for one chunk more while waiting for a chunk, in every process, without a call to a host."""
    model = TinyModel(MODELS["llama, K < U"][0])
    on_one = replace(model.model(CompressionPlan.full(model.config)), tokenizer=byte_tokenizer(97))
    mesh = MeshConfig(data=2, sequence=4).create()
    on_mesh = replace(on_one, network=on_one.network.on_mesh(mesh))
    asked = SimpleNamespace(counts=SimpleNamespace(is_ready=lambda: ready))
    request = Request.from_arguments(on_mesh, PROMPTS, 20, None, (), (), 32)
    assert Run(on_mesh, request, None)._may_ask_ahead(asked)
    assert Run(on_one, request, None)._may_ask_ahead(asked) == (not ready)
    calls = []

    class Spied(Run):
        def _decode(self, *given):
            calls.append(len(self.chosen[0]))
            return super()._decode(*given)

    assert sum(len(delta.tokens) for delta in Spied(on_mesh, request, None).deltas(8)) == 4 * 20
    assert calls == [1, 1, 9]


def test_pieces_have_a_number_of_steps_that_xla_knows():
    """Check that the number of steps is static, so that the loop needs no call to a host."""
    model = TinyModel(MODELS["llama, K < U"][0])
    mesh = MeshConfig(data=2, sequence=4).create()
    sharded = model.model(CompressionPlan.full(model.config)).network.on_mesh(mesh)
    state = DecodeState.of(sharded.new_cache(batch=2, capacity=64), whole_on(mesh))
    numbers = np.stack([pack_parameters(9, 20, (), Sampling(), np.zeros(2, np.uint32))] * 2)
    given = Flat.of(sharded), state, np.ones(2, bool), numbers

    def loops(limit):
        return re.findall(
            r" while\(.*", decode.lower(*given, limit, steps=7, choice="greedy").compile().as_text()
        )

    assert any('"known_trip_count":{"n":"7"}' in loop for loop in loops(None))
    assert not any('"n":"7"' in loop for loop in loops(np.int32(7)))


@pytest.mark.full
def test_generate():
    model = TinyModel(MODELS["llama, K < U"][0])
    layers, near = PLANS["window"]
    on_one = model.model(CompressionPlan(layers, model.config.num_kv_heads, 32, **near))
    on_one = replace(on_one, tokenizer=byte_tokenizer(97))
    options = {
        "sampling": [Sampling(1.0, seed=1), Sampling(), Sampling(2.0, top_k=9), Sampling(0.7, top_p=0.9)]
    }
    expected = generate(on_one, PROMPTS, 20, **options)
    mesh = MeshConfig(data=2, sequence=4).create()
    on_mesh = replace(on_one, network=on_one.network.on_mesh(mesh))
    programs = decode._cache_size()
    got = generate(on_mesh, PROMPTS, 20, **options)
    assert got.completions == expected.completions
    assert got.capacity == expected.capacity
    lengths = 4 * len(PROMPTS)
    assert got.kv_bytes - lengths == 2 * (expected.kv_bytes - lengths)  # two copies of each KV head
    streamed = [[] for _ in PROMPTS]
    for delta in stream(on_mesh, PROMPTS, 20, **options):
        streamed[delta.sequence].extend(delta.tokens)
    assert [tuple(tokens) for tokens in streamed] == [row.tokens for row in expected.completions]
    # One for all tokens and one for chunks: the cache is divided after some tokens as after the prompts.
    assert decode._cache_size() == programs + 2
    stop = expected.completions[1].text[9:11]
    stopped = generate(on_one, PROMPTS, 20, stop=stop, **options).completions
    assert stopped[1].finish_reason == "stop"
    assert generate(on_mesh, PROMPTS, 20, stop=stop, **options).completions == stopped
    with pytest.raises(MeshError, match="batch=3: cannot be divided over data=2"):
        generate(on_mesh, PROMPTS[:3], 20)
