"""Mathematics of the basis, compared with samples, brute force and truncated SVD."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.calibration.make_basis import (
    compute_certificate,
    compute_residual,
    make_basis,
    make_pair_map,
    order_pairs,
    solve_balanced,
    solve_components,
    solve_stacked,
)
from convert.calibration.moments import Moments
from zdc_jax.errors import CalibrationError, CheckpointError

seeds = st.integers(0, 2**32 - 1)
even_dims = st.sampled_from([2, 4, 8])
small = settings(max_examples=30, deadline=None)


def anisotropic(rng, tokens, H, spread=1.5):
    """Return rows with correlated coordinates of very different energy and a nonzero mean."""
    scales = 10.0 ** rng.uniform(-spread, spread, H)
    mixing = np.linalg.qr(rng.normal(size=(H, H))).Q * scales
    return rng.normal(size=(tokens, H)) @ mixing.T + rng.normal(size=H)


def qk_sample(seed, H, tokens=(40, 30)):
    rng = np.random.default_rng(seed)
    return tuple(anisotropic(rng, n, H) for n in tokens)


def gram(x):
    return x.T @ x


def inverse_transpose(A):
    return np.linalg.inv(A).swapaxes(-1, -2)


def relative_errors(Q, K, A_Q, A_K):
    """Return ‖QKᵀ − Q_r K_rᵀ‖ / ‖QKᵀ‖ for r = 0…H, from whole score matrices."""
    scores = Q @ K.T
    kept = [(Q @ A_Q[:, :r]) @ (K @ A_K[:, :r]).T for r in range(Q.shape[1] + 1)]
    return np.array([np.linalg.norm(scores - x) for x in kept]) / np.linalg.norm(scores)


def sample_moments(seed=0, L=2, K=2, G=2, H=8, tokens=50, spread=0.5):
    """Return moments and the samples x[name] [L, K, heads, tokens, H] that they sum up."""
    rng = np.random.default_rng(seed)
    x = {
        name: np.stack(
            [
                [[anisotropic(rng, tokens, H, spread) for _ in range(heads)] for _ in range(K)]
                for _ in range(L)
            ]
        )
        for name, heads in (("q", G), ("k", 1), ("v", 1), ("o", G))
    }
    sums = {name: np.einsum("LKGTH,LKGTI->LKHI", a, a) for name, a in x.items()}
    sums |= {f"{name}_sum": a.sum((2, 3)) for name, a in x.items()}
    weights = [rng.normal(size=(K * G, H, 9)) for _ in range(L)]
    moments = Moments(**sums, group_size=G, num_tokens=tokens, context_length=tokens, fingerprint="abc")
    return moments, x, weights


@small
@given(seeds, even_dims)
def test_balanced_is_the_truncated_svd_of_the_scores_at_every_rank(seed, H):
    Q, K = qk_sample(seed, H)
    A_K = solve_balanced(gram(Q), gram(K), ridge=1e-12)
    A_Q = inverse_transpose(A_K)
    U, sigma, Vt = np.linalg.svd(Q @ K.T, full_matrices=False)
    tolerance = 1e-7 * sigma[0]
    for r in range(H + 1):
        best = (U[:, :r] * sigma[:r]) @ Vt[:r]
        error = np.linalg.norm(Q @ K.T - (Q @ A_Q[:, :r]) @ (K @ A_K[:, :r]).T)
        assert error == pytest.approx(np.linalg.norm(Q @ K.T - best), abs=tolerance)


@small
@given(seeds, even_dims)
def test_balanced_maps_are_inverse_and_share_the_energy_equally(seed, H):
    Q, K = qk_sample(seed, H)
    A_K = solve_balanced(gram(Q), gram(K))
    A_Q = inverse_transpose(A_K)
    np.testing.assert_allclose(A_Q @ A_K.T, np.eye(H), atol=1e-8)
    if np.linalg.cond(gram(Q)) < 1e5 and np.linalg.cond(gram(K)) < 1e5:  # no eigenvalue is clipped
        sigma = np.diag(np.linalg.svd(Q @ K.T, compute_uv=False)[:H])
        np.testing.assert_allclose(A_Q.T @ gram(Q) @ A_Q, sigma, atol=1e-6 * sigma[0, 0])
        np.testing.assert_allclose(A_K.T @ gram(K) @ A_K, sigma, atol=1e-6 * sigma[0, 0])


@small
@given(seeds, even_dims, st.sampled_from(["stacked", "balanced", "keys", "pairs"]))
def test_the_certificate_is_the_error_of_whole_score_matrices(seed, H, kind):
    Q, K = qk_sample(seed, H)
    C_Q, C_K = gram(Q), gram(K)
    A_K = {
        "stacked": solve_stacked,
        "balanced": solve_balanced,
        "keys": lambda C_Q, C_K: solve_components(C_K),
        "pairs": lambda C_Q, C_K: make_pair_map(order_pairs(C_Q, C_K)),
    }[kind](C_Q, C_K)
    A_Q = inverse_transpose(A_K)
    found = compute_certificate(C_Q, C_K, A_Q, A_K)
    np.testing.assert_allclose(found, relative_errors(Q, K, A_Q, A_K), atol=1e-7)
    assert found[0] == pytest.approx(1)
    assert found[-1] == 0


def test_residual_takes_any_pair_of_inverse_maps_and_stacks_of_heads():
    rng = np.random.default_rng(3)
    Q, K, A_K = (rng.normal(size=(2, 3, n, 4)) for n in (9, 7, 4))
    A_Q = inverse_transpose(A_K)
    found = compute_residual(Q.swapaxes(-1, -2) @ Q, K.swapaxes(-1, -2) @ K, A_Q, A_K)
    assert found.shape == (2, 3, 5)
    for head in np.ndindex(2, 3):
        brute = relative_errors(Q[head], K[head], A_Q[head], A_K[head])
        scores = np.sum((Q[head] @ K[head].T) ** 2)
        np.testing.assert_allclose(found[head], brute**2 * scores, rtol=1e-8, atol=1e-9)


@small
@given(seeds, even_dims)
def test_balanced_is_never_worse_than_the_other_bases(seed, H):
    Q, K = qk_sample(seed, H)
    C_Q, C_K = gram(Q), gram(K)
    errors = [
        compute_certificate(C_Q, C_K, inverse_transpose(A_K), A_K)
        for A_K in (
            solve_balanced(C_Q, C_K, ridge=1e-12),
            solve_stacked(C_Q, C_K),
            solve_components(C_K),
            make_pair_map(order_pairs(C_Q, C_K)),
        )
    ]
    for others in errors[1:]:
        assert np.all(errors[0] <= others + 1e-7)


@small
@given(seeds, even_dims)
def test_stacked_is_the_svd_of_the_stacked_rows(seed, H):
    Q, K = qk_sample(seed, H)
    A = solve_stacked(gram(Q), gram(K))
    np.testing.assert_allclose(A.T @ A, np.eye(H), atol=1e-10)
    V = np.linalg.svd(np.concatenate([Q, K]), full_matrices=False)[2]
    energy = np.linalg.norm(np.concatenate([Q, K]) @ A, axis=0)
    np.testing.assert_allclose(energy, np.linalg.norm(np.concatenate([Q, K]) @ V.T, axis=0))


@small
@given(seeds, even_dims)
def test_keys_are_the_principal_components_of_keys(seed, H):
    # No r orthogonal coordinates hold more of the keys than the first r. Queries map like keys.
    K = qk_sample(seed, H)[1]
    A = solve_components(gram(K))
    np.testing.assert_allclose(A.T @ A, np.eye(H), atol=1e-10)
    sigma = np.linalg.svd(K, compute_uv=False)
    for r in range(H + 1):
        error = np.linalg.norm(K - K @ A[:, :r] @ A[:, :r].T)
        assert error == pytest.approx(np.linalg.norm(sigma[r:]), abs=1e-6 * sigma[0])


def with_rest(moments, x):
    """Return the moments with those of keys without their mean, as of a model without rotary embedding."""
    mean = x["k"].mean((2, 3))
    rest = x["k"] - mean[:, :, None, None]
    return replace(moments, key_shift=mean, k_rest=np.einsum("LKGTH,LKGTI->LKHI", rest, rest))


@pytest.mark.parametrize("shifted", [False, True])
def test_the_basis_of_keys_is_theirs_alone(shifted):
    moments, x, weights = sample_moments()
    basis = make_basis(with_rest(moments, x), weights, qk="keys", shiftable=[shifted] * 2)
    assert basis.shifted == [shifted] * 2
    K = x["k"][1, 0, 0]
    if shifted:
        K = K - K.mean(0)
    V = np.linalg.svd(K)[2].T
    np.testing.assert_allclose(np.abs(V.T @ basis.k_map[1, 0]), np.eye(8), atol=1e-6)
    np.testing.assert_allclose(basis.q_map, basis.k_map, atol=1e-9)


def scored(moments, x):
    """Return the moments with those of values weighted by the summed squared scores of their keys."""
    scores = np.einsum("LKGTH,LKSH->LKGTS", x["q"], x["k"][:, :, 0])
    weighted = x["v"][:, :, 0] * np.sqrt((scores**2).sum((2, 3)))[..., None]
    return replace(moments, v_scored=np.einsum("LKTH,LKTI->LKHI", weighted, weighted))


@pytest.mark.parametrize("shifted", [False, True])
def test_the_basis_of_oscar_is_that_of_queries_and_of_scored_values(shifted):
    moments, x, weights = sample_moments()
    moments = scored(with_rest(moments, x), x)
    basis = make_basis(moments, weights, qk="oscar", vo="oscar", shiftable=[shifted] * 2)
    assert basis.shifted == [shifted] * 2
    queries = np.concatenate(x["q"][1, 0])
    K, V = x["k"][1, 0, 0], x["v"][1, 0, 0]
    seen = sum((row @ queries.T @ queries @ row) * np.outer(v, v) for row, v in zip(K, V, strict=True))
    for C, found in ((queries.T @ queries, basis.k_map[1, 0]), (seen, basis.v_map[1, 0])):
        values, vectors = np.linalg.eigh(C)
        np.testing.assert_allclose(np.abs(vectors[:, np.argsort(-values)].T @ found), np.eye(8), atol=1e-6)
    np.testing.assert_allclose(basis.q_map, basis.k_map, atol=1e-9)
    np.testing.assert_allclose(basis.o_map, basis.v_map.swapaxes(-1, -2), atol=1e-9)


def test_the_basis_of_oscar_needs_scored_values_with_their_mean():
    moments, x, weights = sample_moments()
    with pytest.raises(CalibrationError, match="vo='oscar': the moments have no values weighted by scores"):
        make_basis(moments, weights, vo="oscar")
    with pytest.raises(CalibrationError, match="center=True: is not supported with vo='oscar'"):
        make_basis(scored(moments, x), weights, vo="oscar", center=True)


def rope(x, frequencies, *, interleaved):
    """Apply rotary embedding to x [T, H] at positions 0…T−1, as multiplication by complex numbers."""
    turn = np.exp(1j * np.arange(len(x))[:, None] * frequencies)
    half = x.shape[1] // 2
    a, b = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
    y = (a + 1j * b) * turn
    if interleaved:
        return np.stack([y.real, y.imag], axis=-1).reshape(x.shape)
    return np.concatenate([y.real, y.imag], axis=1)


@small
@given(seeds, even_dims)
def test_pairs_commute_with_rotary_embedding(seed, H):
    Q, K = qk_sample(seed, H)
    order = order_pairs(gram(Q), gram(K))
    frequencies = 100.0 ** -(np.arange(H // 2) / (H // 2))
    A = make_pair_map(order)
    np.testing.assert_allclose(
        rope(Q, frequencies, interleaved=False) @ A,
        rope(Q @ A, frequencies[order], interleaved=True),
        atol=1e-9,
    )


def test_pairs_are_ordered_by_the_mean_square_of_their_scores():
    Q, K = qk_sample(5, 8)
    parts = [np.linalg.norm(Q[:, [p, p + 4]] @ K[:, [p, p + 4]].T) for p in range(4)]
    order = order_pairs(gram(Q), gram(K))
    assert order.dtype == np.int32
    assert order.tolist() == np.argsort(parts)[::-1].tolist()
    x = np.arange(8.0)
    np.testing.assert_array_equal(x @ make_pair_map(order), np.stack([order, order + 4], 1).ravel())


def test_pairs_need_an_even_head_dim():
    with pytest.raises(CalibrationError, match="even head dim"):
        order_pairs(np.eye(3), np.eye(3))


@pytest.mark.parametrize("kind", ["stacked", "balanced"])
def test_value_certificate_is_the_error_of_values_times_output_weights(kind):
    moments, x, weights = sample_moments()
    basis = make_basis(moments, weights, vo=kind)
    for layer, head in np.ndindex(2, 2):
        V, W = x["v"][layer, head, 0], weights[layer][2 * head : 2 * head + 2]
        C, inverse = basis.v_map[layer, head], basis.o_map[layer, head]
        whole = np.concatenate([V @ w for w in W], axis=1)
        for z in range(9):
            kept = np.concatenate([(V @ C[:, :z]) @ (inverse[:z] @ w) for w in W], axis=1)
            error = np.linalg.norm(whole - kept) / np.linalg.norm(whole)
            assert basis.vo_error[layer, head, z] == pytest.approx(error, abs=1e-7)
            if kind == "balanced":
                best = np.linalg.svd(whole, compute_uv=False)[z:]
                assert error == pytest.approx(np.linalg.norm(best) / np.linalg.norm(whole), abs=1e-7)


def test_output_moments_are_optimal_for_the_heads_outputs_when_nothing_is_shared():
    moments, x, weights = sample_moments(G=1)
    basis = make_basis(moments, weights, vo="output")
    whole = x["o"][0, 0, 0] @ weights[0][0]
    sigma = np.linalg.svd(whole, compute_uv=False)
    C, inverse = basis.v_map[0, 0], basis.o_map[0, 0]
    for z in range(9):
        kept = (x["o"][0, 0, 0] @ C[:, :z]) @ (inverse[:z] @ weights[0][0])
        assert np.linalg.norm(whole - kept) == pytest.approx(np.linalg.norm(sigma[z:]), abs=1e-6 * sigma[0])
        assert basis.vo_error[0, 0, z] == pytest.approx(
            np.linalg.norm(whole - kept) / np.linalg.norm(whole), abs=1e-7
        )


def test_stacked_weighs_all_query_heads_and_all_output_columns():
    moments, x, weights = sample_moments()
    basis = make_basis(moments, weights, qk="stacked", vo="stacked")
    for rows, found in (
        (np.concatenate([*x["q"][1, 0], x["k"][1, 0, 0]]), basis.k_map[1, 0]),
        (np.concatenate([x["v"][1, 0, 0], *(w.T for w in weights[1][:2])]), basis.v_map[1, 0]),
    ):
        V = np.linalg.svd(rows)[2].T
        np.testing.assert_allclose(np.abs(V.T @ found), np.eye(8), atol=1e-6)


@pytest.mark.parametrize("shifted", [False, True])
def test_spectrum_is_the_singular_spectrum_of_scaled_scores(shifted):
    moments, x, weights = sample_moments()
    basis = make_basis(with_rest(moments, x), weights, shiftable=[shifted] * 2)
    K = x["k"][0, 1, 0]
    if shifted:
        K = K - K.mean(0)
    Q = np.concatenate(x["q"][0, 1])
    scores = Q @ K.T / np.sqrt(8)
    sigma = np.linalg.svd(scores, compute_uv=False)[:8] / np.sqrt(scores.size)
    np.testing.assert_allclose(basis.qk_spectrum[0, 1], sigma, rtol=1e-5, atol=1e-7 * sigma[0])
    tail = np.sqrt(np.append(np.cumsum(sigma[::-1] ** 2)[::-1], 0) / np.sum(sigma**2))
    np.testing.assert_allclose(basis.qk_error[0, 1], tail, atol=1e-6)


@pytest.mark.parametrize("qk", ["stacked", "keys", "pairs"])
def test_spectrum_of_any_basis_accounts_for_the_error(qk):
    moments, x, weights = sample_moments()
    basis = make_basis(moments, weights, qk=qk)
    mean_square = np.mean((np.concatenate(x["q"][1, 1]) @ x["k"][1, 1, 0].T) ** 2) / 8
    squares = mean_square * basis.qk_error[1, 1] ** 2
    np.testing.assert_allclose(
        basis.qk_spectrum[1, 1] ** 2, np.maximum(-np.diff(squares), 0), atol=1e-9 * mean_square
    )


def test_centred_values_leave_the_output_unchanged_at_full_rank():
    moments, x, weights = sample_moments()
    basis = make_basis(moments, weights, center=True)
    V = x["v"][0, 0, 0]
    np.testing.assert_allclose(basis.value_mean[0, 0], V.mean(0))
    back = (V - basis.value_mean[0, 0]) @ basis.v_map[0, 0] @ basis.o_map[0, 0]
    np.testing.assert_allclose(back + basis.value_mean[0, 0], V, atol=1e-8)


def test_values_are_centred_where_older_tokens_are_attended_to():
    moments, x, weights = sample_moments()
    attended = np.random.default_rng(1).random((2, 2, 50)) ** 4
    attended[1, 1] = 0  # This head attends to no older token.
    V = x["v"][:, :, 0]
    weighed = replace(moments, v_far=np.einsum("LKT,LKTH->LKH", attended, V), far=attended.sum(-1))
    basis = make_basis(weighed, weights, center=True)
    expected = np.average(V[0, 1], axis=0, weights=attended[0, 1])
    np.testing.assert_allclose(basis.value_mean[0, 1], expected)
    np.testing.assert_allclose(basis.value_mean[1, 1], V[1, 1].mean(0))
    rows = (V[0, 1] - expected) @ basis.v_map[0, 1]
    np.testing.assert_allclose(basis.v_rms[0, 1], np.sqrt((rows**2).mean(0)), rtol=1e-6)
    assert make_basis(weighed, weights).value_mean is None


def test_a_plain_mean_of_values_is_said(caplog):
    moments, _, weights = sample_moments()
    make_basis(moments, weights, vo="output", center=True)
    make_basis(moments, weights)
    assert not caplog.records
    make_basis(moments, weights, center=True)
    assert "the plain mean of values is subtracted" in caplog.text


def test_output_centres_on_the_outputs():
    moments, x, weights = sample_moments()
    basis = make_basis(moments, weights, vo="output", center=True)
    np.testing.assert_allclose(basis.value_mean[0, 0], x["o"][0, 0].mean((0, 1)))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize(
    ("qk", "vo"),
    [("balanced", "output"), ("stacked", "balanced"), ("keys", "balanced"), ("pairs", "stacked")],
)
def test_root_mean_squares_are_those_of_the_samples_in_the_basis(qk, vo, center):
    moments, x, weights = sample_moments()
    basis = make_basis(moments, weights, qk=qk, vo=vo, center=center)
    for name, A, mean in (
        ("q", basis.q_map, None),
        ("k", basis.k_map, None),
        ("v", basis.v_map, basis.value_mean),
    ):
        rows = x[name] if mean is None else x[name] - mean[:, :, None, None]
        new = np.einsum("LKGTH,LKHR->LKGTR", rows, A)
        np.testing.assert_allclose(getattr(basis, f"{name}_rms"), np.sqrt((new**2).mean((2, 3))), rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("vo", ["balanced", "output"])
def test_fewer_tokens_than_coordinates_still_give_an_invertible_accurate_basis(tokens, vo):
    moments, x, weights = sample_moments(tokens=tokens, G=1)
    basis = make_basis(moments, weights, vo=vo)
    np.testing.assert_allclose(
        basis.q_map @ basis.k_map.swapaxes(-1, -2),
        np.broadcast_to(np.eye(8), (2, 2, 8, 8)),
        atol=1e-6,
    )
    assert np.all(basis.qk_condition < 1e8)
    assert np.all(basis.qk_error[..., tokens:] < 1e-3)
    errors = relative_errors(x["q"][0, 0, 0], x["k"][0, 0, 0], basis.q_map[0, 0], basis.k_map[0, 0])
    np.testing.assert_allclose(basis.qk_error[0, 0], errors, atol=1e-6)


def test_a_head_of_zeros_gets_a_harmless_basis():
    moments, _, weights = sample_moments()
    moments.k[0, 0] = 0
    weights[1][:2] = 0
    basis = make_basis(moments, weights)
    assert np.all(basis.qk_error[0, 0] == 0)
    assert np.all(basis.vo_error[1, 0] == 0)
    assert np.all(np.isfinite(basis.q_map))
    assert np.all(np.isfinite(basis.o_map))


def test_inputs_that_cannot_give_a_basis_are_named():
    moments, _, weights = sample_moments()
    bad = moments.k.copy()
    bad[1, 0, 2, 3] = np.nan
    with pytest.raises(CalibrationError, match="layer 1, KV head 0: moments of k must be finite"):
        make_basis(replace(moments, k=bad), weights)
    with pytest.raises(CalibrationError, match="num_tokens=0"):
        make_basis(replace(moments, num_tokens=0), weights)
    with pytest.raises(CalibrationError, match="qk='svd': must be one of"):
        make_basis(moments, weights, qk="svd")
    with pytest.raises(CalibrationError, match="1 output weights, but moments of 2 layers"):
        make_basis(moments, weights[:1])
    with pytest.raises(CalibrationError, match=r"layer 1: W_O has shape \(4, 3, 9\), must be \[4, 8, D\]"):
        make_basis(moments, [weights[0], weights[1][:, :3]])
    weights[1][3, 0, 0] = np.inf
    with pytest.raises(CalibrationError, match="layer 1, KV head 1: W_O must be finite"):
        make_basis(moments, weights)


def test_moments_round_trip(tmp_path):
    moments, _, _ = sample_moments()
    moments.save(tmp_path / "calibration" / "moments")
    loaded = Moments.load(tmp_path / "calibration" / "moments")
    np.testing.assert_array_equal(loaded.o_sum, moments.o_sum)
    assert loaded.q.dtype == np.float64
    assert (loaded.group_size, loaded.num_tokens, loaded.fingerprint) == (2, 50, "abc")
    with pytest.raises(CheckpointError, match="cannot read moments"):
        Moments.load(tmp_path)
