"""Tokens divided over devices give what one gives: every method, shape of heads, kind of plan, length."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from benchmarks.mesh.rivals.methods import ATTENTION
from zdc_jax.errors import MeshError
from zdc_jax.fold import fold_attention
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan, LayerRanks

HEADS = {"MHA": (4, 4), "GQA": (8, 4), "MQA": (4, 1)}
FULL, HALF, MIXED, NONE = LayerRanks(32, 32), LayerRanks(16, 16), LayerRanks(16, 32), LayerRanks(0, 0)
PLANS = {
    "ranks": ((FULL, MIXED), {}, 61),
    "window and sinks": ((HALF, NONE), {"window": 9, "sinks": 2}, 64),
    "window of several devices": ((MIXED, MIXED), {"window": 37, "sinks": 20}, 63),
    "shifted": ((replace(FULL, shift=True), replace(MIXED, shift=True)), {}, 61),
    "shifted, window and sinks": ((replace(HALF, shift=True), NONE), {"window": 9, "sinks": 2}, 64),
}


@cache
def tiny(name: str, num_heads: int, num_kv_heads: int) -> TinyModel:
    config = {"llama": LLAMA, "opt": OPT}[name]
    return TinyModel(
        replace(config, layers=config.layers[:1] * 2, num_heads=num_heads, num_kv_heads=num_kv_heads)
    )


@cache
def one_device(heads: str, plan: str) -> tuple[Transformer, np.ndarray, np.ndarray]:
    """Return a network, two sequences of tokens, and their hidden states."""
    model = tiny("llama", *HEADS[heads])
    layers, near, length = PLANS[plan]
    network = model.model(CompressionPlan(layers, model.config.num_kv_heads, 32, **near)).network
    tokens = model.tokens(2, length)
    return network, tokens, np.asarray(network.hidden(jnp.asarray(tokens)))


def assert_equal(got, expected):
    got = np.asarray(got)[:, : expected.shape[1]]  # without padding
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


CASES = {(plan, heads, "ulysses") for plan in PLANS for heads in HEADS}
CASES |= {
    (plan, [*HEADS][(p + m) % len(HEADS)], method)
    for p, plan in enumerate(PLANS)
    for m, method in enumerate(ATTENTION)
    if (p + m) % 2 and "shifted" not in plan
}
"""All for `ulysses`; for each of the others every second plan without a shift, and heads in turn."""


@pytest.mark.parametrize(("plan", "heads", "method"), sorted(CASES))
@pytest.mark.matrix(
    "window of several devices-MQA-ulysses",
    "shifted, window and sinks-GQA-ulysses",
)
def test_as_on_one_device(plan, heads, method):
    network, tokens, expected = one_device(heads, plan)
    mesh = MeshConfig(data=2, sequence=4).create()
    sharded = network.on_mesh(mesh)
    assert_equal(sharded.hidden(jnp.asarray(tokens), attention=ATTENTION[method]), expected)


@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.matrix
def test_eight_devices_and_few_tokens(method):
    """Divide 9 tokens: three of eight devices have padding only, and the window exceeds the prompt."""
    model = tiny("opt", 8, 8)
    network = model.model(CompressionPlan.uniform(model.config, qk=16, v=16, window=300, sinks=3)).network
    tokens = jnp.asarray(model.tokens(1, 9))
    mesh = MeshConfig(sequence=8).create()
    got = network.on_mesh(mesh).hidden(tokens, attention=ATTENTION[method])
    assert_equal(got, np.asarray(network.hidden(tokens)))


@pytest.mark.full
def test_gathered_weights():
    """Compare prompts and a decoded token; four devices along `data` and `sequence` share matrices only."""
    model = tiny("opt", 4, 4)
    network = model.model(CompressionPlan.uniform(model.config, qk=16, v=16, window=9, sinks=2)).network
    mesh = MeshConfig(data=2, sequence=2, model=2).create()
    sharded = network.on_mesh(mesh, weights="gathered")
    tokens, end = jnp.asarray(model.tokens(2, 62)), jnp.array([61, 20])
    expected = np.asarray(network.hidden(tokens))
    assert_equal(sharded.hidden(tokens), expected)
    last, cache = sharded.prefill(tokens[:, :61], end, capacity=64)
    assert_equal(last, expected[[0, 1], [60, 19]])
    token, _ = sharded.extend(cache, tokens[[0, 1], [61, 20]][:, None], end + 1)
    assert_equal(token, expected[[0, 1], [61, 20]][:, None])
    whole = network.on_mesh(mesh)
    for layer, other in zip(sharded.prompt_layers, whole.prompt_layers, strict=True):
        for x, y in zip(jax.tree.leaves(layer), jax.tree.leaves(other), strict=True):
            is_matrix = x.ndim > 1 and model.config.embed_dim in x.shape
            held = [z.addressable_shards[0].data.nbytes for z in (x, y)]
            assert held[0] * (4 if is_matrix else 1) == held[1]


@pytest.mark.full
def test_sinks_alone():
    model = tiny("llama", 4, 4)
    network = model.model(CompressionPlan.uniform(model.config, qk=16, v=32, sinks=20)).network
    tokens = jnp.asarray(model.tokens(1, 50))
    mesh = MeshConfig(sequence=4).create()
    assert_equal(network.on_mesh(mesh).hidden(tokens), np.asarray(network.hidden(tokens)))


def test_longer_than_the_learned_positions_with_padding():
    model = tiny("opt", 4, 4)
    network = model.dense
    tokens = jnp.asarray(model.tokens(1, 253))  # of 256 positions
    mesh = MeshConfig(sequence=4).create()
    assert_equal(network.on_mesh(mesh).hidden(tokens), np.asarray(network.hidden(tokens)))


@pytest.mark.full
def test_late_ulysses_truncates_what_whole_projections_give():
    """Compare a model that keeps all coordinates with one that dropped them in its weights."""
    model = tiny("opt", 4, 4)
    config = model.config
    plan, basis = CompressionPlan.uniform(config, qk=16, v=16), model.basis(center=True)
    layers = []
    for index, layer in enumerate(model.layers):
        ranks = plan.layers[index]
        folded = fold_attention(layer["attention"], config, basis, index, ranks, full_width=True)
        layers.append(jax.tree.map(lambda x: np.asarray(x, np.float32), {**layer, "attention": folded}))
    whole = Transformer(config, plan, model.embeddings, layers)
    tokens = jnp.asarray(model.tokens(2, 61))
    mesh = MeshConfig(sequence=4).create()
    expected = np.asarray(model.model(plan, basis).network.hidden(tokens))
    for attention in ATTENTION.values():
        assert_equal(whole.on_mesh(mesh).hidden(tokens, attention=attention), expected)


def test_refusals():
    network = tiny("llama", 4, 4).dense
    tokens = jnp.zeros((3, 40), jnp.int32)
    refused = {
        "num_heads=4: cannot be divided over model=1 times sequence=8": (MeshConfig(sequence=8), tokens),
        "batch=3: cannot be divided over data=2": (MeshConfig(data=2), tokens),
        "3 tokens: cannot be divided over sequence=4": (MeshConfig(sequence=4), tokens[:, :3]),
    }
    for message, (config, given) in refused.items():
        with pytest.raises(MeshError, match=message):
            network.on_mesh(config.create()).hidden(given)
    with pytest.raises(MeshError, match="embed_dim=64 cannot be divided into 3 equal shares"):
        network.on_mesh(MeshConfig(data=3).create(), weights="gathered")
    with pytest.raises(ValueError, match=r"weights='fsdp': must be one of .*'gathered'"):
        network.on_mesh(MeshConfig().create(), weights="fsdp")
