"""An engine on a mesh: long prompts divided by token, all else by head; answers are those of one device."""

import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from conftest import LLAMA, TinyModel

from zdc_jax import Sampling, generate
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import EngineRequest
from zdc_jax.errors import MeshError
from zdc_jax.loading import LanguageModel
from zdc_jax.methods import coded
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan, LayerRanks

CONFIG = replace(LLAMA, layers=LLAMA.layers[:1] * 2, num_heads=8, num_kv_heads=2)
ENGINE = EngineConfig(max_sequences=2, max_model_len=96, page=16, chunk=32)
CODES = coded.Settings(bits_k=4, bits_v=4, bits_index=6, index=8, read=0, bits_near=8)
PLANS = {
    "full": CompressionPlan.full(CONFIG),
    "ranks and window": CompressionPlan(
        (LayerRanks(16, 32), LayerRanks(0, 0)), CONFIG.num_kv_heads, 32, window=9, sinks=3
    ),
    "codes": CompressionPlan(
        (LayerRanks(32, 32),), CONFIG.num_kv_heads, 32, window=9, sinks=3, method="coded", settings=CODES
    ),
}
MESHES = {
    "full": ("sequence=4", "sequence=2,model=2", "model=2"),
    "ranks and window": ("sequence=4", "sequence=2,model=2", "model=2"),
    "codes": ("sequence=2,model=2",),
}


def requests() -> list[EngineRequest]:
    """Return two short prompts, two long ones, and one that begins as one of these."""
    rng, found = np.random.default_rng(0), []
    for length in (5, 70, 30, 61):
        prompt = tuple(rng.integers(3, CONFIG.vocab_size, length).tolist())
        sampling = Sampling() if length % 2 else Sampling(0.8, seed=length)
        found.append(EngineRequest(prompt, 10, sampling, ignore_eos=True))
    return [*found, replace(found[1], prompt=(*found[1].prompt[:50], 7, 8, 9))]


@cache
def on_one_device(name: str) -> tuple[LanguageModel, list[tuple[int, ...]]]:
    """Return a model with as many layers as the plan, and its answers, which all meshes must give."""
    plan = PLANS[name]
    model = TinyModel(replace(CONFIG, layers=CONFIG.layers[: len(plan.layers)])).model(plan)
    prompts, sampling = zip(*((each.prompt, each.sampling) for each in requests()), strict=True)
    answers = generate(model, prompts, 10, sampling=sampling, stop_tokens=())
    return model, [answer.tokens for answer in answers.completions]


@contextmanager
def nothing_moves():
    """Refuse implicit transfers between devices, on every thread."""
    before = jax.config.jax_transfer_guard_device_to_device
    jax.config.update("jax_transfer_guard_device_to_device", "disallow")
    try:
        yield
    finally:
        jax.config.update("jax_transfer_guard_device_to_device", before)


@pytest.mark.parametrize(("name", "mesh"), [(name, mesh) for name in PLANS for mesh in MESHES[name]])
@pytest.mark.matrix("ranks and window-model=2")
def test_answers_are_those_of_one_device(name, mesh):
    on_one, expected = on_one_device(name)
    network = on_one.network.on_mesh(MeshConfig.parse(mesh).create())
    answers: dict[int, list[int]] = {}
    at_once: list[int] = []
    with Engine(replace(on_one, network=network), ENGINE) as engine, nothing_moves():
        assert (engine._runner.whole is None) == (mesh == "model=2")
        for index, request in enumerate(requests()):
            ended, tokens = threading.Event(), answers.setdefault(index, [])

            def listen(event, tokens=tokens, ended=ended):
                assert event.error is None, event.error
                tokens += event.tokens
                at_once.append(len(event.tokens))
                if event.finish_reason:
                    ended.set()

            engine.submit(request, listen)
            if index > 2:  # The others are under way at once.
                assert ended.wait(120)
        hits = engine.stats().prefix_hits
    assert hits == (48 if name == "full" else 0), "the last one's prefix; whole prompts keep no window"
    assert max(at_once) == 4, "several steps are one program on a mesh"
    assert [tuple(answers[index]) for index in range(len(expected))] == expected


def test_rows_that_are_divided_are_refused():
    on_one = TinyModel(CONFIG).model(PLANS["full"])
    network = on_one.network.on_mesh(MeshConfig.parse("data=2").create())
    with pytest.raises(MeshError, match="data=2: an engine has one scheduler"):
        Engine(replace(on_one, network=network), ENGINE)
