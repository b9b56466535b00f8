"""Caches in codes on a mesh: prompts by token, tokens by head, each as on one device; bytes; refusals."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel

from zdc_jax.methods import coded, fp8, int8, kivi, turboquant
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.traffic import cache_bytes, hlo_bytes, prefill_bytes
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.plan import CompressionPlan, LayerRanks

CAPACITY, STEPS = 96, 2
LENGTHS = np.array([61, 20])
HEADS = {"MHA": (8, 8), "GQA": (8, 4), "K < U": (8, 2)}
FULL, MIXED, NONE = LayerRanks(32, 32), LayerRanks(16, 16), LayerRanks(0, 0)
WHOLE = coded.Settings(bits_k=3, bits_v=4, bits_index=6, index=8, read=0, bits_near=8)
PLAIN = coded.Settings(bits_k=4, bits_v=2, index=0, read=0)
CHOOSING = coded.Settings(index=8, read=24)
NEAR = {"sinks": 3, "window": 9}
PLANS = {
    "all of an index and others": ("coded", (FULL, MIXED), (WHOLE, WHOLE), NEAR),
    "no near set": ("coded", (FULL, FULL), (PLAIN, PLAIN), {}),
    "a ring alone, a long window": ("coded", (NONE, FULL), (WHOLE, WHOLE), {"sinks": 20, "window": 37}),
    "chosen": ("coded", (FULL, FULL), (CHOOSING, CHOOSING), NEAR),
    "chosen by another layer": ("coded", (FULL, FULL), (CHOOSING, replace(CHOOSING, index=0)), NEAR),
    "fp8": ("fp8", (FULL, FULL), (fp8.Settings(),) * 2, NEAR),
    "turboquant": ("turboquant", (FULL, FULL), (turboquant.Settings(),) * 2, NEAR),
    "int8": ("int8", (FULL, FULL), (int8.Settings(),) * 2, {}),
}


def plan_of(name: str, num_kv_heads: int) -> CompressionPlan:
    method, ranks, settings, near = PLANS[name]
    layers = tuple(replace(one, settings=own) for one, own in zip(ranks, settings, strict=True))
    return CompressionPlan(layers, num_kv_heads, 32, method=method, settings=settings[0], **near)


@cache
def tiny(heads: str) -> TinyModel:
    N, K = HEADS[heads]
    return TinyModel(replace(LLAMA, layers=LLAMA.layers[:1] * 2, num_heads=N, num_kv_heads=K))


@cache
def network_of(name: str, heads: str) -> Transformer:
    model = tiny(heads)
    return model.model(plan_of(name, model.config.num_kv_heads)).network


def assert_close(got, expected):
    """[rows, tokens, D]. A number at the middle of two levels may go either way: a token's code then differs
    by a step in one coordinate, which all tokens behind it see a little of."""
    off = np.abs(np.asarray(got) - expected).max(-1) / np.abs(expected).max()
    assert np.quantile(off, 0.25) < 2e-6
    assert off.max() < 2e-3


CASES = [
    ("all of an index and others", "K < U", "data=2,sequence=2,model=2"),
    ("no near set", "MHA", "sequence=8"),
    ("a ring alone, a long window", "MHA", "sequence=4"),
    ("chosen by another layer", "GQA", "sequence=4"),
    ("int8", "GQA", "sequence=2,model=2"),
    ("fp8", "GQA", "sequence=2"),
    ("turboquant", "MHA", "sequence=2,model=2"),
]


@pytest.mark.parametrize(("name", "heads", "mesh"), CASES)
def test_as_on_one_device(name, heads, mesh):
    """Prompts of two lengths, tokens behind them; what a cache holds is what one device's does."""
    network, rows = network_of(name, heads), np.arange(2)
    tokens = np.random.default_rng(0).integers(3, 90, (2, LENGTHS.max() + STEPS), dtype=np.int32)
    expected = np.asarray(network.hidden(jnp.asarray(tokens)))
    sharded = ShardedTransformer.of(network, MeshConfig.parse(mesh).create())
    prompts, end = jnp.asarray(tokens[:, : LENGTHS.max()]), jnp.asarray(LENGTHS)
    last, held = sharded.prefill(prompts, end, capacity=CAPACITY)
    got, at = [np.asarray(last)], LENGTHS[:, None] - 1 + np.arange(1 + STEPS)
    extend = jax.jit(lambda network, held, token, end: network.extend(held, token, end))
    for step in range(STEPS):
        token = jnp.asarray(tokens[rows, LENGTHS + step][:, None])
        hidden, held = extend(sharded, held, token, end + step + 1)
        got.append(np.asarray(hidden)[:, 0])
    assert_close(np.stack(got, 1), expected[rows[:, None], at])
    copies = max(1, sharded.mesh.shape["sequence"] * sharded.mesh.shape["model"] // HEADS[heads][1])
    arrays = lambda layers: sum(x.nbytes for x in jax.tree.leaves(layers))
    alone = sum(spec.bytes(CAPACITY, 2) for spec in network.layer_caches)
    assert arrays(held.layers) == copies * alone
    if name == "no near set":
        assert_close(np.asarray(sharded.hidden(prompts))[:, : LENGTHS.max()], expected[:, : LENGTHS.max()])


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("all of an index and others", "native"),
        ("a ring alone, a long window", "native"),
        ("no near set", "coded"),
    ],
)
def test_formula_is_what_is_compiled(name, payload):
    """Of prompts and of the cache that they leave."""
    model, plan = tiny("K < U"), plan_of(name, 2)
    sharded = ShardedTransformer.of(
        network_of(name, "K < U"), MeshConfig(sequence=4).create(), payload=payload
    )
    how = {"degree": 4, "batch": 2, "itemsize": 4, "payload": payload}
    tokens, end = jax.ShapeDtypeStruct((2, 64), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    program = jax.jit(lambda tokens, end: sharded.prefill(tokens, end, capacity=CAPACITY))
    expected = prefill_bytes(model.config, plan, length=64, **how)
    expected += cache_bytes(model.config, plan, capacity=CAPACITY, **how)
    expected += 2 * 2 * model.config.embed_dim * 4 * 3 // 4  # the last token's hidden states
    assert hlo_bytes(program.lower(tokens, end).compile().as_text()) == expected


def test_codes_are_fewer_bytes_than_numbers():
    model, plan = tiny("MHA"), plan_of("all of an index and others", 8)
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
    model, mesh = tiny("MHA"), MeshConfig(sequence=2).create()
    hosted = replace(CHOOSING, memory="host")
    window = LayerRanks(32, 32)
    refused = {
        r"method='h2o' does not run on a mesh: 'zdc' does": ("h2o", None, "native"),
        r"method='kivi' .*: layer 0 codes 32 tokens together": ("kivi", kivi.Settings(), "native"),
        r"method='coded' .*: layer 0 has memory='host'": ("coded", hosted, "native"),
        r"payload='float8' with method='fp8'.* must be 'native' or 'coded'": (
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
            ShardedTransformer.of(network, mesh, payload=payload)
    with pytest.raises(NotImplementedError, match="num_kv_heads=2 is no multiple of the devices"):
        ShardedTransformer.of(network_of("chosen", "K < U"), MeshConfig(sequence=4).create())
