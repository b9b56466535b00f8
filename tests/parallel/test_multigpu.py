"""On several real devices: plans with token classes give what one device gives."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel

from zdc_jax import generate
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.plan import CompressionPlan, LayerRanks, TokenClasses


@pytest.mark.multigpu
@pytest.mark.parametrize("near", [{}, {"window": 64, "sinks": 4}])
def test_token_classes(near):
    """In float32, so that rounding moves no token to the other class."""
    degree = 4 if jax.device_count() >= 4 else 2
    model = TinyModel(replace(LLAMA, num_layers=3, num_heads=8, num_kv_heads=2, max_positions=2048))
    classes = TokenClasses((0,), (0.5,), (LayerRanks(32, 32),) * 3, block=128)
    plan = replace(CompressionPlan.uniform(model.config, qk=16, v=16, **near), classes=classes)
    on_one = model.model(plan)
    network = ShardedTransformer.of(on_one.network, MeshConfig(sequence=degree).create())
    tokens = jnp.asarray(model.tokens(2, 1500))
    expected = np.asarray(on_one.network.hidden(tokens))
    got = np.asarray(network.hidden(tokens))[:, :1500]
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
    prompts = [[5, 6, 7] * 200, [3, 9] * 60]
    assert (
        generate(replace(on_one, network=network), prompts, 20).completions
        == generate(on_one, prompts, 20).completions
    )
