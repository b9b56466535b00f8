"""Calibration: moments against brute force, one device against four, end to end, and every refusal."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel
from hf_variants import write_variant

from convert.calibrate import CalibrationOptions, calibrate, collect_moments
from convert.conversion import convert
from zdc_jax import Checkpoint, CompressionPlan, generate, load
from zdc_jax.errors import CalibrationError, CheckpointError, PlanError, TextError

VARIANT = "llama-gqa"


def brute_force(tiny: TinyModel, tokens: np.ndarray) -> list[dict[str, np.ndarray]]:
    """q, k, v, o [K, P, H] of every layer over all tokens, taken from the network one layer at a time."""
    network = tiny.dense
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = network.embed(jnp.asarray(tokens), positions)
    K, seen = tiny.config.num_kv_heads, []
    for index in range(tiny.config.num_layers):
        block = jax.tree.map(lambda leaf, index=index: leaf[index], network.runs[0])

        def attend(q, k, v):
            G = q.shape[2] // K
            keys, values = (jnp.repeat(a, G, axis=2) for a in (k, v))
            scores = jnp.einsum("BTNH,BSNH->BNTS", q, keys) / np.sqrt(q.shape[-1])
            mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
            o = jnp.einsum("BNTS,BSNH->BTNH", weights, values)
            split = lambda a: np.moveaxis(
                np.asarray(a, np.float64).reshape(*a.shape[:2], K, -1, a.shape[-1]), 2, 0
            )
            seen.append({n: split(a).reshape(K, -1, a.shape[-1]) for n, a in zip("qkvo", (q, k, v, o))})  # noqa: B905
            return o

        x = block(x, positions, attend)
    return seen


@pytest.mark.parametrize("batch", [1, 2])
def test_moments_equal_brute_force(tiny: TinyModel, batch):
    tokens = tiny.tokens(3, 32)  # Three windows: batches of two leave a remainder.
    moments = collect_moments(tiny.dense, tokens, fingerprint="x", batch=batch)
    for index, vectors in enumerate(brute_force(tiny, tokens)):
        for name, x in vectors.items():
            gram = np.einsum("KPH,KPI->KHI", x, x)
            np.testing.assert_allclose(getattr(moments, name)[index], gram, atol=2e-5 * np.abs(gram).max())
            sums = getattr(moments, f"{name}_sum")[index]
            np.testing.assert_allclose(sums, x.sum(1), atol=2e-5 * np.abs(x).sum(1).max())
    assert moments.num_tokens == 96


FOUR_DEVICES = """
import sys
import numpy as np, jax
sys.path.insert(0, {tests!r})
from conftest import LLAMA, TinyModel
from convert.calibrate import collect_moments
assert len(jax.devices()) == 4
tiny = TinyModel(LLAMA)
moments = collect_moments(tiny.dense, tiny.tokens(6, 32), fingerprint="x", batch=4)
np.savez({out!r}, **{{name: getattr(moments, name) for name in "qkvo"}})
"""


def test_four_devices_equal_one(tiny_llama: TinyModel, tmp_path):
    out = tmp_path / "four.npz"
    script = FOUR_DEVICES.format(tests=str(Path(__file__).parents[1]), out=str(out))
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **flags}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    one = collect_moments(tiny_llama.dense, tiny_llama.tokens(6, 32), fingerprint="x")
    for name, value in np.load(out).items():
        expected = getattr(one, name)
        np.testing.assert_allclose(value, expected, atol=1e-5 * np.abs(expected).max())


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Two topics of words that the variants' tokenizer knows."""
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
    """A fresh copy, not calibrated."""
    return Path(shutil.copytree(converted, tmp_path / "model"))


OPTIONS = CalibrationOptions(tokens=1024, context=64)


def test_end_to_end(model, texts):
    basis = calibrate(model, [texts], OPTIONS, progress=False)
    assert basis.num_tokens == 1024
    assert basis.record["topics"] == ["a", "b"]
    for side, chosen in (("qk", basis.qk_kind), ("vo", basis.vo_kind)):
        candidates = basis.record["auto"][side]
        assert set(candidates) == {"stacked", "balanced"}
        assert candidates[chosen] == min(candidates.values())
    plan = CompressionPlan.full(Checkpoint.open(model).config)
    tokens = jnp.asarray(np.random.default_rng(1).integers(3, 96, (1, 20)))
    dense = np.asarray(load(model).network(tokens))
    rotated = np.asarray(load(model, plan).network(tokens))
    assert np.abs(rotated - dense).max() < 1e-4 * np.abs(dense).max()


def test_a_new_basis_from_stored_moments(model, texts):
    calibrate(model, [texts], OPTIONS, progress=False)
    again = calibrate(model, [], CalibrationOptions(qk="pairs", vo="output"), progress=False)
    assert (again.qk_kind, again.vo_kind) == ("pairs", "output")
    assert load(model, CompressionPlan.full(Checkpoint.open(model).config)).basis.qk_kind == "pairs"


def test_kmeans_route(model, texts):
    options = CalibrationOptions(tokens=1024, context=64, reduction="kmeans", clusters=32, qk="stacked")
    basis = calibrate(model, [texts], options, progress=False)
    assert basis.num_tokens == 512
    assert json.loads(json.dumps(basis.record))["reduction"] == "kmeans"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"batch": 0}, "batch=0"),
        ({"context": 1}, "context=1"),
        ({"prune": 1.0}, "prune=1.0"),
        ({"clusters": 0}, "clusters=0"),
    ],
)
def test_impossible_options_are_refused(options, named):
    with pytest.raises(CalibrationError, match=named):
        CalibrationOptions(**options)


def test_refusals_leave_nothing(model, texts, tmp_path):
    with pytest.raises(CalibrationError, match="128 positions"):
        calibrate(model, [texts], CalibrationOptions(context=129), progress=False)
    short = tmp_path / "short.txt"
    short.write_text("w3 w4")
    with pytest.raises((CalibrationError, TextError), match="2"):
        calibrate(model, [short], OPTIONS, progress=False)
    with pytest.raises(CheckpointError, match="moments"):
        calibrate(model, [], OPTIONS, progress=False)
    assert not (model / "calibration").exists()


def test_plans_need_a_basis_of_the_same_model(model, texts, tmp_path):
    config = Checkpoint.open(model).config
    with pytest.raises(CalibrationError, match="zdc calibrate"):
        load(model, CompressionPlan.full(config))
    calibrate(model, [texts], OPTIONS, progress=False)
    convert(write_variant("llama-tied", tmp_path / "hf"), tmp_path / "other", progress=False)
    shutil.copytree(model / "calibration", tmp_path / "other" / "calibration")
    other = Checkpoint.open(tmp_path / "other").config
    with pytest.raises(CalibrationError):
        load(tmp_path / "other", CompressionPlan.full(other))
    with pytest.raises(PlanError, match="'elsewhere'"):
        load(model, CompressionPlan.full(config).for_model("elsewhere"))


def test_contexts_beyond_the_calibration_warn(model, texts):
    calibrate(model, [texts], OPTIONS, progress=False)
    compressed = load(model, CompressionPlan.full(Checkpoint.open(model).config))
    with pytest.warns(UserWarning, match="contexts of 64"):
        generate(compressed, "w3 w4 w5", 62)
