"""Token classes on tokens divided over devices: hidden states, decoding and bytes, as on one device."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.plan import CompressionPlan, LayerRanks, TokenClasses

BLOCK = 8
CASES = {
    "llama, K < U": (replace(LLAMA, num_heads=8, num_kv_heads=2), "data=2,sequence=4", {}, 61),
    "llama, window": (
        replace(LLAMA, num_heads=8, num_kv_heads=4),
        "sequence=4,model=2",
        {"window": 9, "sinks": 2},
        64,
    ),
    "MQA, window of several devices": (
        replace(LLAMA, num_kv_heads=1),
        "sequence=4",
        {"window": 37, "sinks": 20},
        63,
    ),
    "opt": (replace(OPT, num_heads=8, num_kv_heads=8), "data=2,sequence=2,model=2", {}, 40),
}


def plan_of(config, near) -> CompressionPlan:
    important = (LayerRanks(32, 32), LayerRanks(32, 16), LayerRanks(16, 32))
    classes = TokenClasses((0,), (0.4,), important, BLOCK)
    return replace(CompressionPlan.uniform(config, qk=16, v=16, **near), classes=classes)


@pytest.mark.parametrize("name", CASES)
def test_whole(name):
    config, mesh, near, length = CASES[name]
    model = TinyModel(config)
    network = model.model(plan_of(config, near)).network
    tokens = jnp.asarray(model.tokens(2, length))
    expected = np.asarray(network.hidden(tokens))
    got = ShardedTransformer.of(network, MeshConfig.parse(mesh).create()).hidden(tokens)
    got = np.asarray(got)[:, :length]
    print(name, np.abs(got - expected).max() / np.abs(expected).max())
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
