"""Times of decoding, without the fixed cost of a call, for the tokens of `generate`."""

import jax.numpy as jnp
import pytest
from conftest import LLAMA, TinyModel

from benchmarks.model import models
from benchmarks.model.models import MOST, ROOM, InOneCall, decode_times
from zdc_jax import generate
from zdc_jax.plan import CompressionPlan


class Clocked:
    """A model whose calls take `begin` seconds and `token` more per token, by a clock of its own.

    memory: units of memory for caches, one per sequence; a step needs `scratch` more.
    """

    def __init__(self, begin=0.0, token=0.25, memory=100, scratch=0):
        self.begin, self.token, self.now, self.scratch, self.left = begin, token, 0.0, scratch, memory

    def cache(self, batch, capacity):
        return Rows(self, batch, capacity)

    def filled(self, cache, length):
        cache.held = length
        return cache

    def decode(self, cache, token, count):
        if self.left < self.scratch:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        self.now += self.begin + count * self.token
        cache.held += count
        assert cache.held <= cache.capacity
        return token, cache


class Rows:
    """A cache whose memory is free again once no reference is left."""

    def __init__(self, side, batch, capacity):
        if side.left < batch:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        side.left -= batch
        self.side, self.batch, self.capacity, self.held = side, batch, capacity, 0

    def __del__(self):
        if hasattr(self, "side"):
            self.side.left += self.batch


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(models.jax, "block_until_ready", lambda x: x)


@pytest.mark.parametrize("begin", [0.0, 0.5])
def test_only_tokens_are_timed(monkeypatch, at_once, begin):
    side = Clocked(begin)
    monkeypatch.setattr(models.time, "perf_counter", lambda: side.now)
    assert decode_times(side, 2, 100, 12, repeats=5) == pytest.approx([0.25] * 5)


def test_tokens_that_no_cache_has_room_for_are_refused():
    with pytest.raises(ValueError, match=f"steps=20, repeats=5: 144 tokens must be <= {ROOM}"):
        decode_times(Clocked(), 2, 100, 20, repeats=5)


@pytest.mark.full
def test_tokens_are_those_that_generate_gives():
    model = TinyModel(LLAMA).model(CompressionPlan.full(LLAMA))
    prompt, counts = [3, 1, 4, 1, 5], (1, 8, 11)
    expected = generate(model, prompt, 1 + sum(counts), stop_tokens=()).completions[0].tokens
    decode = InOneCall(model.network, "xla")
    cache = model.network.new_cache(batch=1, capacity=64)
    _, cache = model.network.extend(cache, jnp.asarray([prompt]), jnp.full(1, len(prompt)))
    token, at = jnp.full((1, 1), expected[0], jnp.int32), 0
    for count in counts:
        token, cache = decode(cache, token, count)
        at += count
        assert token.tolist() == [[expected[at]]]
        assert cache.lengths.tolist() == [len(prompt) + at]
    with pytest.raises(ValueError, match=f"count={MOST + 1} must be <= {MOST}"):
        decode(cache, token, MOST + 1)
