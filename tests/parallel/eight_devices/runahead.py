"""A prompt in uneven chunks, each on the cache of earlier ones, then decoding: as on one device."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from benchmarks.mesh.rivals.methods import handed_bytes
from benchmarks.mesh.rivals.partition import ChunkCost, Partition
from benchmarks.mesh.rivals.runahead import RunaheadTransformer, link_bandwidth, measure_partitions
from benchmarks.mesh.rivals.runahead_mesh import MeshRunahead, by_head, chunk_layer
from benchmarks.mesh.traffic import cache_bytes, hlo_bytes
from zdc_jax.basis import Basis
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.errors import CacheMemoryError, MeshError
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan, LayerRanks

FULL, HALF, MIXED, NONE = LayerRanks(32, 32), LayerRanks(16, 16), LayerRanks(16, 32), LayerRanks(0, 0)
HEADS = {"MHA": (4, 4), "GQA": (8, 2)}
PLANS = {
    "full": ((FULL, FULL), {}),
    "truncated": ((HALF, HALF), {}),
    "window": ((HALF, NONE), {"window": 9, "sinks": 2}),
    "window of several chunks": ((MIXED, FULL), {"window": 37, "sinks": 20}),
}
CASES = [
    ("llama", "GQA", "truncated", (30, 18, 13)),
    ("llama", "GQA", "window of several chunks", (3, 1, 40, 17)),
    ("opt", "MHA", "window", (24, 37)),
]
ON_MESH = [
    ("llama", "GQA", "window of several chunks", (3, 1, 40, 17)),
    ("opt", "MHA", "window", (37, 24)),
]
LENGTHS, CAPACITY, STEPS = np.array([61, 20]), 96, 2


@cache
def tiny(name: str, heads: str) -> tuple[TinyModel, Basis]:
    num_heads, num_kv_heads = HEADS[heads]
    config = {"llama": LLAMA, "opt": OPT}[name]
    model = TinyModel(
        replace(config, layers=config.layers[:1] * 2, num_heads=num_heads, num_kv_heads=num_kv_heads)
    )
    return model, model.basis()


@jax.jit
def extend(network, held, token, end):
    return network.extend(held, token, end)


def replay(extend, tokens, last, held):
    """Return last hidden states of two prompts and of the tokens decoded after them, [B, 1 + STEPS, D]."""
    states = [np.asarray(last)]
    for step in range(STEPS):
        token = jnp.asarray(tokens[np.arange(2), LENGTHS + step][:, None])
        hidden, held = extend(held, token, jnp.asarray(LENGTHS + step + 1))
        states.append(np.asarray(hidden)[:, 0])
    return np.stack(states, 1)


@cache
def one_device(name, heads, plan):
    """Return a network, tokens of two sequences, and their hidden states."""
    model, basis = tiny(name, heads)
    layers, near = PLANS[plan]
    compression = CompressionPlan(layers, model.config.num_kv_heads, 32, **near)
    empty = KVCache.create(compression.layer_caches("float32"), batch=2, capacity=CAPACITY)
    # On the device where chunks end, so that decoding is compiled once.
    network, empty = jax.device_put((model.model(compression, basis).network, empty), jax.devices()[-1])
    tokens = model.tokens(2, CAPACITY)
    hidden, held = network.extend(empty, jnp.asarray(tokens[:, :61]), jnp.asarray(LENGTHS))
    return network, tokens, replay(partial(extend, network), tokens, hidden[np.arange(2), LENGTHS - 1], held)


@contextmanager
def sent_over_links():
    """Count the bytes that `jax.device_put` moves, by pair of devices."""
    sent, put = Counter(), jax.device_put

    def counted(tree, device):
        for x in jax.tree.leaves(tree):
            sent[x.device, device] += x.nbytes
        return put(tree, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put", counted)
        yield sent


@pytest.mark.parametrize(("name", "heads", "plan", "pieces"), CASES)
def test_as_on_one_device(name, heads, plan, pieces):
    network, tokens, expected = one_device(name, heads, plan)
    devices = jax.devices()[-len(pieces) :]
    model = RunaheadTransformer(network, devices)
    options = {"partition": Partition(pieces), "capacity": CAPACITY}
    with sent_over_links() as sent:
        last, held = model.prefill(tokens[:, :61], jnp.asarray(LENGTHS), **options)
    last_hidden = last.nbytes + LENGTHS.size * 4
    handed = handed_bytes(network.plan, **options, batch=2, itemsize=4)
    assert [sent[pair] for pair in pairwise(devices)] == [count + last_hidden for count in handed[:-1]]
    assert {x.device for x in jax.tree.leaves((last, held))} == {devices[-1]}
    assert held.bytes() == network.plan.bytes(CAPACITY, 2, "float32")
    got = replay(partial(extend, model.networks[-1]), tokens, last, held)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@cache
def on_mesh(name, heads, plan, devices):
    network, *_ = one_device(name, heads, plan)
    return network.on_mesh(MeshConfig(sequence=devices).create())


@pytest.mark.parametrize(("name", "heads", "plan", "pieces"), ON_MESH)
def test_on_a_mesh_as_on_one_device(name, heads, plan, pieces):
    """Pad chunks in one program for all devices; then decode on the cache by head."""
    _, tokens, expected = one_device(name, heads, plan)
    network = on_mesh(name, heads, plan, len(pieces))
    options = {"partition": Partition(pieces), "capacity": CAPACITY}
    last, held = MeshRunahead(network).prefill(jnp.asarray(tokens[:, :61]), jnp.asarray(LENGTHS), **options)
    got = replay(network.extend, tokens, last, held)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_formula_is_what_is_compiled():
    """Compare the device that sends most in each layer, and the exchange that divides the cache by head."""
    name, heads, plan, pieces = ON_MESH[0]
    network, partition, U = on_mesh(name, heads, plan, len(pieces)), Partition(pieces), len(pieces)
    x = jax.ShapeDtypeStruct((2, U * 40, network.config.embed_dim), jnp.float32)
    handed = exchanged = 0
    for block, spec in zip(network.prompt_layers, network.layer_caches, strict=True):
        given = (spec, partition, CAPACITY, network.mesh, None)
        lowered = chunk_layer.lower(block, x, LENGTHS, *given)
        handed += hlo_bytes(lowered.compile().as_text())
        kept = by_head.lower(lowered.out_info[1], partition, CAPACITY, network.mesh)
        exchanged += hlo_bytes(kept.compile().as_text())
    options = {"capacity": CAPACITY, "batch": 2, "itemsize": 4}
    assert handed == max(handed_bytes(network.plan, partition, **options))
    kv_heads, per_head = U, sum(ranks.qk + ranks.v for ranks in network.plan.layers)
    first = 2 * 4 * kv_heads * per_head * 40 * (U - 1) // U
    assert exchanged == first + cache_bytes(network.config, network.plan, degree=U, **options)


def test_measured_and_fitted():
    """Check only that there are times, and that a cost is fitted; their values depend on the machine."""
    network, tokens, _ = one_device("llama", "GQA", "full")
    pair = RunaheadTransformer(network, jax.devices()[:1] * 2)
    partitions = [Partition(pieces) for pieces in ((8, 8), (24, 64), (40, 40), (40, 20))]
    times = measure_partitions(pair, tokens, partitions, repeats=1)
    assert list(times) == partitions
    assert min(ChunkCost.fit(times).seconds(partitions[0])) >= 0
    assert link_bandwidth(*jax.devices()[:2], size=1024, repeats=1) > 0


def test_refuses():
    network, tokens, _ = one_device("llama", "GQA", "full")
    model = RunaheadTransformer(network, jax.devices()[:2])

    def run(partition, capacity):
        return model.prefill(tokens, LENGTHS, partition=partition, capacity=capacity)

    with pytest.raises(MeshError, match=r"tokens=\(60, 30\).* must divide 96 tokens over 2 devices"):
        run(Partition((60, 30)), 96)
    with pytest.raises(MeshError, match=r"tokens=\(60, 30, 6\).* must divide 96 tokens over 2 devices"):
        run(Partition((60, 30, 6)), 96)
    with pytest.raises(MeshError, match="capacity=95 must be >= the 96 tokens"):
        run(Partition((60, 36)), 95)
    with pytest.raises(CacheMemoryError, match="capacity=1000000000000"):
        run(Partition((60, 36)), 10**12)
    with pytest.raises(MeshError, match=r"devices=\[\] must name"):
        RunaheadTransformer(network, [])
    runahead = MeshRunahead(on_mesh("llama", "GQA", "full", 2))
    run = partial(runahead.prefill, tokens[:, :61], LENGTHS)
    with pytest.raises(MeshError, match=r"tokens=\(60, 2\).* must divide 61 tokens over 2 devices"):
        run(partition=Partition((60, 2)), capacity=96)
    with pytest.raises(MeshError, match="capacity=60 must be >= the 61 tokens"):
        run(partition=Partition((60, 1)), capacity=60)
    with pytest.raises(CacheMemoryError, match="capacity=1000000000000"):
        run(partition=Partition((60, 1)), capacity=10**12)
    by_rows = network.on_mesh(MeshConfig(data=2, sequence=2).create())
    with pytest.raises(MeshError, match=r"'data': 2.* must have one device along data and model"):
        MeshRunahead(by_rows)
    gathered = network.on_mesh(MeshConfig(sequence=2).create(), weights="gathered")
    with pytest.raises(NotImplementedError, match="weights='gathered' does not run in chunks"):
        MeshRunahead(gathered)
    model, _ = tiny("llama", "GQA")
    plan = replace(network.plan, method="token_classes", settings=None)
    network = Transformer(model.config, plan, model.embeddings, model.layers)
    with pytest.raises(NotImplementedError, match="method='token_classes': does not run on a mesh"):
        RunaheadTransformer(network, jax.devices())
    with pytest.raises(NotImplementedError, match="method='token_classes': does not run on a mesh"):
        network.on_mesh(MeshConfig(sequence=2).create())
