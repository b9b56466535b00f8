"""Calibration: moments against brute force, four devices, the command end to end, and every refusal."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from hf_variants import write_variant

from convert.calibration import far_values
from convert.calibration.calibrate import (
    CalibrationOptions,
    _gram,
    calibrate,
    calibration_windows,
    choose_basis,
    collect_moments,
    stored_moments,
)
from convert.calibration.make_basis import make_basis
from convert.calibration.moments import Moments
from convert.conversion import convert
from zdc_jax import Checkpoint, CompressionPlan, LanguageModel, generate, load
from zdc_jax.errors import CalibrationError, CheckpointError, PlanError, TextError
from zdc_jax.loading import stored_basis
from zdc_jax.model.observe import observe
from zdc_jax.model.transformer import Transformer
from zdc_jax.planning.spectrum import plan_from_spectrum

VARIANT = "llama-head-dim-80"  # Heads are large enough to be cut in half.


def reference(tiny: TinyModel, tokens: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Return q, k, v, o [K, P, H] of every layer over all tokens, from a plain float64 model."""
    config, seen = tiny.config, []
    H, K = config.head_dim, config.num_kv_heads
    layers, embeddings = jax.tree.map(lambda x: np.asarray(x, np.float64), (tiny.layers, tiny.embeddings))
    time = np.arange(tokens.shape[1])
    x = embeddings["tokens"][tokens]
    if not config.is_rotary:
        x = x + embeddings["positions"][time + config.position_offset]

    def norm(x, weights):
        x = x - x.mean(-1, keepdims=True) if "bias" in weights else x
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
        return x * weights["scale"] + weights.get("bias", 0)

    def turned(x):
        if not config.is_rotary:
            return x
        turn = np.exp(1j * np.outer(time, config.layers[0].rope.theta ** -(np.arange(0, H, 2) / H)))
        z = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * turn[:, None]
        return np.concatenate([z.real, z.imag], -1)

    def attend(q, k, v):
        k, v = (np.repeat(a, config.group_size, axis=2) for a in (k, v))
        scores = np.einsum("BTNH,BSNH->BNTS", q, k) / np.sqrt(H)
        weights = np.exp(np.where(np.tri(len(time), dtype=bool), scores, -np.inf))
        return np.einsum("BNTS,BSNH->BTNH", weights / weights.sum(-1, keepdims=True), v)

    def feed_forward(x, weights):
        def through(name, x):
            return x @ weights[name] + weights.get(f"{name}_bias", 0)

        if config.family == "opt":
            return through("down", np.maximum(through("up", x), 0))
        gate = through("gate", x)
        return through("down", gate / (1 + np.exp(-gate)) * through("up", x))

    for layer in layers:
        weights, hidden = layer["attention"], norm(x, layer["attention_norm"])
        q, k, v = (
            np.einsum("BTD,DNH->BTNH", hidden, weights[name]) + weights.get(f"{name}_bias", 0)
            for name in "qkv"
        )
        q, k = turned(q), turned(k)
        o = attend(q, k, v)

        def rows(a):
            return a.reshape(tokens.size, K, -1, H).swapaxes(0, 1).reshape(K, -1, H)

        seen.append({"q": rows(q), "k": rows(k), "v": rows(v), "o": rows(o)})
        x = x + np.einsum("BTNH,NHD->BTD", o, weights["o"]) + weights.get("o_bias", 0)
        x = x + feed_forward(norm(x, layer["mlp_norm"]), layer["mlp"])
    return seen


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.matrix
def test_moments_equal_brute_force(tiny: TinyModel, batch):
    tokens = tiny.tokens(3, 32)  # With three windows, batches of two leave a remainder.
    moments = collect_moments(tiny.dense, tokens, fingerprint="x", batch=batch)
    for index, vectors in enumerate(reference(tiny, tokens)):
        for name, x in vectors.items():
            gram = np.einsum("KPH,KPI->KHI", x, x)
            np.testing.assert_allclose(getattr(moments, name)[index], gram, atol=2e-5 * np.abs(gram).max())
            sums = getattr(moments, f"{name}_sum")[index]
            np.testing.assert_allclose(sums, x.sum(1), atol=2e-5 * np.abs(x).sum(1).max())
        heads = {name: x.reshape(len(x), 3, -1, x.shape[-1]) for name, x in vectors.items()}
        scores = np.einsum("KBQH,KBTH->KBQT", heads["q"], heads["k"])
        weighted = heads["v"] * np.sqrt((scores**2).sum(2))[..., None]
        scored = np.einsum("KBTH,KBTI->KHI", weighted, weighted)
        np.testing.assert_allclose(moments.v_scored[index], scored, atol=5e-5 * np.abs(scored).max())
    assert moments.num_tokens == 96


def test_values_are_weighed_by_the_attention_of_later_queries(tiny_llama: TinyModel, monkeypatch):
    monkeypatch.setattr(far_values, "QUERIES", 8)  # 20 queries leave a remainder.
    tokens, window, sinks = tiny_llama.tokens(2, 80), 64, 4
    moments = collect_moments(tiny_llama.dense, tokens, fingerprint="x", batch=2, far=True)
    time = np.arange(80)
    is_far = (time[None] <= time[:, None] - window) & (time[None] >= sinks)
    assert moments.v_far is not None
    assert moments.far is not None
    for layer, vectors in enumerate(reference(tiny_llama, tokens)):
        heads = {name: x.reshape(len(x), 2, 80, -1, x.shape[-1]) for name, x in vectors.items()}
        K, V = heads["k"][:, :, :, 0], heads["v"][:, :, :, 0]
        scores = np.einsum("KBQGH,KBTH->KBGQT", heads["q"], K) / np.sqrt(K.shape[-1])
        weights = np.exp(np.where(np.tri(80, dtype=bool), scores, -np.inf))
        attended = (weights / weights.sum(-1, keepdims=True) * is_far)[:, :, :, ::4].sum((2, 3))
        np.testing.assert_allclose(moments.far[layer], attended.sum((1, 2)), rtol=1e-4)
        values = np.einsum("KBT,KBTH->KH", attended, V)
        np.testing.assert_allclose(moments.v_far[layer], values, atol=1e-4 * np.abs(values).max())


def test_sliding_layers_attend_to_no_token_beyond_their_window():
    assert far_values._list_far(100, None).any()
    assert not far_values._list_far(100, 64).any()
    assert not far_values._list_far(68, None)[:, 4:].any()


def test_bfloat16_activations_are_summed_in_float32():
    # A bfloat16 sum of 4096 values near one would stop at 256.
    x = 1 + 0.1 * jax.random.normal(jax.random.key(0), (1, 2048, 4, 8), jnp.bfloat16)
    sums = _gram("q", x, jnp.ones(1), num_kv_heads=2)
    assert {value.dtype for value in sums.values()} == {jnp.dtype("float32")}
    exact = np.asarray(x, np.float64).reshape(2048, 2, 2, 8)
    np.testing.assert_allclose(sums["q"], np.einsum("TKGH,TKGI->KHI", exact, exact), rtol=5e-5)
    np.testing.assert_allclose(sums["q_sum"], exact.sum((0, 2)), rtol=5e-5)


@pytest.mark.full
def test_bfloat16_models_keep_running_sums_in_float32(tiny_opt: TinyModel):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_opt.dense)
    tokens = tiny_opt.tokens(1, 16)
    once = collect_moments(half, tokens, fingerprint="x")
    often = collect_moments(half, np.repeat(tokens, 99, axis=0), fingerprint="x")
    for name in ("q", "k", "v", "o", "q_sum", "k_sum", "v_sum", "o_sum"):
        expected = 99 * getattr(once, name)
        np.testing.assert_allclose(getattr(often, name), expected, atol=1e-5 * np.abs(expected).max())
    exact = collect_moments(tiny_opt.dense, tokens, fingerprint="x")
    assert 1e-4 < np.abs(once.q - exact.q).max() / np.abs(exact.q).max() < 3e-2


FOUR_DEVICES = """
import sys
import numpy as np, jax
sys.path.insert(0, {tests!r})
from conftest import LLAMA, TinyModel
from convert.calibration.calibrate import collect_moments
assert len(jax.devices()) == 4
tiny = TinyModel(LLAMA)
moments = collect_moments(tiny.dense, tiny.tokens(6, 32), fingerprint="x", batch=4)
np.savez({out!r}, **{{name: getattr(moments, name) for name in "qkvo"}})
"""


def test_keys_with_a_large_bias_are_observed_before_they_are_rounded(tiny_llama: TinyModel):
    # In bfloat16 a key of 400 is rounded to an even number.
    tiny = TinyModel(replace(tiny_llama.config, qkv_bias=True))
    for layer in tiny.layers:
        layer["attention"]["k_bias"] = jnp.full_like(layer["attention"]["k_bias"], 400)
    tokens = tiny.tokens(1, 64)
    network = Transformer(tiny.config, CompressionPlan.full(tiny.config), tiny.embeddings, tiny.layers)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), network)
    whole = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    # Only the first layer has equal inputs in both.
    (rounded, kept), *_ = observe(half, jnp.asarray(tokens), lambda seen: (seen.k, seen.exact_k))
    expected, *_ = observe(whole, jnp.asarray(tokens), lambda seen: seen.k)
    assert rounded.dtype == jnp.bfloat16
    assert jnp.abs(rounded - expected).max() > 0.5
    assert jnp.abs(kept - expected).max() < 0.05


@pytest.mark.full
def test_four_devices_equal_one(tiny_llama: TinyModel, tmp_path):
    out = tmp_path / "four.npz"
    script = FOUR_DEVICES.format(tests=str(Path(__file__).parents[1]), out=str(out))
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, **flags})
    one = collect_moments(tiny_llama.dense, tiny_llama.tokens(6, 32), fingerprint="x")
    for name, value in np.load(out).items():
        expected = getattr(one, name)
        np.testing.assert_allclose(value, expected, atol=1e-5 * np.abs(expected).max())


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Return a folder with two topics, in words that the variants' tokenizer knows."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for topic in ("a", "b"):
        (folder / topic).mkdir()
        words = " ".join(f"w{i}" for i in rng.integers(3, 96, 1500))
        (folder / topic / "text.txt").write_text(words)
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert(write_variant(VARIANT, folder / "hf"), folder / "model", progress=False)
    return folder / "model"


@pytest.fixture
def model(converted, tmp_path) -> Path:
    """Return a fresh copy that is not calibrated."""
    return Path(shutil.copytree(converted, tmp_path / "model"))


OPTIONS = CalibrationOptions(tokens=1024, context=64, qk="auto", vo="auto")


@pytest.fixture(scope="module")
def calibrated(converted, texts, tmp_path_factory) -> Path:
    """Return a calibrated copy, which tests must not change."""
    folder = shutil.copytree(converted, tmp_path_factory.mktemp("calibrated") / "model")
    calibrate(folder, [texts], OPTIONS, progress=False)
    return Path(folder)


def test_end_to_end(calibrated):
    checkpoint = Checkpoint.open(calibrated)
    basis, moments = stored_basis(checkpoint), Moments.load(checkpoint.calibration_path / "moments")
    for stored in (basis, moments):
        assert (stored.num_tokens, stored.context_length) == (1024, 64)
        assert stored.fingerprint == checkpoint.fingerprint
    assert basis.record["topics"] == ["a", "b"]
    plan = CompressionPlan.full(checkpoint.config)
    tokens = jnp.asarray(np.random.default_rng(1).integers(3, 96, (1, 20)))
    dense = np.asarray(load(calibrated).network(tokens))
    rotated = np.asarray(load(calibrated, plan).network(tokens))
    assert np.abs(rotated - dense).max() < 1e-4 * np.abs(dense).max()


def test_auto_records_what_it_compared(calibrated, texts):
    # A candidate's recorded perplexity is that of its plan at half rank on the first windows.
    checkpoint = Checkpoint.open(calibrated)
    basis = stored_basis(checkpoint)
    assert basis.record["auto_rank"] == 32
    for side, chosen in (("qk", basis.qk_kind), ("vo", basis.vo_kind)):
        candidates = basis.record["auto"][side]
        assert set(candidates) == {"stacked", "balanced"}
        assert candidates[chosen] == min(candidates.values()) < max(candidates.values())
    windows, _ = calibration_windows(checkpoint, [texts], 64, OPTIONS)
    moments, _ = stored_moments(checkpoint)
    weights = [checkpoint.layer(index)["attention"]["o"] for index in range(checkpoint.config.num_layers)]
    plan = CompressionPlan.uniform(checkpoint.config, qk=32, v=80)
    candidate = make_basis(moments, weights, qk="stacked", vo="balanced")
    network = load(calibrated, plan, basis=candidate).network
    logits = np.asarray(network(jnp.asarray(windows[:4])), np.float64)[:, :-1]
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    nll = -np.take_along_axis(log_p, windows[:4, 1:, None], -1).mean()
    assert basis.record["auto"]["qk"]["stacked"] == pytest.approx(np.exp(nll), rel=1e-5)


@pytest.mark.parametrize("kinds", [("stacked", "balanced"), ("balanced", "stacked")])
def test_auto_chooses_each_side_apart(calibrated, monkeypatch, kinds):
    checkpoint = Checkpoint.open(calibrated)
    moments, _ = stored_moments(checkpoint)

    # The basis replaces its network: perplexity falls with each side of the wanted kind.
    def stand_in(*_, basis, dtype):
        return LanguageModel((basis.qk_kind, basis.vo_kind))

    monkeypatch.setattr("convert.calibration.calibrate.load", stand_in)

    def wrong(found):
        return sum(one != other for one, other in zip(found, kinds, strict=True))

    def nll(found, _):
        return np.array([float(wrong(found))])

    monkeypatch.setattr("convert.calibration.calibrate.window_nll", nll)
    basis = choose_basis(checkpoint, moments, np.zeros((1, 64), np.int32), OPTIONS)
    assert (basis.qk_kind, basis.vo_kind) == kinds


def test_an_existing_basis_is_kept_unless_it_may_be_replaced(calibrated, texts, monkeypatch):
    # The refusal comes before any text is read.
    before = stored_basis(Checkpoint.open(calibrated)).coordinates_hash
    monkeypatch.setattr("convert.calibration.calibrate.read_documents", None)
    for given in ([texts], []):
        with pytest.raises(CheckpointError, match=r"model is already calibrated.*--overwrite"):
            calibrate(calibrated, given, replace(OPTIONS, qk="stacked"), progress=False)
    assert stored_basis(Checkpoint.open(calibrated)).coordinates_hash == before


def test_few_tokens_are_said_before_the_work(model, texts, caplog, monkeypatch):
    monkeypatch.setattr("convert.calibration.calibrate.load", None)
    with pytest.raises(TypeError):
        calibrate(model, [texts], OPTIONS, progress=False)
    assert "calibrating on 1,024 tokens only; an accurate basis needs at least 32,768" in caplog.text


def test_a_new_basis_from_stored_moments(calibrated, tmp_path):
    model = shutil.copytree(calibrated, tmp_path / "model")
    before = stored_basis(Checkpoint.open(model)).record
    options = CalibrationOptions(qk="pairs", vo="output", reduction="kmeans", seed=5, center=True)
    again = calibrate(model, [], options, overwrite=True, progress=False)
    assert (again.qk_kind, again.vo_kind) == ("pairs", "output")
    # The moments still come from the first call, whatever the options of the second.
    for name in ("reduction", "seed", "topics", "seconds_moments"):
        assert again.record[name] == before[name]
    assert again.record["center"]
    assert load(model, CompressionPlan.full(Checkpoint.open(model).config)).basis.qk_kind == "pairs"
    automatic = calibrate(model, [], overwrite=True, progress=False)
    assert (automatic.qk_kind, automatic.vo_kind) == ("balanced", "balanced")


@pytest.mark.full
def test_kmeans_route(model, texts):
    options = CalibrationOptions(
        tokens=1024, context=64, reduction="kmeans", clusters=32, qk="stacked", vo="balanced"
    )
    basis = calibrate(model, [texts], options, progress=False)
    assert basis.num_tokens == 512
    assert json.loads(json.dumps(basis.record))["reduction"] == "kmeans"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"batch": 0}, "batch=0"),
        ({"context": 1}, "context=1"),
        ({"context": 0}, "context=0"),
        ({"seed": -1}, "seed=-1"),
        ({"prune": 1.0}, "prune=1.0"),
        ({"prune": -0.1}, "prune=-0.1"),
        ({"clusters": 0}, "clusters=0"),
    ],
)
def test_impossible_options_are_refused(options, named):
    with pytest.raises(CalibrationError, match=named):
        CalibrationOptions(**options)


def test_windows_are_as_long_as_the_model_reads():
    assert CalibrationOptions().window_length(LLAMA) == 256
    assert CalibrationOptions().window_length(replace(LLAMA, max_positions=131_072)) == 8192
    assert CalibrationOptions(context=100).window_length(LLAMA) == 100
    with pytest.raises(CalibrationError, match="context=257: exceeds the model's 256 positions"):
        CalibrationOptions(context=257).window_length(LLAMA)


def test_refusals_leave_nothing(model, texts, tmp_path):
    with pytest.raises(CalibrationError, match="128 positions"):
        calibrate(model, [texts], CalibrationOptions(context=129), progress=False)
    short = tmp_path / "short.txt"
    short.write_text("w3 w4")
    with pytest.raises(TextError, match=r"too little text for one window of 64 tokens.* has 2 tokens"):
        calibrate(model, [short], OPTIONS, progress=False)
    with pytest.raises(CheckpointError, match="moments"):
        calibrate(model, [], OPTIONS, progress=False)
    with pytest.raises(CheckpointError, match="float99"):
        calibrate(model, [texts], OPTIONS, dtype="float99", progress=False)
    too_many = replace(OPTIONS, reduction="kmeans", clusters=10_000)
    with pytest.raises(CalibrationError, match="clusters=10000"):
        calibrate(model, [texts], too_many, progress=False)
    assert not (model / "calibration").exists()
    (model / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing; run `zdc convert` again"):
        calibrate(model, [texts], OPTIONS, progress=False)


def test_pairs_are_refused_past_norms_of_queries_and_keys(texts, tmp_path):
    model = tmp_path / "model"
    convert(write_variant("qwen3", tmp_path / "hf"), model, progress=False)
    with pytest.raises(CalibrationError, match="qk='pairs': cannot be folded past the norms of q and k"):
        calibrate(model, [texts], replace(OPTIONS, qk="pairs"), progress=False)
    assert not (model / "calibration").exists()


def test_a_failing_calibration_keeps_basis_and_profile(calibrated, texts, tmp_path, monkeypatch):
    model = Path(shutil.copytree(calibrated, tmp_path / "model"))

    def files():
        return {
            path: path.read_bytes()
            for kind in ("basis", "profile")
            for path in (model / "calibration" / kind).iterdir()
        }

    before = files()
    assert len(before) == 4

    def failing(*_, **__):
        raise RuntimeError

    monkeypatch.setattr("convert.calibration.calibrate.collect_profile", failing)
    with pytest.raises(RuntimeError):
        calibrate(
            model, [texts], replace(OPTIONS, qk="stacked", vo="stacked"), overwrite=True, progress=False
        )
    assert files() == before


def test_plans_need_a_basis_of_the_same_model(calibrated, converted, tmp_path):
    config = Checkpoint.open(converted).config
    with pytest.raises(CalibrationError, match="run `zdc calibrate"):
        load(converted, CompressionPlan.full(config))
    # The same model in another precision has equal shapes but other weights.
    other = tmp_path / "other"
    convert(converted.parent / "hf", other, dtype="float16", progress=False)
    shutil.copytree(calibrated / "calibration", other / "calibration")
    with pytest.raises(CalibrationError, match="calibrated on model"):
        load(other, CompressionPlan.full(config))
    with pytest.raises(CalibrationError, match="has moments of another model"):
        calibrate(other, [], overwrite=True, progress=False)
    with pytest.raises(PlanError, match="'elsewhere'"):
        load(calibrated, CompressionPlan.full(config).for_model("elsewhere"))


def test_plans_need_the_basis_they_were_made_for(calibrated, tmp_path):
    # A new basis of the same model is refused; the old basis still fits the plan.
    model = shutil.copytree(calibrated, tmp_path / "model")
    old = stored_basis(Checkpoint.open(model))
    plan = plan_from_spectrum(old, budget=0.5)
    assert load(model, plan).plan == plan
    options = CalibrationOptions(qk="stacked", vo="stacked")
    new = calibrate(model, [], options, overwrite=True, progress=False)
    with pytest.raises(PlanError, match=f"{old.coordinates_hash}.*{new.coordinates_hash}.* `zdc plan`"):
        load(model, plan)
    assert load(model, plan, basis=old).plan == plan


@pytest.mark.full
def test_contexts_beyond_the_calibration_warn(calibrated):
    compressed = load(calibrated, CompressionPlan.full(Checkpoint.open(calibrated).config))
    with pytest.warns(UserWarning, match="contexts of 64"):
        generate(compressed, "w3 w4 w5", 62)
    generate(compressed, "w3 w4 w5", 61)  # Warnings are errors, and calibration saw 64 tokens.
