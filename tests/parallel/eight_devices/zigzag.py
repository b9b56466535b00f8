"""Zigzag shards: hidden states of one device, as much attention for each device, bytes, kernels."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

import zdc_jax.ops.attention as ops
from benchmarks.mesh.rivals.exchanges import ZigzagTransformer, zigzag_order, zigzag_positions
from benchmarks.mesh.rivals.methods import ZIGZAG, method_bytes, padded
from benchmarks.mesh.traffic import hlo_bytes
from benchmarks.random_weights import random_params
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel.layers import prompt_layer
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan

GQA = replace(LLAMA, layers=LLAMA.layers[:1] * 2, num_heads=8, num_kv_heads=2)


def test_order():
    assert zigzag_order(12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    work = zigzag_order(48, 4).reshape(4, -1).sum(1)
    assert (work == work[0]).all()


@pytest.mark.parametrize("method", ZIGZAG)
@pytest.mark.parametrize("length", [61, 64])
def test_as_on_one_device(method, length):
    model = TinyModel(GQA)
    network = model.dense
    tokens, end = jnp.asarray(model.tokens(2, length)), np.array([length, 20])
    sharded = network.on_mesh(MeshConfig(data=2, sequence=4).create())
    zigzag = ZigzagTransformer(sharded, ZIGZAG[method])
    expected = np.asarray(network.hidden(tokens))
    hidden = np.asarray(zigzag.hidden(tokens))[:, np.argsort(zigzag.order(length))][:, :length]
    assert np.abs(hidden - expected).max() <= 1e-5 * np.abs(expected).max()
    last = np.asarray(zigzag.last_hidden(tokens, jnp.asarray(end)))
    assert np.abs(last - expected[[0, 1], end - 1]).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("method", ZIGZAG)
def test_truncated_and_longer_than_the_learned_positions_with_padding(method):
    """Use 253 of 256 positions, far keys of 16 coordinates, and heads divided over `model`."""
    model = TinyModel(replace(OPT, layers=OPT.layers[:1], num_heads=8, num_kv_heads=8))
    network = model.model(CompressionPlan.uniform(model.config, qk=16, v=16)).network
    tokens = jnp.asarray(model.tokens(1, 253))
    sharded = network.on_mesh(MeshConfig(sequence=4, model=2).create())
    zigzag = ZigzagTransformer(sharded, ZIGZAG[method])
    got = np.asarray(zigzag.last_hidden(tokens, jnp.array([253])))
    expected = np.asarray(network.hidden(tokens))
    assert np.abs(got - expected[:, -1]).max() <= 1e-5 * np.abs(expected).max()


def lowered(config, method, length, implementation):
    """Lower one layer of a dense model on four devices."""
    plan, params = CompressionPlan.full(config), random_params(config, jax.random.key(0))
    network = Transformer(config, plan, params["embeddings"], params["layers"])
    sharded = network.on_mesh(MeshConfig(sequence=4).create())
    x = jax.ShapeDtypeStruct((1, padded(method, length, 4), config.embed_dim), config.dtype)
    block, spec = sharded.prompt_layers[0], sharded.layer_caches[0]
    options = (implementation, "replicated", "native", ZIGZAG[method], zigzag_positions)
    return prompt_layer.trace(block, x, jnp.array([length]), None, spec, None, sharded.mesh, *options)


@pytest.mark.parametrize("method", ZIGZAG)
def test_formula_is_what_is_compiled(method):
    config = replace(GQA, layers=GQA.layers[:1], dtype="bfloat16")
    text = lowered(config, method, 61, None).lower().compile().as_text()
    sent = method_bytes(config, CompressionPlan.full(config), length=61, degree=4, method=method)
    assert hlo_bytes(text) == sent == 3 * 16 * 2 * 64 * 2


@pytest.mark.parametrize("method", ZIGZAG)
def test_kernels_lower(monkeypatch, method):
    monkeypatch.setattr(ops, "device_refusal", lambda x: None)
    config = replace(GQA, layers=GQA.layers[:1], dtype="bfloat16")
    text = lowered(config, method, 500, "pallas").lower(lowering_platforms=("cuda",)).as_text()
    assert "zdc_prefill" in text


def test_refusals():
    model = TinyModel(GQA)
    tokens, mesh = jnp.asarray(model.tokens(1, 40)), MeshConfig(sequence=4).create()
    plan = CompressionPlan.uniform(model.config, qk=16, v=16, window=9)
    near = model.model(plan).network.on_mesh(mesh)
    with pytest.raises(NotImplementedError, match=r"zigzag shards have no near set, not .*window=9"):
        ZigzagTransformer(near, ZIGZAG["ring_zigzag"]).hidden(tokens)
    with pytest.raises(NotImplementedError, match="payload='coded': not supported by attention=ring_zigzag"):
        ZigzagTransformer(model.dense.on_mesh(mesh, payload="coded"), ZIGZAG["ring_zigzag"])
