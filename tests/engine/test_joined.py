"""An engine whose layers share their arrays gives the answers of `generate`."""

from dataclasses import replace

import pytest
from conftest import LLAMA, TinyModel
from listening import CONFIG, ask

from zdc_jax import methods
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.engine.engine import Engine
from zdc_jax.engine.request import EngineRequest
from zdc_jax.generation.api import generate
from zdc_jax.plan import CompressionPlan

CODED = methods.named("coded").Settings(bits_k=8, bits_v=4, bits_near=8, read=0, index=0)


@pytest.mark.full
def test_answers_are_those_of_generate(monkeypatch):
    # Snapshots are restored, and pages and rings of ended requests are filled again.
    monkeypatch.setattr(Paged, "count_sharing", lambda self, layers, batch, capacity: min(2, layers))
    tiny = TinyModel(LLAMA)
    plan = CompressionPlan.uniform(LLAMA, qk=32, v=32, sinks=2, window=16)
    layers = tuple(replace(ranks, settings=CODED) for ranks in plan.layers)
    plan = replace(plan, method="coded", settings=CODED, layers=layers)
    model = replace(tiny.model(plan, tiny.basis()), basis=None)  # The basis has a short context.
    prompts = [tuple(tiny.tokens(1, length, seed=length)[0].tolist()) for length in (20, 45, 70, 33, 90)]
    expected = [generate(model, prompt, 12, stop_tokens=()).completions[0].tokens for prompt in prompts]
    with Engine(model, CONFIG) as engine:
        places = engine._runner._state.cache.whole.places
        assert [place.holder for place in places] == [0, 0, 2]
        for _ in range(2):
            listeners = [ask(engine, EngineRequest(prompt, 12, ignore_eos=True)) for prompt in prompts]
            assert [listener.tokens() for listener in listeners] == expected
        assert any(listener.events[-1].cached_tokens for listener in listeners)
        long = EngineRequest(prompts[-1][:64] + prompts[2], 12, ignore_eos=True)
        answer = generate(model, long.prompt, 12, stop_tokens=()).completions[0].tokens
        assert ask(engine, long).tokens() == answer
