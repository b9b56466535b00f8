"""Presets: their bytes, what they need, and what they refuse."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel

from zdc_jax import presets
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.errors import CalibrationError, PlanError
from zdc_jax.loading import load
from zdc_jax.plan import CompressionPlan

SHAPES = {
    "Qwen2.5-Coder-1.5B": {"head_dim": 128, "num_kv_heads": 2},
    "SmolLM2-135M": {"head_dim": 64, "num_kv_heads": 3},
    "wide heads": {"head_dim": 256, "num_kv_heads": 1},
}
LIMITS = {"8bit": 0.53, "4bit": 0.30, "3bit": 0.22}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a converted model with a large key bias, not calibrated."""
    model = TinyModel(replace(LLAMA, qkv_bias=True))
    for layer in model.layers:
        layer["attention"]["k_bias"] = 40 * jnp.ones((LLAMA.num_kv_heads, LLAMA.head_dim))
    path = tmp_path_factory.mktemp("presets") / "model"
    model.write(path)
    basis = model.basis()
    return path, replace(basis, fingerprint=Checkpoint.open(path).fingerprint)


class Shape:
    """Enough of a checkpoint to make a plan for its shape."""

    fingerprint = "abc"

    def __init__(self, **heads: int):
        K = heads["num_kv_heads"]
        self.config: ModelConfig = replace(LLAMA, num_heads=2 * K, max_positions=16384, **heads)

    def layer(self, index: int) -> dict:
        return {"attention": {}}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_at_8192_tokens(shape, name):
    checkpoint = Shape(**SHAPES[shape])
    config = checkpoint.config
    basis = Basis.identity(config.num_layers, config.num_kv_heads, config.head_dim)
    plan = presets.coded_plan(checkpoint, basis, presets.preset_settings(name, checkpoint.config.head_dim))
    share = plan.bytes(8192) / CompressionPlan.full(config).bytes(8192)
    assert share <= LIMITS[name]
    assert share > 0.7 * LIMITS[name]


def test_what_presets_need_and_how_they_load(folder, tmp_path, caplog):
    path, basis = folder
    assert load(path, "none").plan.method == "zdc"
    for name in ("8bit", "4bit"):
        plan = load(path, name).plan
        assert (plan.rotated, plan.layers[0].shift) == (False, True)
    with pytest.raises(CalibrationError, match=r"plan='3bit': .* is not calibrated; run `zdc calibrate"):
        load(path, "3bit")
    with pytest.raises(PlanError, match=r"plan='small': .* has no judged plan; run `zdc compress`"):
        load(path, "small")
    with pytest.raises(PlanError, match=r"plan=.5bit.: no such file; .* 8bit, 4bit, 3bit, small, none"):
        load(path, "5bit")
    basis.save(path / "calibration" / "basis")
    plan = load(path, "4bit").plan
    assert (plan.rotated, plan.basis) == (True, basis.coordinates_hash)
    assert [ranks.shift for ranks in plan.layers] == basis.shifted
    plan.save(path / presets.PLAN_FILE)
    assert load(path, "small").plan == plan
    assert presets.default_plan(path) == plan
    assert presets.PLAN_FILE in caplog.text


def test_a_model_whose_scores_would_be_noisy_is_refused(folder, monkeypatch):
    path, basis = folder
    basis.save(path / "calibration" / "basis")
    monkeypatch.setattr(presets, "MOST_NOISE", 2 * presets.mean_noise(basis))
    assert load(path, "3bit").plan.settings.bits_k == 3
    monkeypatch.setattr(presets, "MOST_NOISE", presets.mean_noise(basis) / 2)
    with pytest.raises(PlanError, match=r"plan='3bit': would lose too much .* use plan='4bit'"):
        load(path, "3bit")


def test_noise_is_the_variance_of_scores_of_random_keys(folder):
    # Keys of independent noise with the mean energy of a coordinate, as after a random rotation.
    _, basis = folder
    rng, H = np.random.default_rng(0), LLAMA.head_dim
    q = rng.normal(size=(20_000, H)) * basis.q_rms[0, 0]
    noise = rng.normal(size=(20_000, H)) * np.sqrt((basis.k_rms[0, 0] ** 2).mean())
    found = np.einsum("nh,nh->n", q, noise) / H**0.5
    one = replace(basis, q_rms=basis.q_rms[:1, :1], k_rms=basis.k_rms[:1, :1])
    assert np.square(found).mean() == pytest.approx(presets.mean_noise(one), rel=0.1)
