"""Caches in codes on a mesh: prompts by token, tokens by head, each as on one device; bytes; refusals."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from decoding_steps import decoded

from benchmarks.mesh.traffic import cache_bytes, hlo_bytes, prefill_bytes
from zdc_jax.methods import coded, fp8, int8, kivi, turboquant
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan, LayerRanks

CAPACITY, STEPS = 96, 2
LENGTHS = np.array([61, 20])
HEADS = {"MHA": (8, 8), "GQA": (8, 4), "K < U": (8, 2)}
FULL, MIXED, NONE = LayerRanks(32, 32), LayerRanks(16, 16), LayerRanks(0, 0)
WHOLE = coded.Settings(bits_k=3, bits_v=4, bits_index=6, index=8, read=0, bits_near=8)
PLAIN = coded.Settings(bits_k=4, bits_v=2, index=0, read=0)
CHOOSING = coded.Settings(bits_k=4, bits_v=4, bits_index=4, index=8, read=24)
NEAR, LONG = {"sinks": 3, "window": 9}, {"sinks": 20, "window": 37}
PLANS = {
    "all of an index and others": ("coded", (FULL, MIXED), (WHOLE, WHOLE), NEAR),
    "no near set": ("coded", (FULL,), (PLAIN,), {}),
    "a ring alone, a long window": ("coded", (NONE,), (WHOLE,), LONG),
    "chosen": ("coded", (FULL,), (CHOOSING,), NEAR),
    "chosen by another layer": ("coded", (FULL, FULL), (CHOOSING, replace(CHOOSING, index=0)), NEAR),
    "fp8": ("fp8", (FULL,), (fp8.Settings(),), NEAR),
    "turboquant": ("turboquant", (FULL,), (turboquant.Settings(),), LONG),
    "int8": ("int8", (FULL,), (int8.Settings(),), {}),
    "shifted, all of an index": ("coded", (replace(FULL, shift=True),), (WHOLE,), NEAR),
    "shifted, chosen": ("coded", (replace(FULL, shift=True),), (CHOOSING,), NEAR),
    "shifted, int8": ("int8", (replace(FULL, shift=True),), (int8.Settings(),), {}),
}


def plan_of(name: str, num_kv_heads: int) -> CompressionPlan:
    method, ranks, settings, near = PLANS[name]
    layers = tuple(replace(one, settings=own) for one, own in zip(ranks, settings, strict=True))
    return CompressionPlan(layers, num_kv_heads, 32, method=method, settings=settings[0], **near)


@cache
def tiny(heads: str, depth: int) -> TinyModel:
    N, K = HEADS[heads]
    return TinyModel(replace(LLAMA, layers=LLAMA.layers[:1] * depth, num_heads=N, num_kv_heads=K))


@cache
def network_of(name: str, heads: str) -> Transformer:
    """Return a network with as many layers as the plan: two only where they differ, for each is compiled."""
    plan = plan_of(name, HEADS[heads][1])
    return tiny(heads, len(plan.layers)).model(plan).network


def assert_close(got, expected):
    """Assert that hidden states [rows, tokens, D] are close.

    A value at the middle of two levels may be rounded either way. A token's code then differs by a step in
    one coordinate, and all later tokens see a little of it.
    """
    off = np.abs(np.asarray(got) - expected).max(-1) / np.abs(expected).max()
    assert np.quantile(off, 0.25) < 2e-6
    assert off.max() < 2e-3


def sent_bytes(name: str, heads: str, mesh: MeshConfig, payload: str = "native") -> int:
    """Return the bytes by the formulas: of prompts, their cache, and the last hidden states."""
    config, plan = network_of(name, heads).config, plan_of(name, HEADS[heads][1])
    batch, degree = 2 // mesh.data, mesh.sequence
    how = {"degree": degree, "batch": batch, "itemsize": 4, "payload": payload}
    last = batch * 2 * config.embed_dim * 4 * (degree - 1) // degree
    length = int(LENGTHS.max())
    return (
        prefill_bytes(config, plan, length=length, **how)
        + cache_bytes(config, plan, capacity=CAPACITY, **how)
        + last
    )


CASES = [
    ("all of an index and others", "K < U", "data=2,sequence=4"),
    ("no near set", "MHA", "sequence=8"),
    ("a ring alone, a long window", "K < U", "sequence=4"),
    ("chosen by another layer", "GQA", "sequence=2,model=2"),
    ("int8", "K < U", "data=2,sequence=2,model=2"),
    ("fp8", "GQA", "sequence=2"),
    ("turboquant", "MHA", "sequence=2,model=2"),
    ("shifted, all of an index", "GQA", "sequence=4"),
    ("shifted, chosen", "GQA", "sequence=2"),
    ("shifted, int8", "K < U", "data=2,sequence=2,model=2"),
]


@pytest.mark.parametrize(("name", "heads", "mesh"), CASES)
@pytest.mark.matrix(
    "int8-K < U-data=2,sequence=2,model=2",
    "a ring alone, a long window-K < U-sequence=4",
    "fp8-GQA-sequence=2",
    "shifted, all of an index-GQA-sequence=4",
)
def test_as_on_one_device(name, heads, mesh):
    """Compare prompts of two lengths, the tokens after them, and the cache with those of one device.

    Where a mesh divides tokens alone, the compiled program sends the bytes of the formulas."""
    network, rows, steps = network_of(name, heads), np.arange(2)[:, None], np.arange(STEPS)
    mesh = MeshConfig.parse(mesh)
    tokens = np.random.default_rng(0).integers(3, 90, (2, LENGTHS.max() + STEPS), dtype=np.int32)
    expected = np.asarray(network.hidden(jnp.asarray(tokens)))
    sharded = network.on_mesh(mesh.create())
    prompts, end = jnp.asarray(tokens[:, : LENGTHS.max()]), jnp.asarray(LENGTHS)
    program = compiled_prefill(sharded, prompts, end)
    last, held = program(prompts, end)
    ahead = LENGTHS[:, None] + steps
    held, got = decoded(sharded, held, jnp.asarray(tokens[rows, ahead].T), jnp.asarray(ahead.T + 1))
    at = LENGTHS[:, None] - 1 + np.arange(1 + STEPS)
    assert_close(np.stack([last, *got], 1), expected[rows, at])
    copies = max(1, mesh.sequence * mesh.model // HEADS[heads][1])

    def arrays(layers):
        return sum(x.nbytes for x in jax.tree.leaves(layers))

    alone = sum(spec.bytes(CAPACITY, 2) for spec in network.layer_caches)
    assert arrays(held.layers) == copies * alone
    if mesh.model == 1:
        assert hlo_bytes(program.as_text()) == sent_bytes(name, heads, mesh)
    if name == "no near set":
        assert_close(np.asarray(sharded.hidden(prompts))[:, : LENGTHS.max()], expected[:, : LENGTHS.max()])


def compiled_prefill(sharded: Transformer, prompts, end):
    program = jax.jit(lambda prompts, end: sharded.prefill(prompts, end, capacity=CAPACITY))
    return program.lower(prompts, end).compile()


@pytest.mark.parametrize("name", ["chosen by another layer", "all of an index and others"])
@pytest.mark.full
def test_layers_compiled_ahead_are_not_compiled_again(name, caplog):
    """Check layers that read the tokens chosen by another layer."""
    sharded = network_of(name, "GQA").on_mesh(MeshConfig(sequence=2).create())
    prompts, end = jnp.zeros((2, 48), jnp.int32), jnp.full(2, 48)
    sharded.compile_prefill(prompts, end, capacity=CAPACITY)

    def layers():
        return [r for r in caplog.records if r.getMessage().startswith("Compiling jit(prompt_layer)")]

    with jax.log_compiles():
        sharded.prefill(prompts, end, capacity=CAPACITY)
        assert not layers()
        sharded.prefill(prompts, end, capacity=CAPACITY + 8)
        assert len(layers()) == len(set(sharded.layer_caches))


@pytest.mark.full
def test_formula_of_a_coded_payload_is_what_is_compiled():
    name, heads, mesh = "no near set", "K < U", MeshConfig(sequence=4)
    sharded = network_of(name, heads).on_mesh(mesh.create(), payload="coded")
    prompts = jax.ShapeDtypeStruct((2, LENGTHS.max()), jnp.int32)
    program = compiled_prefill(sharded, prompts, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert hlo_bytes(program.as_text()) == sent_bytes(name, heads, mesh, "coded")


def test_codes_are_fewer_bytes_than_numbers():
    model, plan = tiny("MHA", 2), plan_of("all of an index and others", 8)
    how = {"length": 4096, "degree": 4, "itemsize": 2}
    t, (N, K) = 1024, HEADS["MHA"]
    halo = 9 * 2 * K * 32 * 2 + 2 * 3 * 3 * 2 * K * 32 * 2 // 4
    keys = [
        8 * 6 // 8 + 1 + 24 * 3 // 8 + 1 + 32 * 4 // 8 + 1,
        8 * 6 // 8 + 1 + 8 * 3 // 8 + 1 + 16 * 4 // 8 + 1,
    ]
    queries = [(32 + 32) * 2 + 4, (16 + 16) * 2 + 4]
    expected = sum(t * 3 * (N * q + K * k) // 4 + halo for q, k in zip(queries, keys, strict=True))
    assert prefill_bytes(model.config, plan, **how) == expected


def test_refusals():
    model, mesh = tiny("MHA", 2), MeshConfig(sequence=2).create()
    hosted = replace(CHOOSING, memory="host")
    window = LayerRanks(32, 32)
    refused = {
        r"method='h2o': does not run on a mesh; use 'zdc'": ("h2o", None, "native"),
        r"method='kivi': .*layer 0 quantizes 32 tokens together": ("kivi", kivi.Settings(), "native"),
        r"method='coded': .*layer 0 has memory='host'": ("coded", hosted, "native"),
        r"payload='float8': not supported with method='fp8'.* use 'native' or 'coded'": (
            "fp8",
            fp8.Settings(),
            "float8",
        ),
    }
    for message, (method, settings, payload) in refused.items():
        given = {} if settings is None else {"settings": settings}
        plan = CompressionPlan((window,) * 2, 8, 32, method=method, sinks=4, window=64, **given)
        network = model.model(plan).network
        with pytest.raises(NotImplementedError, match=message):
            network.on_mesh(mesh, payload=payload)
    with pytest.raises(NotImplementedError, match="num_kv_heads=2 must be a multiple of the devices"):
        network_of("chosen", "K < U").on_mesh(MeshConfig(sequence=4).create())
