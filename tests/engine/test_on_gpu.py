"""An engine on a GPU: kernels that read pages, snapshots inside chunks, and programs for few sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from listening import ask

from benchmarks.serving.random_folder import Options, write_folder
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import EngineRequest
from zdc_jax.generation.api import generate
from zdc_jax.loading import load
from zdc_jax.presets import resolve_plan

PAGE = 128


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["none", "3bit"])
def test_a_cached_prefix_changes_few_answers(plan, tmp_path):
    # In bfloat16, sums of other shapes round differently, so some first tokens may differ.
    write_folder(Options(tmp_path / "model", "qwen2.5-1.5b", layers=2))
    model = load(tmp_path / "model", resolve_plan(plan, tmp_path / "model"), dtype="bfloat16")
    rng, agreed = np.random.default_rng(0), 0
    lengths = rng.integers(PAGE + 1, 700, 16)
    with Engine(model, EngineConfig(16, 1024)) as engine:
        prompts = [tuple(rng.integers(3, 150_000, length).tolist()) for length in lengths]
        requests = [EngineRequest(prompt, 5, ignore_eos=True) for prompt in prompts]
        for listener in [ask(engine, request) for request in requests]:
            assert len(listener.tokens()) == 5
        for prompt in prompts:
            longer = (*prompt, *range(3, 40))
            listener = ask(engine, EngineRequest(longer, 6, ignore_eos=True))
            tokens = listener.tokens()
            assert listener.events[0].cached_tokens >= (len(prompt) - 1) // PAGE * PAGE
            (expected,) = generate(model, longer, 6, stop_tokens=()).completions
            agreed += tokens[0] == expected.tokens[0]
    assert agreed >= 14


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["none", "3bit"])
def test_all_tokens_of_a_prompt_are_scored(plan, tmp_path):
    # Without scores, less of the last layer is computed.
    write_folder(Options(tmp_path / "model", "qwen2.5-1.5b", layers=2))
    model = load(tmp_path / "model", resolve_plan(plan, tmp_path / "model"), dtype="bfloat16")
    prompt = np.random.default_rng(0).integers(3, 150_000, 600)
    with Engine(model, EngineConfig(2, 1024)) as engine:
        request = EngineRequest(tuple(prompt.tolist()), 1, ignore_eos=True, logprobs=0, prompt_logprobs=True)
        listener = ask(engine, request)
        assert len(listener.tokens()) == 1
    scores = listener.events[0].prompt_logprobs[1:]
    network, tokens = model.network, jnp.asarray(prompt[None], jnp.int32)
    hidden, _ = network.extend(network.new_cache(batch=1, capacity=1024), tokens, jnp.array([600]))
    logprobs = jax.nn.log_softmax(network.embeddings.unembed(hidden[0]))
    expected = np.asarray(logprobs[np.arange(599), prompt[1:]])
    found = np.array([each.logprob for each in scores])
    assert np.abs(found - expected).max() < 0.2 * expected.std()
