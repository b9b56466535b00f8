"""The program for GPUs, lowered without one: kernels inside `shard_map`, and what waits for an exchange."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from conftest import LLAMA
from jax.sharding import PartitionSpec as P

import zdc_jax.ops.attention as ops
from benchmarks.mesh.rivals.methods import ATTENTION
from benchmarks.mesh.rivals.partition import Partition
from benchmarks.mesh.rivals.runahead import _attended, with_slots
from benchmarks.mesh.rivals.runahead_mesh import chunk_layer
from benchmarks.random_weights import random_params
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.parallel.attention import sharded_attention
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.payload import Formats
from zdc_jax.plan import CompressionPlan

CONFIG = replace(LLAMA, layers=LLAMA.layers[:1] * 1, num_kv_heads=4, dtype="bfloat16")
PLANS = {
    "full": CompressionPlan.full(CONFIG),
    "window": CompressionPlan.uniform(CONFIG, qk=16, v=16, window=64),
    "window and sinks": CompressionPlan.uniform(CONFIG, qk=16, v=16, window=64, sinks=4),
}


def network(plan):
    params = random_params(CONFIG, jax.random.key(0))
    return Transformer(CONFIG, plan, params["embeddings"], params["layers"])


@pytest.mark.parametrize("plan", PLANS)
def test_prompts_and_a_decoded_token_lower_on_kernels(monkeypatch, plan):
    """Lower one program inside `shard_map` by each method; it lowers kernels of the same shapes once."""
    monkeypatch.setattr(ops, "device_refusal", lambda x: None)
    model = network(PLANS[plan]).on_mesh(MeshConfig(sequence=4).create())
    prompt, end = (jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((1, 500), (1,)))
    hidden = {
        method: partial(model.hidden, attention=attention, implementation="pallas")
        for method, attention in ATTENTION.items()
    }
    if "sinks" in plan:
        with pytest.raises(NotImplementedError, match="number of sinks"):
            jax.eval_shape(hidden.pop("ring"), prompt)
    for of_method in hidden.values():
        assert "zdc_prefill" in str(jax.make_jaxpr(of_method)(prompt))

    def two_steps(tokens, end):
        last, cache = model.prefill(tokens, end, capacity=512, implementation="pallas")
        return last, model.extend(cache, tokens[:, :1], end + 1, "pallas")

    def whole(tokens, end):
        return two_steps(tokens, end), [of_method(tokens) for of_method in hidden.values()]

    traced = str(jax.make_jaxpr(two_steps)(prompt, end))
    text = jax.jit(whole).trace(prompt, end).lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("zdc_prefill", "zdc_decode"):
        assert kernel in traced
        assert kernel in text


def test_float8_payload_lowers_beside_the_kernels(monkeypatch):
    formats = Formats.float8(*(jnp.ones((4, 16), jnp.bfloat16),) * 3)
    spec = PrefixRing(num_kv_heads=4, head_dim=32, dtype="bfloat16", R=16, Z=16, sinks=4, window=64)
    # For each of 128 tokens q, k, v of one head go, 18 bytes each; o and its float32 log-sum-exp come back.
    assert exchanged(monkeypatch, spec, formats) == [128 * 3 * 18, 128 * (18 + 4)]


def test_coded_payload_lowers_beside_the_kernels(monkeypatch):
    """Count 8 coordinates of q, k in 6 bits, 24 in 4, v and o in 4, a byte per block, two per log-sum-exp."""
    spec = PrefixRing(num_kv_heads=4, head_dim=32, dtype="bfloat16", R=32, Z=32)
    sent = [128 * (2 * (6 + 1 + 12 + 1) + 17), 128 * (17 + 2)]
    assert exchanged(monkeypatch, spec, Formats.coded(32, 32)) == sent


def exchanged(monkeypatch, spec, formats):
    """Return the bytes of all-to-alls of attention on kernels: 4 heads and 512 tokens on 4 devices."""
    monkeypatch.setattr(ops, "device_refusal", lambda x: None)
    options = {"scale": 1.0, "spec": spec, "implementation": "pallas"}

    def attend(*qkv):
        return sharded_attention(*qkv, **options, formats=formats)[0]

    specs, mesh = P(None, "sequence"), MeshConfig(sequence=4).create()
    program = jax.jit(
        jax.shard_map(attend, mesh=mesh, in_specs=(specs,) * 3, out_specs=specs, check_vma=False)
    )
    arrays = [jax.ShapeDtypeStruct((1, 512, 4, spec.head_dim), jnp.bfloat16)] * 3
    text = program.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "zdc_prefill" in text
    return [2 * int(words) for words in re.findall(r"stablehlo.all_to_all.*-> tensor<4x(\d+)xui16>", text)]


@pytest.mark.parametrize("plan", PLANS)
def test_piece_on_a_cache_that_was_handed_on_lowers_on_kernels(monkeypatch, plan):
    """Lower 250 tokens after 252, whose cache came with room for 256."""
    monkeypatch.setattr(ops, "device_refusal", lambda x: None)
    block, [spec] = network(PLANS[plan]).layers[0], PLANS[plan].layer_caches("bfloat16")

    def array(*dims):
        return jax.ShapeDtypeStruct((1, *dims), jnp.bfloat16)

    K, H = CONFIG.num_kv_heads, CONFIG.head_dim
    held = jax.eval_shape(lambda: with_slots(spec.create(1, 512), 256))
    qkv = array(250, CONFIG.num_heads, H), NewKeys(array(250, K, H)), array(250, K, H)

    def integers(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    traced = _attended.trace(
        block, spec, array(250, CONFIG.embed_dim), qkv, held, integers(1, 250), integers(1), 512, "pallas"
    )
    assert "zdc_prefill" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_padded_pieces_lower_on_kernels(monkeypatch):
    """Count two hops, of the caches of 252 and 452 tokens: each sends four arrays to the next device."""
    monkeypatch.setattr(ops, "device_refusal", lambda x: None)
    plan, mesh = PLANS["window and sinks"], MeshConfig(sequence=3).create()
    x = jax.ShapeDtypeStruct((1, 3 * 252, CONFIG.embed_dim), jnp.bfloat16)
    [spec] = plan.layer_caches("bfloat16")
    given = (spec, Partition((252, 200, 48)), 512, mesh, "pallas")
    traced = chunk_layer.trace(network(plan).layers[0], x, jax.ShapeDtypeStruct((1,), jnp.int32), *given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "zdc_prefill" in text
    hops = [line for line in text.splitlines() if "stablehlo.collective_permute" in line]
    assert [sum(f"dense<[[{pair}]]>" in line for line in hops) for pair in ("0, 1", "1, 2")] == [4, 4]
    assert sum("tensor<1x4x256x16xui16>" in line for line in hops) == 2
    assert sum("tensor<1x4x456x16xui16>" in line for line in hops) == 2


@pytest.mark.parametrize("method", ["ulysses", "all_gather"])
def test_near_attention_waits_for_no_exchange(method):
    """Check that two products of attention, near scores and values, do not depend on the exchange."""
    spec = PrefixRing(num_kv_heads=4, head_dim=32, dtype="float32", R=16, Z=16, sinks=2, window=9)
    tokens = P(None, "sequence")
    attend = jax.shard_map(
        lambda *qkv: ATTENTION[method](*qkv, scale=1.0, spec=spec)[0],
        mesh=MeshConfig(sequence=4).create(),
        in_specs=(tokens,) * 3,
        out_specs=tokens,
        check_vma=False,
    )
    [body] = jax.make_jaxpr(attend)(*[jnp.zeros((1, 64, 4, 32))] * 3).eqns
    exchanged, products = set(), {True: 0, False: 0}
    for step in body.params["jaxpr"].eqns:
        waits = any(id(x) in exchanged for x in step.invars) or step.primitive.name.startswith("all_")
        exchanged |= {id(x) for x in step.outvars} if waits else set()
        products[waits] += str(step).count("dot_general[")
    assert products == {True: 2, False: 2}
