"""A prompt in padded pieces by one program for all devices, then decoding: as on one device."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from zdc_jax.errors import CacheMemoryError, MeshError
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.partition import Partition
from zdc_jax.parallel.runahead_mesh import MeshRunahead, by_head, piece_layer
from zdc_jax.parallel.traffic import cache_bytes, handed_bytes, hlo_bytes
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.plan import CompressionPlan, LayerRanks

FULL, HALF, MIXED, NONE = LayerRanks(32, 32), LayerRanks(16, 16), LayerRanks(16, 32), LayerRanks(0, 0)
CASES = {
    "even": (LLAMA, (FULL, HALF), {}, (16, 15, 15, 15)),
    "window, learned positions": (OPT, (HALF, NONE), {"window": 9, "sinks": 2}, (24, 37)),
    "window of several pieces": (LLAMA, (MIXED, FULL), {"window": 37, "sinks": 20}, (3, 1, 40, 17)),
}
LENGTHS, CAPACITY = np.array([61, 20]), 64


@cache
def case(name):
    """A network on one device, the same on a mesh, a partition."""
    config, layers, near, pieces = CASES[name]
    model = TinyModel(replace(config, num_layers=2, num_heads=8, num_kv_heads=2))
    plan = CompressionPlan(layers, 2, 32, **near)
    network = model.model(plan, model.basis()).network
    mesh = MeshConfig(sequence=len(pieces)).create()
    return network, ShardedTransformer.of(network, mesh), Partition(pieces)


@pytest.mark.parametrize("name", CASES)
def test_as_on_one_device(name):
    """The last token of each prompt, and one that is decoded after it on the cache by head."""
    network, sharded, partition = case(name)
    tokens = np.random.default_rng(0).integers(3, 90, (2, 62), dtype=np.int32)
    prompts, end = jnp.asarray(tokens[:, :61]), jnp.asarray(LENGTHS)
    runahead = MeshRunahead(sharded)
    last, held = runahead.prefill(prompts, end, partition=partition, capacity=CAPACITY)
    token = jnp.asarray(tokens[np.arange(2), LENGTHS][:, None])
    hidden, _ = sharded.extend(held, token, end + 1)
    whole = np.asarray(network.hidden(jnp.asarray(tokens)))
    for got, place in ((last, LENGTHS - 1), (hidden[:, 0], LENGTHS)):
        expected = whole[np.arange(2), place]
        assert np.abs(np.asarray(got) - expected).max() <= 1e-5 * np.abs(whole).max()
    by_exchange = jax.eval_shape(partial(sharded.prefill, capacity=CAPACITY), prompts, end)[1]
    shapes = lambda cache: [x.shape for x in jax.tree.leaves(cache) if x.size]
    assert shapes(held) == shapes(by_exchange)


@pytest.mark.parametrize("name", ["even", "window of several pieces"])
def test_formula_is_what_is_compiled(name):
    """The device that hands on most, in each layer; and the exchange that leaves the cache by head."""
    network, sharded, partition = case(name)
    plan, config, mesh = network.plan, network.config, sharded.mesh
    U, t, K = mesh.size, partition.longest, max(mesh.size, 2)
    x = jax.ShapeDtypeStruct((2, U * t, config.embed_dim), jnp.float32)
    handed = exchanged = 0
    for block, ranks in zip(sharded.prompt_layers, plan.layers, strict=True):
        given = (plan, ranks, partition, CAPACITY, mesh, None)
        lowered = piece_layer.lower(block, x, jnp.asarray(LENGTHS), *given)
        handed += hlo_bytes(lowered.compile().as_text())
        kept = lowered.out_info[1]
        exchanged += hlo_bytes(by_head.lower(kept, partition, CAPACITY, mesh).compile().as_text())
    options = {"capacity": CAPACITY, "batch": 2, "itemsize": 4}
    assert handed == max(handed_bytes(plan, partition, **options))
    first = sum(ranks.qk + ranks.v for ranks in plan.layers) * 2 * 4 * K * t * (U - 1) // U
    assert exchanged == first + cache_bytes(config, plan, degree=U, **options)


def test_refuses():
    network, sharded, partition = case("window, learned positions")
    tokens, end = jnp.zeros((2, 61), jnp.int32), jnp.asarray(LENGTHS)
    run = partial(MeshRunahead(sharded).prefill, tokens, end)
    with pytest.raises(MeshError, match=r"tokens=\(60, 2\).* must divide 61 tokens over 2 devices"):
        run(partition=Partition((60, 2)), capacity=CAPACITY)
    with pytest.raises(MeshError, match="capacity=60 must be >= the 61 tokens"):
        run(partition=partition, capacity=60)
    with pytest.raises(CacheMemoryError, match="capacity=1000000000000"):
        run(partition=partition, capacity=10**12)
    for sizes, options, error, message in (
        ({"data": 2, "sequence": 2}, {}, MeshError, "'data': 2.* must have one device along data"),
        ({"sequence": 2}, {"weights": "gathered"}, NotImplementedError, "weights='gathered' does not run"),
    ):
        other = ShardedTransformer.of(network, MeshConfig(**sizes).create(), **options)
        with pytest.raises(error, match=message):
            MeshRunahead(other)
