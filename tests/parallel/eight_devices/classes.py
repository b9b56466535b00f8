"""Token classes on tokens divided over devices: what one device gives, in the bytes that the formula says."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

import zdc_jax.ops.attention as ops
from benchmarks.mesh.rivals.methods import ATTENTION, method_bytes
from benchmarks.mesh.traffic import cache_bytes, hlo_bytes, prefill_bytes
from zdc_jax import generate
from zdc_jax.basis import Basis
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.parallel.classes import check_classes
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan, LayerRanks, TokenClasses

BLOCK, CAPACITY = 8, 96
HEADS = {"MHA": (4, 4), "GQA": (8, 4), "MQA": (4, 1)}
FAR = {"window": 37, "sinks": 20}
"""A window of several devices."""
WHOLE = {
    "GQA": ("GQA", {}, 61),
    "MQA, padding alone on one device": ("MQA", {}, 23),
    "MHA, window of several devices": ("MHA", FAR, 61),
    "GQA, window": ("GQA", {"window": 9, "sinks": 2}, 64),
}


@cache
def tiny(heads: str) -> tuple[TinyModel, Basis]:
    num_heads, num_kv_heads = HEADS[heads]
    model = TinyModel(
        replace(LLAMA, layers=LLAMA.layers[:1] * 2, num_heads=num_heads, num_kv_heads=num_kv_heads)
    )
    return model, model.basis()


def class_plan(model: TinyModel, near, leaders=(0,)) -> CompressionPlan:
    """Return a plan with 32 coordinates of q and k in important tokens, and 16 in others and in leaders."""
    important = (LayerRanks(32, 32 if near else 16),) * model.config.num_layers
    classes = TokenClasses(leaders, (0.4, 0.7)[: len(leaders)], important, BLOCK)
    return replace(CompressionPlan.uniform(model.config, qk=16, v=16, **near), classes=classes)


def assert_equal(got, expected):
    assert np.abs(np.asarray(got) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.matrix
def test_whole_prompts(name):
    heads, near, length = WHOLE[name]
    model, basis = tiny(heads)
    network = model.model(plan := class_plan(model, near), basis).network
    tokens = jnp.asarray(model.tokens(2, length))
    sharded = network.on_mesh(MeshConfig(data=2, sequence=4).create())
    program = jax.jit(lambda sharded, tokens: sharded.hidden(tokens)).lower(sharded, tokens).compile()
    expected = jax.jit(lambda network, tokens: network.hidden(tokens))(network, tokens)
    assert_equal(program(sharded, tokens)[:, :length], np.asarray(expected))
    text = program.as_text()
    assert hlo_bytes(text) == prefill_bytes(model.config, plan, length=length, degree=4, itemsize=4)
    assert text.count(" all-to-all(") == 2 * len(plan.layers)  # one message for q, k, v of both classes


@pytest.mark.full
def test_decoding():
    """Decode past the end of a block after ragged prompts; new tokens are classified on arrival; K < U."""
    model = TinyModel(config := replace(LLAMA, layers=LLAMA.layers[:1] * 2, num_heads=8))
    network = model.model(plan := class_plan(model, FAR)).network
    sharded = network.on_mesh(MeshConfig(sequence=4).create())
    tokens, lengths = model.tokens(2, CAPACITY), np.array([61, 20])
    prompts, end = jnp.asarray(tokens[:, :61]), jnp.asarray(lengths)
    one = KVCache.create(plan.layer_caches("float32"), batch=2, capacity=CAPACITY)
    extend = jax.jit(lambda network, *step: network.extend(*step))
    hidden, one = extend(network, one, prompts, end)
    prefill = jax.jit(lambda sharded, *prompts: sharded.prefill(*prompts, capacity=CAPACITY))
    program = prefill.lower(sharded, prompts, end).compile()
    last, many = program(sharded, prompts, end)
    assert_equal(last, np.asarray(hidden)[np.arange(2), lengths - 1])
    options = {"degree": 4, "batch": 2, "itemsize": 4}
    sent = prefill_bytes(config, plan, length=61, **options)
    sent += cache_bytes(config, plan, capacity=CAPACITY, **options)
    sent += 2 * 2 * config.embed_dim * 4 * 3 // 4  # the last token's hidden states
    assert hlo_bytes(program.as_text()) == sent
    for mine, whole in zip(jax.tree.leaves(many.layers), jax.tree.leaves(one.layers), strict=True):
        copies = 2 if whole.ndim == 4 else 1  # of each KV head; positions are there once
        assert mine.nbytes == copies * whole.nbytes
    for at in lengths + np.arange(5)[:, None]:
        token, end = jnp.asarray(tokens[np.arange(2), at][:, None]), jnp.asarray(at + 1)
        expected, one = extend(network, one, token, end)
        got, many = extend(sharded, many, token, end)
        assert_equal(got, np.asarray(expected))
    for mine, whole in zip(many.layers[0].group.positions, one.layers[0].group.positions, strict=True):
        np.testing.assert_array_equal(np.sort(mine), np.sort(whole))


@pytest.mark.full
def test_generate():
    """Divide heads, and with them the importance of a token, over `model` too; gather weights."""
    model = TinyModel(replace(OPT, num_heads=8, num_kv_heads=8))
    on_one = model.model(class_plan(model, {}, leaders=(0, 2)))
    prompts = [[5, 6, 7] * 15, [3, 9]]
    mesh = MeshConfig(data=2, sequence=2, model=2).create()
    network = on_one.network.on_mesh(mesh, weights="gathered")
    expected, got = generate(on_one, prompts, 12), generate(replace(on_one, network=network), prompts, 12)
    assert got.completions == expected.completions


@pytest.mark.full
def test_layers_lower_on_kernels(monkeypatch):
    model, basis = tiny("MHA")
    monkeypatch.setattr(ops, "device_refusal", lambda x: None)
    network = model.model(class_plan(model, {"window": 64}), basis).network
    network = jax.tree.map(lambda x: x.astype(jnp.bfloat16), network)
    sharded = network.on_mesh(MeshConfig(sequence=4).create())
    traced = jax.jit(lambda tokens: sharded.hidden(tokens, implementation="pallas")).trace(
        jax.ShapeDtypeStruct((1, 500), jnp.int32)
    )
    assert "zdc_prefill" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_refusals():
    with pytest.raises(NotImplementedError, match=r"payload='float8': .*need 'native'"):
        check_classes("float8")
    model, basis = tiny("MHA")
    network = model.model(plan := class_plan(model, {}), basis).network
    sharded = network.on_mesh(MeshConfig(sequence=2).create())
    tokens, end = jnp.zeros((1, 40), jnp.int32), jnp.array([40])
    for method in {*ATTENTION} - {"ulysses"}:
        for call in (
            lambda method=method: sharded.hidden(tokens, attention=ATTENTION[method]),
            lambda method=method: method_bytes(model.config, plan, length=40, degree=2, method=method),
        ):
            with pytest.raises(
                NotImplementedError, match=f"attention=.*{method}.*classes need sharded_attention"
            ):
                call()
    for implementation in ("pallas", "cudnn"):
        with pytest.raises(NotImplementedError, match=f"{implementation=} cannot serve this call"):
            sharded.hidden(tokens, implementation=implementation)
        with pytest.raises(NotImplementedError, match=f"{implementation=} cannot serve this call"):
            sharded.prefill(tokens, end, capacity=64, implementation=implementation)
