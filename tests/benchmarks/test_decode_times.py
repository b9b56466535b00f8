"""Times of decoding: what a call costs besides its tokens is in none, and tokens are those of `generate`."""

import jax.numpy as jnp
import pytest
from conftest import LLAMA, TinyModel

from benchmarks import bench_generate
from benchmarks.bench_generate import decode_times
from benchmarks.streamed import Streamed
from zdc_jax import generate
from zdc_jax.generation.api import STREAM_STEPS
from zdc_jax.plan import CompressionPlan


class Clocked:
    """A side whose tokens take `token` seconds each by a clock of its own, and each run `begin` more."""

    def __init__(self, begin, token):
        self.begin, self.token, self.now, self.held = begin, token, 0.0, 0

    def cache(self, batch, capacity):
        self.capacity = capacity
        return

    def filled(self, cache, length):
        self.held = length
        return

    def decode(self, cache, token, count):
        self.now += self.begin + count * self.token
        self.held += count
        return token, cache


@pytest.mark.parametrize("begin", [0.0, 0.5])
def test_only_tokens_are_timed(monkeypatch, begin):
    side = Clocked(begin, token=0.25)
    monkeypatch.setattr(bench_generate.time, "perf_counter", lambda: side.now)
    assert decode_times(side, 2, 100, 12, repeats=5) == pytest.approx([0.25] * 5)
    assert side.held <= side.capacity


def test_streamed_tokens_are_those_that_generate_gives():
    model = TinyModel(LLAMA).model(CompressionPlan.full(LLAMA))
    prompt, most = [3, 1, 4, 1, 5], 3 * STREAM_STEPS
    expected = generate(model, prompt, most, stop_tokens=()).completions[0].tokens
    decode = Streamed(model.network, "xla")
    cache = model.network.new_cache(batch=1, capacity=64)
    _, cache = model.network.extend(cache, jnp.asarray([prompt]), jnp.full(1, len(prompt)))
    token = jnp.full((1, 1), expected[0], jnp.int32)
    at = 0
    for count in (1, STREAM_STEPS, STREAM_STEPS + 3):
        token, cache = decode(cache, token, count)
        at += count
        assert token.tolist() == [[expected[at]]]
        assert cache.lengths.tolist() == [len(prompt) + at]
