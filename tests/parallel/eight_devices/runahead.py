"""A prompt in uneven pieces, each on the cache of those before, then decoding: as on one device."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from zdc_jax.basis import Basis
from zdc_jax.cache import KVCache
from zdc_jax.errors import CacheMemoryError, MeshError
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel.partition import Partition
from zdc_jax.parallel.partition_search import PieceCost, link_bandwidth, measured
from zdc_jax.parallel.runahead import RunaheadTransformer
from zdc_jax.parallel.traffic import handed_bytes
from zdc_jax.plan import CompressionPlan, LayerRanks, TokenClasses

FULL, HALF, MIXED, NONE = LayerRanks(32, 32), LayerRanks(16, 16), LayerRanks(16, 32), LayerRanks(0, 0)
HEADS = {"MHA": (4, 4), "GQA": (8, 2)}
PLANS = {
    "full": ((FULL, FULL), {}),
    "truncated": ((HALF, HALF), {}),
    "window": ((HALF, NONE), {"window": 9, "sinks": 2}),
    "window of several pieces": ((MIXED, FULL), {"window": 37, "sinks": 20}),
}
CASES = [
    ("llama", "GQA", "full", (1, 60)),
    ("llama", "GQA", "truncated", (30, 18, 13)),
    ("llama", "GQA", "window", (24, 37)),
    ("llama", "GQA", "window of several pieces", (3, 1, 40, 17)),
    ("opt", "MHA", "window", (24, 37)),
]
LENGTHS, CAPACITY, STEPS = np.array([61, 20]), 96, 2


@cache
def tiny(name: str, heads: str) -> tuple[TinyModel, Basis]:
    num_heads, num_kv_heads = HEADS[heads]
    config = {"llama": LLAMA, "opt": OPT}[name]
    model = TinyModel(replace(config, num_layers=2, num_heads=num_heads, num_kv_heads=num_kv_heads))
    return model, model.basis()


@jax.jit
def extend(network, held, token, end):
    return network.extend(held, token, end)


def replay(network, tokens, last, held):
    """Last hidden states of two prompts and of the tokens decoded after them [B, 1 + STEPS, D]."""
    states = [np.asarray(last)]
    for step in range(STEPS):
        token = tokens[np.arange(2), LENGTHS + step][:, None]
        hidden, held = extend(network, held, token, LENGTHS + step + 1)
        states.append(np.asarray(hidden)[:, 0])
    return np.stack(states, 1)


@cache
def one_device(name, heads, plan):
    """A network, tokens of two rows, and their hidden states."""
    model, basis = tiny(name, heads)
    layers, near = PLANS[plan]
    compression = CompressionPlan(layers, model.config.num_kv_heads, 32, **near)
    empty = KVCache.create(compression, batch=2, capacity=CAPACITY, dtype=jnp.float32)
    # On the device where pieces end, so that decoding is compiled once.
    network, empty = jax.device_put((model.model(compression, basis).network, empty), jax.devices()[-1])
    tokens = model.tokens(2, CAPACITY)
    hidden, held = network.extend(empty, jnp.asarray(tokens[:, :61]), jnp.asarray(LENGTHS))
    return network, tokens, replay(network, tokens, hidden[np.arange(2), LENGTHS - 1], held)


@contextmanager
def sent_over_links():
    """Bytes by pair of devices that `jax.device_put` moves."""
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
        last, held = model.prefill(tokens[:, :61], LENGTHS, **options)
    last_hidden = last.nbytes + LENGTHS.size * 4
    handed = handed_bytes(network.plan, **options, batch=2, itemsize=4)
    assert [sent[pair] for pair in pairwise(devices)] == [count + last_hidden for count in handed[:-1]]
    assert {x.device for x in jax.tree.leaves((last, held))} == {devices[-1]}
    assert held.bytes() == network.plan.bytes(CAPACITY, 2, 4)
    got = replay(model.networks[-1], tokens, last, held)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_measured_and_fitted():
    """Times are those of this machine: only that there are some, and that a cost comes out of them."""
    network, tokens, _ = one_device("llama", "GQA", "full")
    pair = RunaheadTransformer(network, jax.devices()[:1] * 2)
    partitions = [Partition(pieces) for pieces in ((8, 8), (24, 64), (40, 40), (40, 20))]
    times = measured(pair, tokens, partitions, repeats=1)
    assert list(times) == partitions
    assert min(PieceCost.fit(times).seconds(partitions[0])) >= 0
    assert link_bandwidth(*jax.devices()[:2], size=1024, repeats=1) > 0


def test_refuses():
    network, tokens, _ = one_device("llama", "GQA", "full")
    model = RunaheadTransformer(network, jax.devices()[:2])
    run = lambda partition, capacity: model.prefill(tokens, LENGTHS, partition=partition, capacity=capacity)
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
    classes = TokenClasses((0,), (0.5,), network.plan.layers)
    model, _ = tiny("llama", "GQA")
    network = Transformer(
        model.config, replace(network.plan, classes=classes), model.embeddings, model.layers
    )
    with pytest.raises(NotImplementedError, match="token classes"):
        RunaheadTransformer(network, jax.devices())
