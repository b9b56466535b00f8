"""A prompt divided by token, then decoding divided by head: every step as on one device, and `generate`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from zdc_jax.cache import KVCache
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.plan import CompressionPlan, LayerRanks

FULL, HALF, MIXED, NONE = LayerRanks(32, 32), LayerRanks(16, 16), LayerRanks(16, 32), LayerRanks(0, 0)
PLANS = {
    "ranks": ((FULL, MIXED), {}),
    "window": ((HALF, NONE), {"window": 9, "sinks": 3}),
    "window of several devices": ((MIXED, FULL), {"window": 37, "sinks": 20}),
    "sinks only": ((HALF, MIXED), {"sinks": 5}),
}
MODELS = {
    "llama, K < U": (replace(LLAMA, num_layers=2, num_heads=8, num_kv_heads=2), "sequence=4"),
    "opt": (replace(OPT, num_layers=2, num_heads=8, num_kv_heads=8), "data=2,sequence=2,model=2"),
}
LENGTHS, CAPACITY, STEPS = np.array([61, 20]), 96, 12


def replay(network, prefill):
    """Last hidden states of prompts of two lengths and of some tokens after them [B, 1 + STEPS, D]."""
    tokens = np.random.default_rng(0).integers(3, 90, (2, CAPACITY), dtype=np.int32)
    hidden, cache = prefill(jnp.asarray(tokens[:, : LENGTHS.max()]), jnp.asarray(LENGTHS))
    states = [np.asarray(hidden)[np.arange(2), LENGTHS - 1]]
    extend = jax.jit(lambda network, cache, token, end: network.extend(cache, token, end))
    for step in range(STEPS):
        token = jnp.asarray(tokens[np.arange(2), LENGTHS + step][:, None])
        hidden, cache = extend(network, cache, token, jnp.asarray(LENGTHS + step + 1))
        states.append(np.asarray(hidden)[:, 0])
    return np.stack(states, 1), cache


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plan", PLANS)
def test_as_on_one_device(plan, name):
    config, mesh = MODELS[name]
    model = TinyModel(config)
    layers, near = PLANS[plan]
    compression = CompressionPlan(layers, model.config.num_kv_heads, 32, **near)
    network = model.model(compression).network
    sharded = ShardedTransformer(network, MeshConfig.parse(mesh).create())

    def on_one(tokens, end):
        empty = KVCache.create(compression, batch=2, capacity=CAPACITY, dtype=jnp.float32)
        return network.extend(empty, tokens, end)

    expected, cache = replay(network, on_one)
    got, divided = replay(sharded, lambda tokens, end: sharded.prefill(tokens, end, capacity=CAPACITY))
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
    copies = divided.layers[0].k.shape[1] // cache.layers[0].k.shape[1]
    assert copies == max(1, 4 // model.config.num_kv_heads)
    assert sum(x.nbytes for x in jax.tree.leaves(divided.layers)) == copies * sum(
        x.nbytes for x in jax.tree.leaves(cache.layers)
    )
