"""Logits that are not finite fail their own request by name, and reach no other."""

from dataclasses import replace
from itertools import chain

import jax
import jax.numpy as jnp
import pytest
from conftest import LLAMA, TinyModel
from listening import ask

from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import EngineRequest
from zdc_jax.errors import NonFiniteError
from zdc_jax.generation.api import generate, stream
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import LanguageModel
from zdc_jax.plan import CompressionPlan

BROKEN = 60
"""A token whose embedding is NaN, as if its activations had exceeded the dtype."""
SAYS = r"logits are not finite \(NaN or Inf\) in dtype float32: check the weights"


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    tiny = TinyModel(replace(LLAMA, layers=LLAMA.layers[:1], tie_embeddings=False))
    plan = CompressionPlan.uniform(tiny.config, sinks=2, window=16, qk=16, v=16)
    basis = tiny.basis()  # Of the model before it breaks.
    tiny.embeddings["tokens"] = tiny.embeddings["tokens"].at[BROKEN].set(jnp.nan)
    return replace(tiny.model(plan, basis), basis=None)


@pytest.fixture(scope="module")
def engine(model):
    # Two requests fill the pages, so that each page is used again and again.
    config = EngineConfig(max_sequences=2, max_model_len=96, page=16, chunk=32, cache_tokens=192)
    with Engine(model, config) as engine:
        yield engine


def alone(model, request: EngineRequest) -> tuple[int, ...]:
    return generate(model, request.prompt, request.max_tokens, stop_tokens=()).completions[0].tokens


def test_generate_names_the_prompt(model):
    with pytest.raises(NonFiniteError, match=r"prompts\[1\]: " + SAYS):
        generate(model, [[5, 6, 7], [8, BROKEN, 9]], 7, stop_tokens=())


def test_a_broken_request_fails_alone_and_leaves_nothing_behind(engine, model):
    good = [EngineRequest(tuple(range(3 + i, 30 + 2 * i)), 7, ignore_eos=True) for i in range(4)]
    expected = [alone(model, request) for request in good]
    assert not any(BROKEN in tokens for tokens in expected)
    broken = [
        # Read in several chunks, next to others, before its logits show what happened.
        EngineRequest((3 + i, BROKEN, *range(3, 90 - i)), 5, sampling, ignore_eos=True, logprobs=logprobs)
        for i, (sampling, logprobs) in enumerate([(Sampling(), None), (Sampling(0.7), 1), (Sampling(), 2)])
    ]
    for request in broken:
        listeners = [ask(engine, each) for each in (request, *good)]
        assert [listener.tokens() for listener in listeners] == [(), *expected]
        assert [listener.reason for listener in listeners] == ["error", *4 * ["length"]]
        assert listeners[0].events[-1].error.startswith("logits are not finite (NaN or Inf) in dtype float32")
    assert engine.stats().running == engine.stats().waiting == 0
    assert engine.stats().cache_usage == 0
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(engine._runner._state.cache.whole.layers))


def test_pages_of_a_broken_request_are_not_shared(engine, model):
    request = EngineRequest((*range(3, 50), BROKEN), 5, ignore_eos=True, salt="own")
    for _ in range(2):
        listener = ask(engine, request)
        assert listener.tokens() == ()
        assert listener.events[-1].cached_tokens == 0


@pytest.mark.full
def test_a_request_that_breaks_later_keeps_its_tokens(engine, model):
    request = EngineRequest(tuple(range(4, 32)), 30, ignore_eos=True)
    listener = ask(engine, request)
    tokens = listener.tokens()
    assert tokens[-1] == BROKEN, "the model itself chose it"
    assert tokens == alone(model, replace(request, max_tokens=len(tokens)))
    assert listener.reason == "error"
    shown = []
    with pytest.raises(NonFiniteError, match=r"prompts\[0\]: "):
        shown.extend(delta.tokens for delta in stream(model, request.prompt, 30, stop_tokens=()))
    assert tuple(chain.from_iterable(shown)) == tokens
