"""Bytes that leave a device: the closed formula against what is in the compiled program."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from conftest import LLAMA

from benchmarks.mesh.rivals.methods import ATTENTION, method_bytes
from benchmarks.mesh.traffic import cache_bytes, hlo_bytes, prefill_bytes
from benchmarks.random_weights import random_params
from zdc_jax.config import ModelConfig
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.payload import PAYLOADS, Payload
from zdc_jax.parallel.weights import gathered_bytes
from zdc_jax.plan import CompressionPlan, LayerRanks

CONFIGS = {
    "MHA": replace(LLAMA, layers=LLAMA.layers[:1] * 2, num_heads=4, num_kv_heads=4),
    "GQA, K < U": replace(LLAMA, layers=LLAMA.layers[:1] * 2, num_heads=8, num_kv_heads=2),
}
NEAR = {
    "no window": ("GQA, K < U", {}),
    "window": ("MHA", {"window": 9, "sinks": 2}),
    "window of several devices": ("GQA, K < U", {"window": 37}),
    "window of all": ("MHA", {"window": 300, "sinks": 70}),
}


def network(config: ModelConfig, plan: CompressionPlan, payload: Payload = "native") -> Transformer:
    """Return a network with whole projections, as for a plan with a window; it is compiled, not run."""
    params = random_params(config, jax.random.key(0))
    if payload == "float8":
        ones = jnp.ones((config.num_kv_heads, config.head_dim), config.dtype)
        for layer in params["layers"]:
            layer["attention"] |= {"q_scale": ones, "k_scale": ones, "v_scale": ones}
    return Transformer(config, plan, params["embeddings"], params["layers"])


@pytest.mark.parametrize("method", ATTENTION)
@pytest.mark.parametrize("near", NEAR)
def test_formula_is_what_is_compiled(near, method):
    heads, options = NEAR[near]
    config = CONFIGS[heads]
    ranks = (LayerRanks(16, 32), LayerRanks(0, 0) if options else LayerRanks(32, 32))
    plan = CompressionPlan(ranks, config.num_kv_heads, config.head_dim, **options)
    mesh = MeshConfig(data=2, sequence=4).create()
    tokens = jax.ShapeDtypeStruct((6, 61), jnp.int32)
    model = network(config, plan).on_mesh(mesh)
    program = jax.jit(lambda tokens: model.hidden(tokens, attention=ATTENTION[method]))
    text = program.lower(tokens).compile().as_text()
    expected = method_bytes(config, plan, length=61, degree=4, method=method, batch=3, itemsize=4)
    assert hlo_bytes(text) == expected


@pytest.mark.parametrize("method", ["zdc", "window"])
@pytest.mark.parametrize("near", ["window", "window of several devices"])
def test_cache_adds_its_trailing_coordinates(near, method):
    heads, options = NEAR[near]
    config = CONFIGS[heads]
    plan = CompressionPlan.of_layers(config, [LayerRanks(16, 32)] * 2, method=method, **options)
    model = network(config, plan).on_mesh(MeshConfig(sequence=4).create())
    program = jax.jit(lambda tokens, end: model.prefill(tokens, end, capacity=128))
    prompts = jax.ShapeDtypeStruct((2, 61), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    options = {"degree": 4, "batch": 2, "itemsize": 4}
    expected = prefill_bytes(config, plan, length=61, **options)
    expected += cache_bytes(config, plan, capacity=128, **options)
    expected += 2 * 2 * config.embed_dim * 4 * 3 // 4  # the last token's hidden states
    assert hlo_bytes(program.lower(*prompts).compile().as_text()) == expected


def test_gathered_weights_add_their_matrices():
    """Count 2-byte matrices of attention (q, k, v, o) and three of the feed-forward part; 7/8 arrive."""
    config = replace(CONFIGS["MHA"], dtype="bfloat16")
    plan, mesh = CompressionPlan.full(config), MeshConfig(data=2, sequence=4).create()
    model = network(config, plan).on_mesh(mesh, weights="gathered")
    program = jax.jit(lambda tokens: model.hidden(tokens))
    text = program.lower(jax.ShapeDtypeStruct((2, 64), jnp.int32)).compile().as_text()
    D, F, NH = config.embed_dim, config.ffn_dim, config.num_heads * config.head_dim
    gathered = 2 * 2 * (4 * D * NH + 3 * D * F) * 7 // 8
    assert sum(gathered_bytes(block, mesh) for block in model.prompt_layers) == gathered
    assert hlo_bytes(text) == prefill_bytes(config, plan, length=64, degree=4) + gathered


@pytest.mark.parametrize("payload", PAYLOADS)
def test_elements_are_not_widened_on_the_way(payload):
    """Check that far coordinates need two bytes or mostly one, those of the halo two, log-sum-exps four."""
    config = replace(CONFIGS["MHA"], dtype="bfloat16")
    plan = CompressionPlan.uniform(config, qk=16, v=16, window=9)
    mesh = MeshConfig(sequence=4).create()
    whole = network(config, plan, payload)
    model = whole.on_mesh(mesh, payload=payload)
    program = jax.jit(lambda tokens: model.hidden(tokens))
    text = program.lower(jax.ShapeDtypeStruct((1, 64), jnp.int32)).compile().as_text()
    assert hlo_bytes(text) == prefill_bytes(config, plan, length=64, degree=4, payload=payload)
