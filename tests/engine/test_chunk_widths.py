"""Engine with padded widths between powers of two, as on GPUs."""

import threading
from dataclasses import replace

import pytest
from conftest import LLAMA, TinyModel

from zdc_jax.engine import runner
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import EngineRequest
from zdc_jax.generation.api import generate
from zdc_jax.plan import CompressionPlan


@pytest.mark.parametrize(("tokens", "width"), [(33, 48), (48, 48), (49, 64), (70, 64)])
@pytest.mark.matrix("33-48", "49-64")
def test_answers_do_not_depend_on_the_width(answers, tokens, width):
    seen, engine, model, prompts = answers
    prompt = prompts[tokens]  # Of its own, so that no other's pages are reused.
    done, found = threading.Event(), []

    def take(event):
        found.extend(event.tokens)
        if event.finish_reason:
            done.set()

    seen.clear()
    engine.submit(EngineRequest(tuple(prompt[:tokens]), 6, ignore_eos=True), take)
    assert done.wait(120)
    assert seen[0] == width
    assert tuple(found) == generate(model, prompt[:tokens], 6, stop_tokens=()).completions[0].tokens


@pytest.fixture(scope="module")
def answers():
    """Return the widths of an engine's programs in order, the engine, its model and prompts."""
    config = replace(LLAMA, layers=LLAMA.layers[:1])
    tiny = TinyModel(config)
    model = tiny.model(CompressionPlan.full(config))
    seen, pack = [], runner.pack_chunks

    def watch(chunks, count, width, **options):
        seen.append(width)
        return pack(chunks, count, width, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "list_widths", lambda most: [32, 48, most])
        patch.setattr(runner, "pack_chunks", watch)
        with Engine(model, EngineConfig(max_sequences=2, max_model_len=128, page=16, chunk=64)) as engine:
            yield seen, engine, model, tiny.tokens(100, 100).tolist()
