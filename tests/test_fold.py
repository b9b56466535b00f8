"""Folding commutes with the layer it is folded into, for random weights and bases, in float64."""

from dataclasses import replace

import numpy as np
from conftest import LLAMA, OPT
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.basis import pair_map
from zdc_jax.basis import Basis
from zdc_jax.fold import fold_attention
from zdc_jax.model.layers import rope_frequencies
from zdc_jax.plan import LayerRanks

N, K, H, D = 4, 2, 32, 24
G = N // K
FULL = LayerRanks(H, H)


def random_basis(rng, *, center=False, pairs=False) -> Basis:
    """One layer with well-conditioned maps that no calibration would give."""
    draw = lambda: np.linalg.qr(rng.normal(size=(1, K, H, H)))[0] * rng.uniform(0.5, 2, (1, K, 1, H))
    order = np.stack([rng.permutation(H // 2) for _ in range(K)])[None].astype(np.int32)
    nothing = np.zeros((1, K, H))
    return Basis(
        k_map=pair_map(order) if pairs else draw(),
        v_map=draw(),
        qk_kind="pairs" if pairs else "balanced",
        vo_kind="balanced",
        qk_spectrum=nothing,
        vo_spectrum=nothing,
        qk_error=nothing,
        vo_error=nothing,
        qk_condition=nothing,
        vo_condition=nothing,
        num_tokens=1,
        context_length=1,
        fingerprint="",
        pairs=order if pairs else None,
        key_mean=rng.normal(size=(1, K, H)) if center else None,
        value_mean=rng.normal(size=(1, K, H)) if center else None,
    )


def random_weights(rng, biases: bool) -> dict[str, np.ndarray]:
    shapes = {"q": (D, N, H), "k": (D, K, H), "v": (D, K, H), "o": (N, H, D)}
    if biases:
        shapes |= {"q_bias": (N, H), "k_bias": (K, H), "v_bias": (K, H), "o_bias": (D,)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def project(x, weights, name):
    return np.einsum("TD,DNH->TNH", x, weights[name]) + weights.get(f"{name}_bias", 0)


def attend(x, weights, scores):
    """Output of a causal layer in float64, and its softmax's rows."""
    v = np.repeat(project(x, weights, "v"), G, axis=1)
    mask = np.tril(np.ones((len(x), len(x)), bool))
    weight = np.exp(np.where(mask[:, None], scores, -np.inf))
    weight /= weight.sum(-1, keepdims=True)
    o = np.einsum("TNS,SNZ->TNZ", weight, v)
    return np.einsum("TNZ,NZD->TD", o, weights["o"]) + weights.get("o_bias", 0)


def scores_of(q, k):
    return np.einsum("TNH,SNH->TNS", q, np.repeat(k, G, axis=1)) / np.sqrt(H) / 10


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), biases=st.booleans(), center=st.booleans())
def test_folded_layers_are_the_same_function(seed, biases, center):
    rng = np.random.default_rng(seed)
    config = replace(OPT, num_kv_heads=K, embed_dim=D)
    old, basis = random_weights(rng, biases), random_basis(rng, center=center)
    new = fold_attention(old, config, basis, 0, FULL, full_width=False)
    x = rng.normal(size=(7, D))
    before = attend(x, old, scores_of(project(x, old, "q"), project(x, old, "k")))
    after = attend(x, new, scores_of(project(x, new, "q"), project(x, new, "k")))
    np.testing.assert_allclose(after, before, atol=1e-9 * np.abs(before).max())
    assert not np.allclose(new["k"], old["k"])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), qk=st.sampled_from([0, 16]), v=st.sampled_from([0, 16]))
def test_ranks_are_nested(seed, qk, v):
    rng = np.random.default_rng(seed)
    config = replace(OPT, num_kv_heads=K, embed_dim=D)
    old, basis = random_weights(rng, biases=True), random_basis(rng)
    full = fold_attention(old, config, basis, 0, FULL, full_width=True)
    cut = fold_attention(old, config, basis, 0, LayerRanks(qk, v), full_width=False)
    kept = {"q": qk, "k": qk, "q_bias": qk, "k_bias": qk, "v": v, "v_bias": v}
    for name, rank in kept.items():
        np.testing.assert_allclose(cut[name], full[name][..., :rank], atol=1e-12)
    np.testing.assert_allclose(cut["o"], full["o"][:, :v], atol=1e-12)
    np.testing.assert_array_equal(cut["o_bias"], old["o_bias"])


def test_post_rope_leaves_the_projections_alone():
    rng = np.random.default_rng(0)
    config = replace(LLAMA, embed_dim=D)
    old, basis = random_weights(rng, biases=False), random_basis(rng, center=True)
    new = fold_attention(old, config, basis, 0, LayerRanks(16, 32), full_width=False)
    np.testing.assert_array_equal(new["q"], old["q"])
    assert new["q_rotation"].shape == new["k_rotation"].shape == (K, H, 16)
    q, k = rng.normal(size=(5, H)), rng.normal(size=(6, H))
    full = fold_attention(old, config, basis, 0, FULL, full_width=False)
    shifted = k - basis.key_mean[0, 1]
    rotated = (q @ full["q_rotation"][1]) @ (k @ full["k_rotation"][1] + full["k_shift"][1]).T
    np.testing.assert_allclose(rotated, q @ shifted.T, atol=1e-9)


def test_pairs_commute_with_the_rotary_embedding():
    """Rotate halves, then permute = permute into interleaved pairs, then rotate at the stored frequencies."""
    rng = np.random.default_rng(0)
    config = replace(LLAMA, embed_dim=D)
    old, basis = random_weights(rng, biases=False), random_basis(rng, pairs=True)
    new = fold_attention(old, config, basis, 0, FULL, full_width=False)
    x, angles = rng.normal(size=(9, D)), rope_frequencies(LLAMA.rope, H)
    turn = lambda z, theta: z * np.exp(1j * np.arange(9)[:, None, None] * theta)
    halves = project(x, old, "k")
    before = turn(halves[..., : H // 2] + 1j * halves[..., H // 2 :], angles)
    woven = project(x, new, "k")
    after = turn(woven[..., 0::2] + 1j * woven[..., 1::2], new["frequencies"])
    for head in range(K):
        np.testing.assert_allclose(after[:, head], before[:, head][:, basis.pairs[0, head]], atol=1e-9)
