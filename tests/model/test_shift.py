"""The shift of keys: scores regain what keys left out, in every way in which a model reads its cache."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from convert.calibration.calibrate import collect_moments
from convert.calibration.estimate_shift import estimate_shift
from kernels_pallas import score_blocks, score_blocks_refusal
from kernels_pallas.rope import score_blocks as scoring
from kernels_pallas.rope.score_blocks import PROGRAMS, choose_steps
from zdc_jax import methods
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.fold import mean_of_bias, prepared_layer, prepared_layers
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.rotary import layer_frequencies, rotate
from zdc_jax.ops.shift import (
    BLOCK,
    CENTER,
    MOST_POSITIONS,
    ShiftedQueries,
    _all_turns_in_block,
    _turns_between_blocks,
    damping,
    mean_keys,
    means_of_blocks,
    of_slots,
    without_mean,
)
from zdc_jax.plan import CompressionPlan

FREQUENCIES = 1e6 ** -(np.arange(64) / 64)
"""Rotary frequencies of Qwen2.5-1.5B, with heads of 128."""
LENGTH = 3 * BLOCK + 17


def qwen_like_mean(rng) -> np.ndarray:
    """Return means [2, 128] as in layer 0 of Qwen2.5-1.5B: a norm of 900, nearly all in slow pairs."""
    mean = rng.normal(size=(2, 2, 64)) * np.geomspace(0.2, 300, 64)
    return (mean * 900 / np.linalg.norm(mean, axis=(1, 2), keepdims=True)).reshape(2, 128)


@pytest.mark.parametrize("start", [0, 8192, 32768, 131072 - 256])
@pytest.mark.matrix("130816")
def test_scores_equal_float64_at_every_position(start):
    # Scores of 16-bit keys of this size would be off by more than 1.
    rng, T, S = np.random.default_rng(start), 5, start + 256
    mean = np.float32(qwen_like_mean(rng))
    slots = np.unique(np.r_[np.linspace(0, S - 1, 200, dtype=int), start : start + 250])
    raw_k = rng.normal(size=(1, len(slots), 2, 128)) + mean
    raw_q = rng.normal(size=(1, T, 4, 128)) * 3
    positions = start + 250 + np.arange(T)[None]

    def turned(x, at):
        angles = at[0][:, None, None] * FREQUENCIES
        z = (x[..., :64] + 1j * x[..., 64:]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag], -1)

    q, k = turned(raw_q, positions), turned(raw_k, slots[None])
    want = np.einsum("BTKGH,BSKH->BKGTS", q.reshape(1, T, 2, 2, 128), k) / 128**0.5

    stored = without_mean(jnp.float32(raw_k), jnp.int32(slots[None]), jnp.float32(mean), FREQUENCIES)
    assert float(jnp.abs(stored).max()) < 100  # What is left has the size of the other keys.
    # The rotary embedding is that of the cache, in float64, so that its own rounding does not count.
    left = np.einsum("BTKGH,BSKH->BKGTS", q.reshape(1, T, 2, 2, 128), turned(np.float64(stored), slots[None]))
    shift = ShiftedQueries(jnp.float32(raw_q), jnp.int32(positions), jnp.float32(mean), FREQUENCIES)
    gains = of_slots(shift.block_scores(S, 128**-0.5), jnp.int32(slots), 2)
    error = left / 128**0.5 + np.float64(gains) - want
    assert np.abs(error - error.mean(-1, keepdims=True)).max() < 0.01
    assert np.ptp(want, axis=-1).max() > 100 * 0.01


def test_means_of_blocks_are_those_of_whole_keys_but_for_a_constant():
    rng, length = np.random.default_rng(0), 5 * BLOCK - 9
    mean, basis = qwen_like_mean(rng), np.linalg.qr(rng.normal(size=(2, 128, 128)))[0]
    positions, given = jnp.arange(length)[None], np.broadcast_to(mean, (1, length, 2, 128))

    def turn(x):
        angles = np.arange(length)[:, None, None] * FREQUENCIES
        z = (x[0, ..., :64] + 1j * x[0, ..., 64:]) * np.exp(1j * angles)
        return np.einsum("skh,khc->ksc", np.concatenate([z.real, z.imag], -1), basis)

    left = turn(np.float64(without_mean(jnp.float32(given), positions, jnp.float32(mean), FREQUENCIES)))
    added = means_of_blocks(mean, FREQUENCIES, length, basis)[:, np.arange(length) // BLOCK]
    constant = turn(given) - left - added
    np.testing.assert_allclose(constant, np.broadcast_to(constant[:, :1], constant.shape), atol=2e-3)
    assert np.abs(added).max() > 1
    assert means_of_blocks(mean, FREQUENCIES, MOST_POSITIONS + 1) is None


def test_the_best_mean_of_a_block_is_the_damped_mean():
    # Least squares over the positions of one block.
    rng, mean = np.random.default_rng(0), np.random.default_rng(1).normal(size=128)
    keys = np.float64(
        rotate(
            jnp.broadcast_to(jnp.float32(mean), (1, BLOCK, 1, 128)),
            jnp.arange(BLOCK)[None],
            jnp.asarray(FREQUENCIES, jnp.float32),
            interleaved=False,
        )
    )[0, :, 0]
    damped = mean_keys(mean * np.tile(damping(FREQUENCIES), 2), FREQUENCIES, 1)[0]
    np.testing.assert_allclose(keys.mean(0), damped, atol=1e-4)
    assert np.square(keys - damped).sum() < np.square(keys - damped - 0.1 * rng.normal(size=128)).sum()


class BiasedModel(TinyModel):
    """A random model whose keys have a large bias in their slow pairs, as in Qwen2."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        rng, K, half = np.random.default_rng(5), config.num_kv_heads, config.head_dim // 2
        bias = 60 * rng.normal(size=(K, 2, half)) * np.geomspace(0.01, 1, half)
        for layer in self.layers:
            layer["attention"]["k_bias"] = jnp.asarray(bias.reshape(K, -1), jnp.float32)
        self.dense = Transformer(config, CompressionPlan.full(config), self.embeddings, self.layers)


BIASED = {
    "llama": replace(LLAMA, qkv_bias=True),
    "opt": OPT,
    "llama with norms": replace(
        LLAMA, layers=tuple(replace(layer, qk_norm=True) for layer in LLAMA.layers), qkv_bias=False
    ),
}
PLANS = {
    "all coordinates": {"method": "zdc"},
    "window": {"method": "zdc", "window": 24, "sinks": 3},
    "8 bits": {"method": "coded", "window": 24, "sinks": 3},
    "all in 8 bits": {"method": "coded", "window": 24, "sinks": 3, "settings": {"bits_near": 8}},
    "choosing all": {"method": "coded", "window": 24, "sinks": 3, "settings": {"index": 8, "read": 256}},
    "choosing pages": {
        "method": "coded",
        "window": 24,
        "sinks": 3,
        "settings": {"index": 8, "read": 256, "page": 4},
    },
    "int8": {"method": "int8"},
    "oscar": {
        "method": "oscar",
        "window": 24,
        "sinks": 3,
        "settings": {"bits": 8, "clip_k": 1.0, "clip_v": 1.0},
    },
    "oscar_free": {"method": "oscar_free", "window": 24, "sinks": 3, "settings": {"bits": 8, "group": 8}},
}
"""Plans that lose at most the rounding to 8 bits."""


@cache
def biased(family: str) -> TinyModel:
    return BiasedModel(BIASED[family]) if family != "llama with norms" else TinyModel(BIASED[family])


def plan_of(config: ModelConfig, method: str, settings=None, **near: int) -> CompressionPlan:
    H = config.head_dim
    plan = CompressionPlan.uniform(config, qk=H, v=H, **near)
    return replace(plan, method=method, settings=methods.settings_from_json(method, settings or {}))


def read_in_pieces(network, tokens, pieces) -> np.ndarray:
    cache, found, start = network.new_cache(batch=len(tokens), capacity=LENGTH + 7), [], 0
    for count in pieces:
        piece = jnp.asarray(tokens[:, start : start + count])
        start += count
        hidden, cache = network.extend(cache, piece, jnp.full(len(tokens), start))
        found.append(np.asarray(network.embeddings.unembed(hidden)))
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", BIASED)
@pytest.mark.matrix("llama with norms-all coordinates")
def test_a_model_with_shifted_keys_is_the_same_function(family, name):
    # Whole sequences, chunks that end within a block, and single tokens, all with the ring wrapping.
    model = biased(family)
    basis = model.basis()
    mean = np.float64(basis.key_shift)
    assert basis.shifted == [True] * 3 or family == "llama with norms"
    plan = plan_of(model.config, **PLANS[name]).with_shift([True] * 3)
    tokens = model.tokens(2, LENGTH)
    network = model.model(plan, basis).network
    if model.config.layers[0].rope is not None:
        attention = network.layers[0].attention
        assert attention.k_mean is not None
        assert (attention.k_block_means is not None) == (plan.method == "coded")
    want = np.asarray(model.dense(jnp.asarray(tokens)))
    tolerance = (1e-4 if PLANS[name]["method"] == "zdc" else 0.05) * want.std()
    pieces = [BLOCK + 9, 2 * BLOCK - 5, *[1] * 13]
    for found in (network(jnp.asarray(tokens)), read_in_pieces(network, tokens, pieces)):
        assert np.square(found - want).mean() ** 0.5 < tolerance
    assert np.abs(mean).max() > 0


def test_loaded_means_of_blocks_are_those_of_stored_keys():
    # Stored keys with the means of their blocks are the keys of the unmodified model, but for a constant.
    model = biased("llama")
    plan, positions = plan_of(model.config, **PLANS["8 bits"]), jnp.arange(LENGTH)[None]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, LENGTH, model.config.embed_dim)), jnp.float32)
    networks = [model.model(plan.with_shift([on] * 3), model.basis()).network for on in (True, False)]
    attention, plain = (network.layers[0].attention for network in networks)
    stored, whole = (each.project(x, positions)[1].keys[0] for each in (attention, plain))
    added = attention.k_block_means[...][:, np.arange(LENGTH) // BLOCK].swapaxes(0, 1)
    constant = whole - stored - added
    np.testing.assert_allclose(constant, np.broadcast_to(constant[:1], constant.shape), atol=0.02)
    assert np.abs(added).max() > 1


def distance(found, want) -> float:
    """Return the mean KL divergence of next-token distributions from logits."""
    p, q = (jax.nn.log_softmax(jnp.asarray(x), -1) for x in (want, found))
    return float((jnp.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    ("calibrated", "method", "settings"),
    [
        (True, "coded", {"bits_k": 4}),
        (False, "coded", {"bits_k": 4}),
        (False, "turboquant", {"bits_v": 8}),
    ],
)
@pytest.mark.full
def test_four_bits_of_keys_with_a_large_bias_need_the_shift(calibrated, method, settings):
    model = biased("llama")
    tokens = jnp.asarray(model.tokens(2, LENGTH))
    want = model.dense(tokens)
    plan = replace(plan_of(model.config, method, settings), rotated=calibrated)

    def lost(shifted: bool) -> float:
        chosen = plan.with_shift([shifted] * 3)
        basis = model.basis(**({} if shifted else {"shiftable": ()})) if calibrated else None
        layers = prepared_layers(iter(model.layers), model.config, chosen, basis, jnp.float32)
        network = Transformer(model.config, chosen, model.embeddings, layers)
        return distance(network(tokens), want)

    assert lost(True) < 0.2 * lost(False)


@pytest.mark.full
def test_moments_of_keys_without_their_mean_are_exact():
    model = biased("llama")
    windows = model.tokens(3, 2 * BLOCK + 9, seed=4)
    moments = collect_moments(model.dense, windows, fingerprint="tiny", batch=2)
    mean, rest = estimate_shift(model.dense, windows)[0], moments.k_rest[0] / windows.size
    used = moments.key_shift[0]  # Estimated from the first windows.
    frequencies = layer_frequencies(model.config.layers[0], model.config)
    x = model.dense.embeddings.embed(jnp.asarray(windows), jnp.zeros(windows.shape, int))
    positions = jnp.broadcast_to(jnp.arange(windows.shape[1]), windows.shape)
    block = model.dense.layers[0]
    keys = np.float64(block.projected(x, positions)[1].keys)
    blocks = np.arange(windows.shape[1]) // BLOCK
    left = keys - mean_keys(used, frequencies, 3)[blocks]
    want = np.einsum("BTKH,BTKI->KHI", left, left) / windows.size
    np.testing.assert_allclose(rest, want, atol=1e-5 * np.abs(want).max())
    # The estimate is best for its own windows: any other mean leaves more.
    left = keys - mean_keys(mean, frequencies, 3)[blocks]
    for seed in range(3):
        other = mean + 0.01 * np.random.default_rng(seed).normal(size=mean.shape)
        worse = keys - mean_keys(other, frequencies, 3)[blocks]
        assert np.square(worse).sum() > np.square(left).sum()


def test_the_bias_needs_no_calibration():
    model = biased("llama")
    attention = {name: np.asarray(x) for name, x in model.layers[0]["attention"].items()}
    damped = damping(layer_frequencies(model.config.layers[0], model.config))
    mean = mean_of_bias(attention, model.config, 0)
    np.testing.assert_allclose(mean, attention["k_bias"] * np.tile(damped, 2))
    without = {name: x for name, x in attention.items() if name != "k_bias"}
    assert mean_of_bias(without, model.config, 0) is None
    opt = biased("opt")
    plan = replace(plan_of(opt.config, "int8"), rotated=False).with_shift([True] * 3)
    layer = prepared_layer(0, opt.layers[0], opt.config, plan, None, jnp.float32)
    # Without a rotary embedding the bias adds the same to all scores of a query.
    assert not layer["attention"]["k_bias"].any()


@pytest.mark.parametrize("method", ["h2o", "quest", "palu"])
def test_methods_without_a_shift_refuse_it(method):
    plan = plan_of(LLAMA, method, window=24, sinks=0 if method == "quest" else 3)
    with pytest.raises(PlanError, match=f"layer 0: shift=true .* not method='{method}'"):
        plan.with_shift([True] * 3)


def test_a_plan_file_names_shifted_layers(tmp_path):
    plan = plan_of(LLAMA, "coded").with_shift([True, False, True])
    plan.save(tmp_path / "plan.json")
    assert CompressionPlan.load(tmp_path / "plan.json") == plan
    assert (tmp_path / "plan.json").read_text().count('"shift": true') == 2


@pytest.mark.parametrize("T", [1, 5, 130])
@pytest.mark.parametrize("H", [128, 96])
@pytest.mark.matrix("128-1")
def test_the_kernel_scores_blocks_as_xla_does(H, T):
    check_scores_of_blocks(H, T, blocks=70)


def check_scores_of_blocks(H, T, blocks):
    """Compare the kernel with XLA for sequences that begin within the first blocks."""
    rng, starts = np.random.default_rng(T), np.array([63, 4096])
    frequencies = 1e6 ** -(np.arange(H // 2) / (H // 2))
    mean = jnp.float32(rng.normal(size=(2, H)) * 20)
    q = jnp.float32(rng.normal(size=(2, T, 4, H)))
    positions = jnp.int32(starts[:, None] + np.arange(T))
    shift = ShiftedQueries(q, positions, mean, frequencies)
    want = np.asarray(shift.block_scores(blocks * BLOCK, 0.1))
    tables = mean, _all_turns_in_block(-frequencies), _turns_between_blocks(frequencies, blocks)
    scores = score_blocks(q, *tables, jnp.int32(starts), scale=0.1, interpret=True)
    found = np.asarray(scores.transpose(0, 3, 1, 2))
    seen = np.arange(blocks) <= np.asarray(positions)[..., None] // BLOCK
    seen = np.broadcast_to(seen[:, :, None], want.shape)
    largest = np.abs(want[seen]).max()
    assert largest > 5
    np.testing.assert_allclose(found[seen], want[seen], atol=1e-5 * largest)


@pytest.mark.parametrize(("programs", "blocks"), [(1, 75), (64, 130)], ids=["all steps", "two steps"])
def test_programs_of_several_steps(monkeypatch, programs, blocks):
    monkeypatch.setattr(scoring, "PROGRAMS", programs)
    check_scores_of_blocks(64, 140, blocks)


def test_programs_take_several_steps_if_there_are_enough():
    assert choose_steps(queries=PROGRAMS, most=40) == choose_steps(queries=2 * PROGRAMS, most=40) == 40
    assert choose_steps(queries=PROGRAMS // 4, most=40) == 10
    assert choose_steps(queries=12, most=40) == choose_steps(queries=12, most=1) == 1


def test_padding_has_finite_scores():
    rng, starts, ends, T, blocks = np.random.default_rng(0), np.array([10, 200]), np.array([75, 300]), 200, 7
    q, mean = jnp.float32(rng.normal(size=(2, T, 2, 32))), jnp.float32(rng.normal(size=(1, 32)))
    frequencies = 1e4 ** -(np.arange(16) / 16)
    tables = mean, _all_turns_in_block(-frequencies), _turns_between_blocks(frequencies, blocks)
    options = {"scale": 0.1, "interpret": True}
    whole, padded = (
        np.asarray(score_blocks(q, *tables, jnp.int32(starts), ends=last, **options))
        for last in (None, jnp.int32(ends))
    )
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        own = (start + np.arange(T)) // BLOCK
        seen = np.arange(blocks)[:, None] <= own
        is_zero = own * BLOCK >= end
        np.testing.assert_array_equal(padded[b][:, seen & ~is_zero], whole[b][:, seen & ~is_zero])
        assert not padded[b][:, seen & is_zero].any()
        assert is_zero.any()


@pytest.mark.usefixtures("shapes_unchecked")
def test_scores_of_wrong_tables_are_refused():
    q, row = jnp.zeros((1, 2, 4, 32)), jnp.zeros(1, jnp.int32)
    mean, in_block, turns = jnp.zeros((2, 32)), jnp.zeros((64, 32)), jnp.zeros((3, 32))
    assert score_blocks_refusal(q, mean, in_block, turns, row) is None
    reason = score_blocks_refusal(q, mean[:, :30], in_block, turns, row)
    assert reason == "mean has shape (2, 30): must be [K, H] = (any, 32)"


def check_scores_of_a_large_mean(start, T, **kernel):
    """Compare the kernel with float64 for a mean as in Qwen2.5."""
    rng, blocks = np.random.default_rng(T), (start + T) // BLOCK + 2
    mean = qwen_like_mean(rng)
    q = rng.normal(size=(1, T, 4, 128)) * 3
    positions = jnp.int32(start + np.arange(T)[None])
    shift = ShiftedQueries(jnp.float32(q), positions, jnp.float32(mean), FREQUENCIES)
    turns = shift.mean_turns(blocks * BLOCK)
    scores = score_blocks(shift.q, *turns, positions[:, 0], scale=128**-0.5, **kernel)
    found = np.asarray(scores.transpose(0, 3, 1, 2))
    # Float64 scores of single keys at the centers of blocks.
    centers = np.arange(blocks) * BLOCK + CENTER
    angles = (np.asarray(positions)[0][:, None, None] - centers[:, None]) * FREQUENCIES
    z = (q[..., :64] - 1j * q[..., 64:]) * np.repeat(mean[:, :64] + 1j * mean[:, 64:], 2, 0)
    want = np.einsum("tnh,tbh->tnb", z[0], np.exp(-1j * angles)).real / 128**0.5
    own = np.asarray(positions)[0] // BLOCK
    want -= np.take_along_axis(want, np.broadcast_to(own[:, None, None], (T, 4, 1)), -1)
    seen = np.broadcast_to((np.arange(blocks) <= own[:, None])[:, None], want.shape)
    # Blocks that are not seen have any values.
    assert np.abs(found[0][seen] - want[seen]).max() < 0.01
    assert np.ptp(want[seen]) > 1 or start < 1000


@pytest.mark.parametrize("T", [1, 66])
@pytest.mark.matrix("66")
def test_the_kernel_scores_a_large_mean_far_away(T):
    check_scores_of_a_large_mean(131072 - 4096, T, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2048])
@pytest.mark.parametrize("start", [0, 100, 131072 - 4096])
def test_the_kernel_scores_blocks_on_the_device(start, T):
    check_scores_of_a_large_mean(start, T)
