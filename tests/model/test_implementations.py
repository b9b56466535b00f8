"""Choice of an attention implementation, and the model on the kernels against the model on XLA."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from zdc_jax import generate
from zdc_jax.loading import LanguageModel
from zdc_jax.ops import attention as ops
from zdc_jax.plan import CompressionPlan, LayerRanks, TokenClasses

PLANS = {
    "full": {"qk": 32, "v": 32},
    "truncated": {"qk": 16, "v": 32},
    "window": {"qk": 16, "v": 16, "window": 64, "sinks": 4},
    "window, values whole": {"qk": 16, "v": 32, "window": 64, "sinks": 0},
    "window alone": {"qk": 0, "v": 0, "window": 64, "sinks": 4},
}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="what is refused without a GPU")
@pytest.mark.parametrize("name", ["pallas", "cudnn"])
def test_an_explicit_choice_never_falls_back(tiny_opt: TinyModel, name):
    model = tiny_opt.model(CompressionPlan.full(tiny_opt.config))
    with pytest.raises(
        NotImplementedError, match=f"implementation='{name}' cannot do this call: it needs a GPU"
    ):
        model.network(jnp.zeros((1, 8), jnp.int32), implementation=name)
    with pytest.raises(NotImplementedError, match=name):
        generate(model, [[5, 6, 7]], 2, implementation=name)


def test_an_unknown_implementation_is_named(tiny_opt: TinyModel):
    with pytest.raises(ValueError, match="implementation='triton': must be None, 'pallas', 'cudnn' or 'xla'"):
        tiny_opt.dense(jnp.zeros((1, 8), jnp.int32), implementation="triton")


def test_the_choice_is_logged_once(caplog):
    ops._log_choice.cache_clear()
    x = jnp.ones((1, 8, 2, 16))
    with caplog.at_level(logging.INFO, logger="zdc_jax.ops"):
        for _ in range(3):
            ops.self_attention(x, x, x, scale=1.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("self_attention runs on xla (not pallas: it needs")


def bfloat16(model: LanguageModel) -> LanguageModel:
    network = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.network)
    return LanguageModel(network, model.tokenizer, model.basis)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="what can be checked without a GPU")
@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["llama", "opt"])
@pytest.mark.parametrize("name", PLANS)
def test_model_on_kernels_lowers_for_cuda(monkeypatch, config, name):
    """Whole sequences, a piece of a prompt after another, and one token."""
    network = bfloat16(TinyModel(config).model(CompressionPlan.uniform(config, **PLANS[name]))).network
    monkeypatch.setattr(ops, "device_refusal", lambda x: None)
    cache = network.new_cache(batch=2, capacity=256)
    integers = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)
    extend = lambda cache, tokens, end: network.extend(cache, tokens, end, "pallas")
    for width in (100, 1):
        traced = jax.jit(extend).trace(cache, integers(2, width), integers(2))
        assert "zdc_" in traced.lower(lowering_platforms=("cuda",)).as_text()
    whole = jax.jit(lambda tokens: network.hidden(tokens, "pallas")).trace(integers(2, 190))
    assert "zdc_prefill" in whole.lower(lowering_platforms=("cuda",)).as_text()


def replay(network, tokens, implementation):
    """Hidden states of a ragged batch: two pieces of prompt, then token by token."""
    B, T = tokens.shape
    lengths = np.array([T, T - 90])
    cache = network.new_cache(batch=B, capacity=256)
    extend = jax.jit(lambda cache, x, end: network.extend(cache, x, end, implementation))
    states, start = [], 0
    for width in (100, 70):
        end = np.minimum(lengths - 20, start + width)
        hidden, cache = extend(cache, tokens[:, start : start + width], jnp.asarray(end))
        inside = start + np.arange(width) < end[:, None]
        states.append(np.where(inside[..., None], np.asarray(hidden, np.float32), 0))
        start += width
    held = np.minimum(lengths - 20, start)
    for _ in range(20):
        one = jnp.asarray(tokens[np.arange(B), held][:, None])
        hidden, cache = extend(cache, one, jnp.asarray(held + 1))
        states.append(np.asarray(hidden, np.float32))
        held = held + 1
    return np.concatenate(states, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["llama", "opt"])
@pytest.mark.parametrize("name", PLANS)
def test_model_on_kernels_is_the_model_on_xla(config, name):
    """Error against float32 at most twice that of XLA in bfloat16, cached (in pieces, ragged) and whole."""
    tiny = TinyModel(config)
    exact = tiny.model(CompressionPlan.uniform(config, **PLANS[name]))
    half = bfloat16(exact)
    tokens = tiny.tokens(2, 190)
    cached = lambda network, name: replay(network, tokens, name)
    whole = lambda network, name: np.asarray(network.hidden(jnp.asarray(tokens), name), np.float32)
    for run in (cached, whole):
        truth = run(exact.network, "xla")
        errors = {name: np.linalg.norm(run(half.network, name) - truth) for name in ("xla", "pallas")}
        assert 0 < errors["pallas"] <= 2 * errors["xla"]


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [False, True])
def test_every_layer_is_served_by_the_kernels(caplog, classes):
    """Far attention at both ranks, at one, and none; token classes. And what refuses says why."""
    ranks = (LayerRanks(16, 16), LayerRanks(16, 16) if classes else LayerRanks(0, 0), LayerRanks(32, 32))
    plan = CompressionPlan(ranks, LLAMA.num_kv_heads, LLAMA.head_dim, sinks=4, window=64)
    if classes:
        important = (LayerRanks(32, 32),) * 3
        plan = replace(plan, classes=TokenClasses((0, 2), (0.4, 0.4), important, block=32))
    model = bfloat16(TinyModel(LLAMA).model(plan))
    ops._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="zdc_jax.ops"):
        generate(model, [[5, 6, 7] * 30], 4)
    messages = {record.getMessage() for record in caplog.records}
    assert messages == {f"{kind} runs on pallas" for kind in KINDS[: 4 if classes else 2]}
    generate(model, [[5, 6, 7] * 30], 4, implementation="pallas")
    unaligned = bfloat16(TinyModel(LLAMA).model(replace(plan, window=60)))
    with pytest.raises(NotImplementedError, match="a window of 64, got"):
        generate(unaligned, [[5, 6, 7] * 30], 4, implementation="pallas")


KINDS = ["prefill", "decode", "class prefill", "class decode"]
