"""Keys stored as latents from before the rotary embedding, compared with NumPy in float64."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel

from convert.calibration.calibrate import collect_moments
from convert.calibration.moments import Moments
from zdc_jax.cache.specs.latents import Latents
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.config import ModelConfig
from zdc_jax.errors import CalibrationError, PlanError
from zdc_jax.model.attention import Attention
from zdc_jax.model.observe import Seen, observe
from zdc_jax.plan import CompressionPlan

SHORT = replace(LLAMA, layers=LLAMA.layers[:2])
K, G, H, R, Z = LLAMA.num_kv_heads, LLAMA.group_size, LLAMA.head_dim, 16, 16
B, S, SINKS, WINDOW = 2, 24, 2, 5


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel(SHORT)


def palu(config: ModelConfig = SHORT, qk: int = R, v: int = Z, **near: int) -> CompressionPlan:
    return replace(CompressionPlan.uniform(config, qk=qk, v=v, **near), method="palu", settings=None)


def turned(x: np.ndarray, sign: int = 1) -> np.ndarray:
    """Apply rotary embedding to x [B, T, N, H] at positions 0, 1, … as multiplication by complex numbers."""
    angles = np.arange(x.shape[1])[:, None] * 10_000.0 ** -(np.arange(H // 2) / (H // 2))
    y = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * np.exp(sign * 1j * angles)[:, None]
    return np.concatenate([y.real, y.imag], -1)


def by_loops(layer: dict, basis, x: np.ndarray) -> np.ndarray:
    """Compute attention's result [B, S, N, H] in the coordinates of the basis of values."""
    weights = {name: np.asarray(value, np.float64) for name, value in layer["attention"].items()}
    q, k, v = (np.einsum("BTD,DNH->BTNH", x, weights[name]) for name in "qkv")
    A, C = basis.k_latent[0][:, :, :R], basis.v_map[0]
    low = turned(np.einsum("BTKH,KHR,KIR->BTKI", k, A, A))
    q, k, v = turned(q), turned(k), np.einsum("BTKH,KHZ->BTKZ", v, C)
    o = np.zeros((B, S, K * G, H))
    for b, t, n in np.ndindex(B, S, K * G):
        near = np.array([j < SINKS or j > t - WINDOW for j in range(t + 1)])[:, None]
        keys = np.where(near, k[b, : t + 1, n // G], low[b, : t + 1, n // G])
        values = np.where(near | (np.arange(H) < Z), v[b, : t + 1, n // G], 0)
        scores = keys @ q[b, t, n] / np.sqrt(H)
        weights_of = np.exp(scores - scores.max())
        o[b, t, n] = weights_of @ values / weights_of.sum()
    return o


@pytest.mark.full
def test_far_keys_are_turned_back_from_latents(tiny):
    x = np.random.default_rng(0).normal(size=(B, S, SHORT.embed_dim))
    basis = tiny.basis()
    network = tiny.model(palu(window=WINDOW, sinks=SINKS), basis).network
    spec, attention = network.layer_caches[0], network.layers[0].attention
    positions = jnp.broadcast_to(jnp.arange(S), (B, S))
    q, k, v = spec.project(attention, jnp.asarray(x, jnp.float32), positions, None)
    new = NewTokens(k, v, positions, jnp.full(B, S))
    found = spec.attend_whole(q, new, None, Call(attention.scale)).o
    expected = by_loops(tiny.layers[0], basis, x)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_at_full_rank_nothing_changes(tiny):
    tokens = jnp.asarray(tiny.tokens(2, 16))
    network = tiny.model(palu(qk=H, v=H)).network
    expected = tiny.dense.hidden(tokens)
    np.testing.assert_allclose(network.hidden(tokens), expected, atol=1e-4, rtol=1e-4)


def keys(seen: Seen) -> jnp.ndarray:
    return seen.k


@pytest.mark.full
def test_latents_are_principal_components_of_keys_before_the_rotary_embedding(tiny):
    windows = tiny.tokens(3, 20)
    moments = collect_moments(tiny.dense, windows, fingerprint="tiny", batch=2)
    A = tiny.basis().k_latent
    np.testing.assert_allclose(A.swapaxes(-1, -2) @ A, np.broadcast_to(np.eye(H), A.shape), atol=1e-9)
    for layer, k in enumerate(observe(tiny.dense, jnp.asarray(windows), keys)):
        before = turned(np.asarray(k, np.float64), -1)
        gram = np.einsum("BTKH,BTKI->KHI", before, before)
        np.testing.assert_allclose(moments.k_before[layer], gram, atol=1e-5 * gram.max())
    seen = collect_moments(tiny.dense, tiny.tokens(4, 64, seed=1), fingerprint="tiny").k_before
    energy = A.swapaxes(-1, -2) @ seen @ A
    expected = np.linalg.eigvalsh(seen)[..., ::-1, None] * np.eye(H)
    np.testing.assert_allclose(energy, expected, atol=1e-9 * energy.max())


def test_moments_without_such_keys_still_load(tiny, tmp_path):
    moments = collect_moments(tiny.dense, tiny.tokens(2, 8), fingerprint="tiny")
    older = replace(moments, k_before=None)
    older.save(tmp_path / "moments")
    assert Moments.load(tmp_path / "moments").k_before is None


def test_the_factor_counts_as_held_and_read():
    spec = palu(window=16).layer_caches("bfloat16")[0]
    assert isinstance(spec, Latents)
    factor = K * H * R * 2
    assert spec.fixed_bytes == factor
    assert spec.bytes(64) == K * (64 * (R + Z) + 16 * 2 * H) * 2
    assert spec.bytes_read(64) == spec.bytes(64) + factor
    assert palu(window=16).bytes(64) == 2 * (spec.bytes(64) + factor) + 4


def test_layers_without_far_tokens_are_unmodified_rings(tiny):
    plan = palu(window=8)
    plan = replace(plan, layers=(replace(plan.layers[0], qk=0, v=0), plan.layers[1]))
    network = tiny.model(plan).network
    assert isinstance(network.layer_caches[0], PrefixRing)
    assert network.layers[0].attention.k_latent is None
    assert isinstance(network.layers[1].attention, Attention)
    assert network.layers[1].attention.k_latent.shape == (K, H, R)


def test_what_gives_no_latents_is_refused(tiny):
    with pytest.raises(PlanError, match="rotated=False: method 'palu' needs a calibrated basis"):
        replace(palu(qk=H, v=H), rotated=False)
    with pytest.raises(CalibrationError, match="the basis has no k_latent"):
        tiny.model(palu(), replace(tiny.basis(), k_latent=None))
