"""Layer specs of checkpoints, compared with NumPy in float64: windows, scales, norms, rotary tables."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from convert.calibration.calibrate import collect_moments
from zdc_jax.basis import Basis
from zdc_jax.config import LayerSpec, ModelConfig, RopeConfig
from zdc_jax.errors import CalibrationError, PlanError
from zdc_jax.fold import fold_attention
from zdc_jax.model.attention import Attention
from zdc_jax.model.observe import observe
from zdc_jax.plan import CompressionPlan, LayerRanks

ROPE, OTHER_ROPE = LLAMA.layers[0].rope, RopeConfig(theta=500.0)
SPECS = {
    "window": LayerSpec(rope=ROPE, window=9),
    "scale": LayerSpec(rope=ROPE, scale=0.3),
    "q/k norm": LayerSpec(rope=ROPE, qk_norm=True),
    "q/k norm, no rope": LayerSpec(qk_norm=True),
    "sandwich": LayerSpec(rope=ROPE, norms="sandwich"),
    "post, plain MLP, no rope": LayerSpec(norms="post", mlp="plain"),
    "all at once": LayerSpec(rope=OTHER_ROPE, window=7, scale=0.2, qk_norm=True, norms="sandwich"),
}
"""Specs of the second of two layers, after a usual one, so that no field may come from the whole model."""


def config_of(name: str) -> ModelConfig:
    config = replace(LLAMA, layers=(LLAMA.layers[0], SPECS[name]))
    factors = {"norm_offset": 0.7, "embed_scale": 3.0, "residual_scale": 0.6}
    return replace(config, **factors) if name == "all at once" else config


class Truth:
    """One model in NumPy, float64, from the definition of `LayerSpec`."""

    def __init__(self, tiny: TinyModel):
        self.config = tiny.config
        self.embeddings, self.layers = jax.tree.map(
            lambda x: np.asarray(x, np.float64), (tiny.embeddings, tiny.layers)
        )

    def norm(self, x, scale):
        return (
            x
            / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps)
            * (scale + self.config.norm_offset)
        )

    def hidden(self, tokens):
        x = self.embeddings["tokens"][tokens] * self.config.embed_scale
        for weights, spec in zip(self.layers, self.config.layers, strict=True):
            norm = {name: weights[name]["scale"] for name in weights if name.endswith("_norm")}
            for part, half in (("attention", self.attention), ("mlp", self.mlp)):
                given = x if spec.norms == "post" else self.norm(x, norm[f"{part}_norm"])
                y = half(given, weights[part], spec)
                if spec.norms == "sandwich":
                    y = self.norm(y, norm[f"{part}_output_norm"])
                x = x + y * self.config.residual_scale
                x = self.norm(x, norm[f"{part}_norm"]) if spec.norms == "post" else x
        return x

    def attention(self, x, weights, spec):
        T, H = x.shape[1], self.config.head_dim
        q, k, v = (np.einsum("btd,dnh->btnh", x, weights[name]) for name in "qkv")
        if spec.qk_norm:
            q, k = self.norm(q, weights["q_norm"]), self.norm(k, weights["k_norm"])
        if spec.rope is not None:
            turn = np.exp(1j * np.outer(np.arange(T), spec.rope.theta ** -(np.arange(0, H, 2) / H)))
            q, k = (self.turned(a, turn[:, None]) for a in (q, k))
        k, v = (np.repeat(a, self.config.group_size, axis=2) for a in (k, v))
        t, j = np.arange(T)[:, None], np.arange(T)
        seen = (j <= t) & (j > t - (spec.window or T))
        scores = np.einsum("btnh,bsnh->bnts", q, k) * (spec.scale or H**-0.5)
        weight = np.exp(np.where(seen, scores, -np.inf))
        o = np.einsum("bnts,bsnh->btnh", weight / weight.sum(-1, keepdims=True), v)
        return np.einsum("btnh,nhd->btd", o, weights["o"])

    def turned(self, x, turn):
        first, second = np.split(x, 2, axis=-1)
        both = (first + 1j * second) * turn
        return np.concatenate([both.real, both.imag], -1)

    def mlp(self, x, weights, spec):
        def silu(a):
            return a / (1 + np.exp(-a))

        up = x @ weights["up"]
        return (silu(x @ weights["gate"]) * up if spec.mlp == "gated" else silu(up)) @ weights["down"]


@pytest.fixture(scope="module", params=SPECS)
def model(request) -> TinyModel:
    return TinyModel(config_of(request.param))


def close(found, expected, roundings=100):
    assert np.abs(np.asarray(found) - expected).max() <= roundings * 1.2e-7 * np.abs(expected).max()


def test_layers_compute_what_their_spec_says(model: TinyModel):
    tokens = model.tokens(2, 32)
    close(model.dense.hidden(jnp.asarray(tokens)), Truth(model).hidden(tokens))


@pytest.mark.full
def test_cached_pieces_under_a_full_rank_plan_are_the_model(model: TinyModel):
    # A spec must survive folding, loading and caching.
    basis = model.basis(qk="balanced", vo="balanced")
    plan = CompressionPlan.full(model.config)
    plan.check_model(model.config, "")
    network, tokens = model.model(plan, basis).network, model.tokens(2, 32)
    expected = Truth(model).hidden(tokens)
    condition = max(basis.qk_condition.max(), basis.vo_condition.max())
    close(network.hidden(jnp.asarray(tokens)), expected, 100 * condition)
    cache = network.new_cache(batch=2, capacity=32)
    for start in (0, 16):
        piece = jnp.asarray(tokens[:, start : start + 16])
        y, cache = network.extend(cache, piece, jnp.full(2, start + 16))
        close(y, expected[:, start : start + 16], 100 * condition)


def test_a_sliding_layer_caches_its_window_alone():
    config = config_of("window")
    ring, whole = CompressionPlan.full(config).layer_caches("float32")[::-1]
    assert ring.bytes(4096) == ring.bytes(256) == 4 * 2 * config.num_kv_heads * 9 * config.head_dim
    assert whole.bytes(4096) == 16 * whole.bytes(256)


@pytest.mark.full
def test_calibration_sees_each_layer_under_its_own_mask():
    # Attention and moments of o are those of the window, not of all keys.
    model = TinyModel(config_of("window"))
    tokens = model.tokens(2, 32)
    taken = observe(model.dense, jnp.asarray(tokens), lambda seen: (seen.x, seen.o))
    truth, spec = Truth(model), model.config.layers[1]
    x = np.asarray(taken[1][0], np.float64)
    inside = truth.norm(x, truth.layers[1]["attention_norm"]["scale"])
    attended = truth.attention(inside, truth.layers[1]["attention"], spec)
    o = np.einsum("btnh,nhd->btd", np.asarray(taken[1][1], np.float64), truth.layers[1]["attention"]["o"])
    close(o, attended)
    moments = collect_moments(model.dense, tokens, fingerprint="")
    by_head = np.asarray(taken[1][1], np.float64).reshape(64, 2, 2, 32)
    close(moments.o[1], np.einsum("tkgh,tkgi->khi", by_head, by_head))


def test_a_plan_may_only_narrow_a_sliding_layer():
    config = config_of("window")

    def plan(ranks):
        return CompressionPlan((LayerRanks(16, 16), ranks), 2, 32, window=5)

    plan(LayerRanks(0, 0, 4)).check_model(config, "")
    for ranks in (LayerRanks(0, 0, 10), LayerRanks(0, 0), LayerRanks(16, 16)):
        with pytest.raises(
            PlanError,
            match=r"layer 1: .* has a sliding window of 9 tokens",
        ):
            plan(ranks).check_model(config, "")
    for ranks in (LayerRanks(16, 16, 4), LayerRanks(0, 0, 0), LayerRanks(0, 0, True)):
        with pytest.raises(PlanError, match="layer 1: "):
            plan(ranks)
    assert CompressionPlan.uniform(config, qk=16, v=16, window=64).layers[1] == LayerRanks(0, 0, 9)
    assert CompressionPlan.uniform(config, qk=0, v=0, window=4).layers[1] == LayerRanks(0, 0, 4)


def test_folding_loses_no_weight(tiny_opt: TinyModel):
    basis, weights = tiny_opt.basis(), dict(tiny_opt.layers[0]["attention"])

    def fold(weights):
        return fold_attention(weights, OPT, basis, 0, LayerRanks(32, 32), full_width=False)

    fold(weights)
    with pytest.raises(ValueError, match=r"layer 0: folding does not support .* \['gate'\]"):
        fold(weights | {"gate": weights["q"]})
    with pytest.raises(ValueError, match=r"weights=\['gate'\]: not weights of an attention layer"):
        Attention(weights | {"gate": weights["q"]}, OPT, OPT.layers[0])


def test_rotary_pairs_do_not_fold_past_a_norm():
    model = TinyModel(config_of("q/k norm"))
    basis: Basis = model.basis(qk="pairs", vo="balanced")
    with pytest.raises(CalibrationError, match="qk_kind='pairs' does not support models with norms"):
        model.model(CompressionPlan.full(model.config), basis)
