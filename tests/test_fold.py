"""Folding, which must not change its layer, for random shapes, weights and bases, in float64."""

from dataclasses import replace
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import block_diag

from convert.calibration.make_basis import make_pair_map
from zdc_jax.basis import Basis
from zdc_jax.cache.codes.gaussian import turn
from zdc_jax.config import ModelConfig
from zdc_jax.errors import CalibrationError
from zdc_jax.fold import cast, fold_attention, placement
from zdc_jax.ops.rotary import rope_frequencies
from zdc_jax.plan import LayerRanks

T = 7


class Layer(NamedTuple):
    """A random attention layer, its input, and a well-conditioned random basis."""

    config: ModelConfig
    weights: dict[str, np.ndarray]
    basis: Basis
    x: np.ndarray

    @classmethod
    def draw(cls, family, shape, seed, *, biases=False, center=False, pairs=False) -> Self:
        K, G, H, D = shape
        rng, N = np.random.default_rng(seed), K * G
        config = replace(family, num_heads=N, num_kv_heads=K, head_dim=H, embed_dim=D)
        shapes = {"q": (D, N, H), "k": (D, K, H), "v": (D, K, H), "o": (N, H, D)}
        if biases:
            shapes |= {"q_bias": (N, H), "k_bias": (K, H), "v_bias": (K, H), "o_bias": (D,)}
        weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        return cls(config, weights, random_basis(rng, K, H, center, pairs), rng.normal(size=(T, D)))

    def fold(self, qk: int | None = None, v: int | None = None, **options) -> dict[str, np.ndarray]:
        H = self.config.head_dim
        ranks = LayerRanks(H if qk is None else qk, H if v is None else v)
        mean = None if self.basis.key_shift is None else self.basis.key_shift[0]
        options = {"full_width": False, "mean": mean} | options
        return fold_attention(self.weights, self.config, self.basis, 0, ranks, **options)

    def project(self, weights, name) -> np.ndarray:
        return np.einsum("TD,DNH->TNH", self.x, weights[name]) + weights.get(f"{name}_bias", 0)

    def attend(self, weights, q, k) -> np.ndarray:
        """Return the layer's causal output for these queries and keys."""

        def share(x):
            return np.repeat(x, self.config.group_size, axis=1)

        scores = np.einsum("TNH,SNH->NTS", q, share(k)) / 10
        probabilities = np.exp(np.where(np.tri(T, dtype=bool), scores, -np.inf))
        probabilities /= probabilities.sum(-1, keepdims=True)
        o = np.einsum("NTS,SNZ->TNZ", probabilities, share(self.project(weights, "v")))
        return np.einsum("TNZ,NZD->TD", o, weights["o"]) + weights.get("o_bias", 0)

    def turned(self, x, frequencies=None) -> np.ndarray:
        """Apply rotary embedding to x [T, N, H] in float64.

        With `frequencies`, pairs are interleaved; otherwise they are in halves.
        """
        H, woven = x.shape[-1], frequencies is not None
        angles = frequencies if woven else rope_frequencies(self.config.layers[0].rope, H, T)
        a, b = (x[..., 0::2], x[..., 1::2]) if woven else (x[..., : H // 2], x[..., H // 2 :])
        z = (a + 1j * b) * np.exp(1j * np.arange(T)[:, None, None] * angles)
        join = np.stack if woven else np.concatenate
        return join([z.real, z.imag], axis=-1).reshape(x.shape)


def random_basis(rng, K: int, H: int, center: bool, pairs: bool) -> Basis:
    # A scaled rotation has a condition number of at most 4.
    def draw():
        return np.linalg.qr(rng.normal(size=(1, K, H, H)))[0] * rng.uniform(0.5, 2, (1, K, 1, H))

    order = np.stack([rng.permutation(H // 2) for _ in range(K)])[None].astype(np.int32)
    unused = np.zeros((1, K, H))
    return Basis(
        k_map=make_pair_map(order) if pairs else draw(),
        v_map=draw(),
        qk_kind="pairs" if pairs else "balanced",
        vo_kind="balanced",
        **dict.fromkeys(("qk_spectrum", "vo_spectrum", "qk_error", "vo_error"), unused),
        **dict.fromkeys(("qk_condition", "vo_condition"), unused[..., 0]),
        num_tokens=1,
        context_length=1,
        fingerprint="",
        pairs=order if pairs else None,
        key_shift=rng.normal(size=(1, K, H)) if center and not pairs else None,
        value_mean=rng.normal(size=(1, K, H)) if center else None,
    )


def equal(actual, expected) -> None:
    np.testing.assert_allclose(actual, expected, atol=1e-10 * np.abs(expected).max(initial=1))


shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([4, 6, 16]), st.integers(3, 12))
"""K, G, H, D."""
seeds = st.integers(0, 10_000)
random_layers = settings(max_examples=40, deadline=None)


@random_layers
@given(shape=shapes, seed=seeds, biases=st.booleans())
def test_projections_come_out_rotated(shape, seed, biases):
    layer = Layer.draw(OPT, shape, seed, biases=biases)
    old, new, G = layer.weights, layer.fold(), layer.config.group_size
    assert placement(layer.config.layers[0], layer.basis) == "folded"
    assert new.keys() == old.keys()
    A_K, C = layer.basis.k_map[0], layer.basis.v_map[0]
    A_Q = np.linalg.inv(A_K).swapaxes(-1, -2)

    def of(name):
        return layer.project(old, name)

    equal(layer.project(new, "q"), np.einsum("TNH,NHR->TNR", of("q"), A_Q.repeat(G, axis=0)))
    equal(layer.project(new, "k"), np.einsum("TKH,KHR->TKR", of("k"), A_K))
    equal(layer.project(new, "v"), np.einsum("TKH,KHZ->TKZ", of("v"), C))
    equal(np.einsum("NHZ,NZD->NHD", C.repeat(G, axis=0), new["o"]), old["o"])


@random_layers
@given(shape=shapes, seed=seeds, biases=st.booleans(), center=st.booleans())
def test_folded_layers_are_the_same_function(shape, seed, biases, center):
    # Whole outputs show that centred values return in the bias, and that centred keys do not matter.
    layer = Layer.draw(OPT, shape, seed, biases=biases, center=center)

    def output(weights):
        return layer.attend(weights, layer.project(weights, "q"), layer.project(weights, "k"))

    new = layer.fold()
    equal(output(new), output(layer.weights))
    assert not np.allclose(new["k"], layer.weights["k"])
    assert ("o_bias" in new) == (biases or center)


@random_layers
@given(shape=shapes, seed=seeds, center=st.booleans())
def test_scores_only_lose_what_softmax_ignores(shape, seed, center):
    # Scores are equal, except that centring subtracts q·μ from a whole row of them.
    layer = Layer.draw(OPT, shape, seed, biases=True, center=center)

    def share(x):
        return np.repeat(x, layer.config.group_size, axis=1)

    def scores(weights):
        return np.einsum("TNH,SNH->NTS", layer.project(weights, "q"), share(layer.project(weights, "k")))

    lost = scores(layer.weights) - scores(layer.fold())
    equal(lost, np.broadcast_to(lost[..., :1], lost.shape))
    if center:
        mean = np.repeat(layer.basis.key_shift[0], layer.config.group_size, axis=0)
        equal(lost[..., 0], np.einsum("TNH,NH->NT", layer.project(layer.weights, "q"), mean))
    else:
        equal(lost, np.zeros_like(lost))


@random_layers
@given(shape=shapes, seed=seeds, kept=st.tuples(st.integers(0, 16), st.integers(0, 16)), center=st.booleans())
@pytest.mark.parametrize("family", [OPT, LLAMA], ids=lambda config: config.family)
def test_ranks_are_nested(family, shape, seed, kept, center):
    # Weights of a lower rank are a prefix of those at full rank; other weights are equal.
    layer = Layer.draw(family, shape, seed, biases=True, center=center)
    qk, v = (min(rank, layer.config.head_dim) for rank in kept)
    full, cut = layer.fold(), layer.fold(qk, v)
    names = {"k_rotation", "q_rotation"} if family is LLAMA else {"q", "k", "q_bias", "k_bias"}
    for name, whole in full.items():
        if name in names:
            equal(cut[name], whole[..., :qk])
        elif name in ("v", "v_bias"):
            equal(cut[name], whole[..., :v])
        elif name == "o":
            equal(cut[name], whole[:, :v])
        else:
            equal(cut[name], whole)
    for name, whole in layer.fold(qk, v, full_width=True).items():
        np.testing.assert_array_equal(whole, full[name])


@random_layers
@given(shape=shapes, seed=seeds, biases=st.booleans(), center=st.booleans())
def test_post_rope_rotates_after_the_rotary_embedding(shape, seed, biases, center):
    layer = Layer.draw(LLAMA, shape, seed, biases=biases, center=center)
    old, new, G = layer.weights, layer.fold(), layer.config.group_size
    assert placement(layer.config.layers[0], layer.basis) == "post_rope"
    for name in {"q", "k", "q_bias", "k_bias"} & old.keys():
        np.testing.assert_array_equal(new[name], old[name])
    assert ("k_mean" in new) == center
    q, k = layer.turned(layer.project(old, "q")), layer.turned(layer.project(old, "k"))
    rotated_q = np.einsum("TNH,NHR->TNR", q, new["q_rotation"].repeat(G, axis=0))
    rotated_k = np.einsum("TKH,KHR->TKR", k, new["k_rotation"])
    equal(layer.attend(new, rotated_q, rotated_k), layer.attend(old, q, k))


@random_layers
@given(shape=shapes, seed=seeds, part=st.integers(1, 5), center=st.booleans())
@pytest.mark.parametrize("family", [OPT, LLAMA], ids=lambda config: config.family)
def test_turns_are_folded_into_leading_blocks(family, shape, seed, part, center):
    # A block's rotation only mixes its own coordinates, so ranks at block ends keep the same part.
    layer = Layer.draw(family, shape, seed, biases=True, center=center)
    H = layer.config.head_dim
    first = min(part, H - 1)
    plain, new = layer.fold(), layer.fold(rotations=((first, H - first), (first,)))
    keys, values = block_diag(turn(first), turn(H - first)), block_diag(turn(first), np.eye(H - first))
    of_keys = ("q_rotation", "k_rotation") if family is LLAMA else ("q", "k", "q_bias", "k_bias")
    for name, whole in plain.items():
        if name in of_keys:
            equal(new[name], whole @ keys)
        elif name in ("v", "v_bias"):
            equal(new[name], whole @ values)
        elif name == "o":
            equal(new[name], values.T @ whole)
        else:
            equal(new[name], whole)


def test_rotations_stay_inverse_in_bfloat16():
    # The error of each product is at most float16 rounding; bfloat16 would have eight times as much.
    layer = Layer.draw(LLAMA, (2, 3, 16, 8), 0)
    stored = cast(layer.fold(), jnp.dtype("bfloat16"))
    a_q, a_k = (stored[name].astype(np.float64) for name in ("q_rotation", "k_rotation"))
    product, most = a_q @ a_k.swapaxes(1, 2), np.abs(a_q) @ np.abs(a_k).swapaxes(1, 2)
    assert (np.abs(product - np.eye(16)) <= 2.0**-10 * most).all()
    assert stored["v"].dtype == jnp.bfloat16


def test_pairs_are_not_turned():
    layer = Layer.draw(LLAMA, (1, 1, 16, 8), 0, pairs=True)
    with pytest.raises(CalibrationError, match="qk_kind='pairs' does not support the rotations"):
        layer.fold(rotations=((8, 8), ()))


@random_layers
@given(shape=shapes, seed=seeds, biases=st.booleans(), center=st.booleans())
def test_pairs_commute_with_the_rotary_embedding(shape, seed, biases, center):
    # Rotating halves and permuting equals permuting into pairs and rotating at the stored frequencies.
    layer = Layer.draw(LLAMA, shape, seed, biases=biases, center=center, pairs=True)
    old, new, G = layer.weights, layer.fold(), layer.config.group_size
    assert placement(layer.config.layers[0], layer.basis) == "pairs"
    assert not {"q_rotation", "k_rotation", "k_mean"} & new.keys()
    q, k = layer.turned(layer.project(old, "q")), layer.turned(layer.project(old, "k"))
    after_q = layer.turned(layer.project(new, "q"), new["frequencies"].repeat(G, axis=0))
    after_k = layer.turned(layer.project(new, "k"), new["frequencies"])
    order, half = layer.basis.pairs[0], layer.config.head_dim // 2
    for head, chosen in enumerate(order):
        equal(after_k[:, head, 0::2], k[:, head][:, chosen])
        equal(after_k[:, head, 1::2], k[:, head][:, chosen + half])
    equal(layer.attend(new, after_q, after_k), layer.attend(old, q, k))


@random_layers
@given(shape=shapes, seed=seeds)
def test_pairs_are_nested_in_whole_pairs(shape, seed):
    layer = Layer.draw(LLAMA, shape, seed, pairs=True)
    full, cut = layer.fold(), layer.fold(2, 1)
    np.testing.assert_array_equal(cut["frequencies"], full["frequencies"][:, :1])
    for name in "qk":
        np.testing.assert_array_equal(cut[name], full[name][..., :2])


@given(biases=st.booleans())
def test_everything_is_float64(biases):
    layer = Layer.draw(OPT, (2, 2, 4, 8), 0, biases=biases, center=True)
    rounded = {name: x.astype(np.float16) for name, x in layer.weights.items()}
    assert {x.dtype for x in layer._replace(weights=rounded).fold().values()} == {np.dtype("float64")}
