"""Choice of an attention implementation, and the model on kernels compared with XLA."""

import logging
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from zdc_jax import generate
from zdc_jax.cache.specs.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.config import LayerSpec, RopeConfig
from zdc_jax.loading import LanguageModel
from zdc_jax.ops import attention as ops
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.plan import CompressionPlan, LayerRanks

PLANS = {
    "full": {"qk": 32, "v": 32},
    "truncated": {"qk": 16, "v": 32},
    "window": {"qk": 16, "v": 16, "window": 64, "sinks": 4},
    "window, values whole": {"qk": 16, "v": 32, "window": 64, "sinks": 0},
    "window alone": {"qk": 0, "v": 0, "window": 64, "sinks": 4},
}
GEMMA = replace(
    LLAMA,
    layers=(
        LayerSpec(window=64, rope=RopeConfig(theta=500.0), qk_norm=True, scale=0.2, norms="sandwich"),
        LayerSpec(rope=LLAMA.layers[0].rope, qk_norm=True, scale=0.2, norms="sandwich"),
    ),
    norm_offset=1.0,
    embed_scale=8.0,
)
MISTRAL = replace(LLAMA, layers=tuple(replace(layer, window=64) for layer in LLAMA.layers))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="what is refused without a GPU")
@pytest.mark.parametrize("name", ["pallas", "cudnn"])
def test_an_explicit_choice_never_falls_back(tiny_opt: TinyModel, name):
    model = tiny_opt.model(CompressionPlan.full(tiny_opt.config))
    with pytest.raises(
        NotImplementedError, match=f"implementation='{name}' cannot serve this call: it needs a GPU"
    ):
        model.network(jnp.zeros((1, 8), jnp.int32), implementation=name)
    with pytest.raises(NotImplementedError, match=name):
        generate(model, [[5, 6, 7]], 2, implementation=name)


@pytest.mark.usefixtures("shapes_unchecked")
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
    assert record.getMessage().startswith("self_attention runs on xla (not pallas: ")


def bfloat16(model: LanguageModel) -> LanguageModel:
    network = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.network)
    return LanguageModel(network, model.tokenizer, model.basis)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="what can be checked without a GPU")
@pytest.mark.parametrize(
    ("config", "name"),
    [
        *((LLAMA, name) for name in PLANS),
        *((OPT, "window"), (OPT, "truncated"), (GEMMA, "window"), (MISTRAL, "full")),
    ],
)
@pytest.mark.full
def test_model_on_kernels_lowers_for_cuda(monkeypatch, caplog, config, name):
    # Whole sequences, consecutive prompt chunks, and one token: every layer chooses the kernels.
    network = bfloat16(TinyModel(config).model(CompressionPlan.uniform(config, **PLANS[name]))).network
    monkeypatch.setattr(ops, "device_refusal", lambda x: None)
    cache = network.new_cache(batch=2, capacity=256)

    def integers(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    extend = jax.jit(lambda cache, tokens, end: network.extend(cache, tokens, end))
    calls = {
        "prefill": lambda: extend.trace(cache, integers(2, 100), integers(2)),
        "decode": lambda: extend.trace(cache, integers(2, 1), integers(2)),
        "self_attention": lambda: jax.jit(lambda tokens: network.hidden(tokens)).trace(integers(2, 190)),
    }
    for kind, trace in calls.items():
        ops._log_choice.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="zdc_jax.ops"):
            text = trace().lower(lowering_platforms=("cuda",)).as_text()
        assert {record.getMessage() for record in caplog.records} == {f"{kind} runs on pallas"}
        attention = "zdc_decode" if kind == "decode" else "zdc_prefill"
        kernels = {attention} if config is OPT else {attention, "zdc_post_rope"}
        assert set(re.findall(r"zdc_(?:prefill|decode|post_rope)", text)) == kernels


def random_calls(rng):
    """Return one call of each kind, supported by kernels or not: a function and shapes of its arrays."""

    # Later choices are likelier; kernels support the last.
    def pick(*choices):
        return choices[min(rng.integers(2 * len(choices)), len(choices) - 1)]

    R, Z, sinks, window = pick(24, 272, 16), pick(40, 32), pick(70, 0, 4), pick(0, 60, 128)
    H, K, G, S = max(R, Z) + pick(8, 0, 16), pick(1, 2), pick(3, 60, 1), pick(253, 256)
    dtype = pick(jnp.float32, jnp.bfloat16)

    def shape(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct((2, *dims), dtype)

    integers = partial(shape, dtype=jnp.int32)

    def qkv(T, qk, v):
        return [shape(T, K * G, qk), shape(T, K, qk), shape(T, K, v)]

    prefix = [shape(K, S, rank) for rank in (R, Z)]
    rings = [shape(K, sinks + window, H - rank) for rank in (R, Z)]
    cache = PrefixRingState(*prefix, *rings, (sinks, window))
    halo = [shape(9, K * G, H), *[shape(window + 9, K, H)] * 2, *[shape(sinks, K, H)] * 2]
    near = {"sinks": sinks, "window": window}
    width = (H, H) if sinks or window else (R, Z)
    spec = PrefixRing(num_kv_heads=K, head_dim=H, dtype=jnp.dtype(dtype).name, R=R, Z=Z, **near)

    def cached(q, k, v, state, positions, end, scale, implementation):
        return spec.attend(
            state, q, NewTokens(NewKeys(k), v, positions, end), None, Call(scale, implementation)
        ).o

    return {
        "self_attention": (partial(ops.self_attention, qk_rank=R, v_rank=Z, **near), qkv(9, H, H)),
        "near_attention": (
            partial(ops.near_attention, window=window),
            [*halo, jax.ShapeDtypeStruct((), jnp.int32)],
        ),
        "far_attention": (partial(ops.far_attention, **near), qkv(9, R, Z)),
        "prefill": (cached, [*qkv(9, *width), cache, integers(9), integers()]),
        "decode": (cached, [*qkv(1, *width), cache, integers(1), integers()]),
    }


@pytest.mark.full
def test_kernels_take_what_is_not_refused(monkeypatch, no_launch):
    # A kernel's own ValueError would mean that its refusal was checked with other arguments.
    monkeypatch.setattr(ops, "device_refusal", lambda x: None)
    rng, served = np.random.default_rng(0), {}
    for _ in range(40):
        for kind, (call, arrays) in random_calls(rng).items():
            try:
                jax.eval_shape(partial(call, scale=1.0, implementation="pallas"), *arrays)
            except NotImplementedError as error:
                assert "implementation='pallas' cannot serve this call: " in str(error)  # noqa: PT017
                served.setdefault(kind, []).append(False)
            else:
                served.setdefault(kind, []).append(True)
    assert len(served) == 5
    for kind, seen in served.items():
        assert 3 < sum(seen) < 37, kind


def replay(network, tokens, implementation):
    """Return hidden states of a ragged batch: two prompt chunks, then token by token."""
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
@pytest.mark.parametrize(
    ("config", "name"),
    [
        *((config, name) for config in (LLAMA, OPT) for name in PLANS),
        *((GEMMA, "full"), (GEMMA, "window"), (MISTRAL, "full")),
    ],
)
def test_model_on_kernels_is_the_model_on_xla(config, name):
    # The error against float32 is at most twice XLA's in bfloat16, cached (ragged, in chunks) and whole.
    tiny = TinyModel(config)
    exact = tiny.model(CompressionPlan.uniform(config, **PLANS[name]))
    half = bfloat16(exact)
    tokens = tiny.tokens(2, 190)

    def cached(network, name):
        return replay(network, tokens, name)

    def whole(network, name):
        return np.asarray(network.hidden(jnp.asarray(tokens), name), np.float32)

    for run in (cached, whole):
        truth = run(exact.network, "xla")
        errors = {name: np.linalg.norm(run(half.network, name) - truth) for name in ("xla", "pallas")}
        assert 0 < errors["pallas"] <= 2 * errors["xla"]


@pytest.mark.gpu
def test_every_layer_is_served_by_the_kernels(caplog):
    # Far attention has both ranks, one, or none. Refused calls give a reason.
    ranks = LayerRanks(16, 16), LayerRanks(0, 0), LayerRanks(32, 32)
    plan = CompressionPlan(ranks, LLAMA.num_kv_heads, LLAMA.head_dim, sinks=4, window=64)
    model = bfloat16(TinyModel(LLAMA).model(plan))
    ops._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="zdc_jax.ops"):
        generate(model, [[5, 6, 7] * 30], 4)
    messages = {record.getMessage() for record in caplog.records}
    assert messages == {f"{kind} runs on pallas" for kind in ("prefill", "decode")}
    generate(model, [[5, 6, 7] * 30], 4, implementation="pallas")
    unaligned = bfloat16(TinyModel(LLAMA).model(replace(plan, window=60)))
    with pytest.raises(NotImplementedError, match="window=60: must be a positive multiple of 64"):
        generate(unaligned, [[5, 6, 7] * 30], 4, implementation="pallas")
