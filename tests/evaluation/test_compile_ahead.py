"""Layers compiled in parallel: no second compilation, and the same results."""

import threading
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import TinyModel

from zdc_jax import CompressionPlan
from zdc_jax.evaluation import compile_ahead as module
from zdc_jax.evaluation.answers import read_contexts
from zdc_jax.evaluation.compile_ahead import compile_ahead
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.model import run_layer
from zdc_jax.plan import LayerRanks


def read(network, windows):
    nll = window_nll(network, windows)
    return nll, np.asarray(read_contexts(network, windows, room=4, protocol="cached")[0])


def compiled() -> int:
    return run_layer.run_whole_layer._cache_size() + run_layer.extend_layer_alone._cache_size()


@pytest.fixture
def by_layer(tiny_llama: TinyModel):
    """Return a network in which every layer is of another kind."""
    H = tiny_llama.config.head_dim
    kinds = (H, H), (16, H), (H, 16), (16, 16)
    ranks = [LayerRanks(*pair) for pair in kinds[: tiny_llama.config.num_layers]]
    plan = CompressionPlan.of_layers(tiny_llama.config, ranks, window=8, sinks=2)
    return tiny_llama.model(plan).network


@pytest.mark.full
def test_reading_compiles_no_layer_afterwards(tiny_llama, by_layer):
    windows, kinds = tiny_llama.tokens(2, 40), set(by_layer.layer_caches)
    assert len(kinds) == tiny_llama.config.num_layers > 1
    jax.clear_caches()
    known = compile_ahead(by_layer, lambda single: read(single, windows[:1]))
    assert known == kinds
    before = compiled()
    assert before == 2 * len(kinds)
    nll, _ = read(by_layer, windows[:1])
    assert compiled() == before
    np.testing.assert_array_equal(nll, window_nll(by_layer, windows[:1]))


def test_what_is_known_is_passed_over(tiny_llama, by_layer):
    kinds = set(by_layer.layer_caches)
    seen = []
    assert compile_ahead(by_layer, seen.append, kinds) == kinds
    assert not seen
    one = by_layer.layer_caches[0]
    compile_ahead(by_layer, seen.append, {one})
    assert {network.layer_caches for network in seen} == {(spec,) for spec in kinds - {one}}


def test_layers_that_follow_others_are_left_out(tiny_llama):
    config = tiny_llama.config
    plan = replace(CompressionPlan.full(config), method="token_classes", settings=None)
    seen = []
    compile_ahead(tiny_llama.model(plan).network, seen.append)
    assert not seen


def test_short_memory_takes_fewer_at_a_time(by_layer, monkeypatch):
    # Memory suffices for one reading, but not for two.
    monkeypatch.setattr(module.os, "cpu_count", lambda: 4)
    room, read = threading.Semaphore(1), []

    def reading(network):
        if not room.acquire(blocking=False):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")
        time.sleep(0.1)  # The other threads arrive meanwhile.
        room.release()
        read.append(network.layer_caches)

    compile_ahead(by_layer, reading)
    assert sorted(map(str, read)) == sorted(str((spec,)) for spec in by_layer.layer_caches)


@pytest.mark.parametrize("first", [True, False])
def test_no_room_at_all(by_layer, first):
    tried = []

    def failing(network):
        tried.append(network.layer_caches)
        if first or len(tried) > 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    assert compile_ahead(by_layer, failing) == set(by_layer.layer_caches)
    assert (len(tried) == 1) == first


def test_other_errors_are_raised(by_layer):
    def failing(_):
        raise jax.errors.JaxRuntimeError("INTERNAL")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_ahead(by_layer, failing)
