"""Error certificate, and ranks solved from it."""

import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.calibration.calibrate import collect_moments
from zdc_jax import CompressionPlan
from zdc_jax.errors import PlanError
from zdc_jax.plan import LayerRanks, allowed_ranks
from zdc_jax.planning.certificate import certificate, least_ranks, plan_from_error


@pytest.fixture(scope="module")
def basis():
    return TinyModel(LLAMA).basis()


def test_certificate_is_the_error_of_truncated_scores():
    # The certificate is the root-mean-square of q kᵀ - q_R k_Rᵀ over all pairs, from second moments alone.
    tiny = TinyModel(LLAMA)
    moments = collect_moments(tiny.dense, tiny.tokens(4, 64, seed=1), fingerprint="tiny")
    basis, R = tiny.basis(), 16
    found = certificate(CompressionPlan.uniform(LLAMA, qk=R, v=R), basis)
    lost = np.eye(32) - basis.q_map[..., :R] @ basis.k_map[..., :R].swapaxes(-1, -2)
    squared = np.einsum("lkab,lkbc,lkcd,lkad->lk", moments.q, lost, moments.k, lost)
    whole = np.einsum("lkab,lkab->lk", moments.q, moments.k)
    np.testing.assert_allclose(found.score, np.sqrt(squared / whole), rtol=1e-5)
    np.testing.assert_array_equal(found.value, basis.vo_error[..., R])
    assert f"worst {found.score.max():.3f}" in str(found)


def test_layers_that_see_no_distant_token_lose_all_of_it(basis):
    ranks = (LayerRanks(0, 0), *[LayerRanks(32, 32)] * (LLAMA.num_layers - 1))
    plan = CompressionPlan(ranks, LLAMA.num_kv_heads, LLAMA.head_dim, window=8)
    found = certificate(plan, basis)
    assert np.all(found.score[0] == 1)
    assert found.score[1:].max() < 1e-6


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), limit=st.floats(0.01, 0.99))
def test_least_ranks_are_the_least(seed, limit):
    allowed = np.array(allowed_ranks(64)[1:])
    errors = -np.sort(-np.random.default_rng(seed).uniform(size=(5, 3, 65)), axis=-1)
    errors[..., -1] = 0
    for layer, rank in zip(errors, least_ranks(errors, limit, allowed), strict=True):
        assert layer[:, rank].max() <= limit
        assert all(layer[:, smaller].max() > limit for smaller in allowed[allowed < rank])


@given(limit=st.floats(0.05, 0.9))
@settings(deadline=None, max_examples=20)
def test_solved_plans_keep_their_limits(basis, limit):
    plan = plan_from_error(basis, max_score_error=limit, window=64)
    found = certificate(plan, basis)
    assert found.score.max() <= limit
    assert found.value.max() <= limit
    assert (plan.fingerprint, plan.basis) == (basis.fingerprint, basis.coordinates_hash)


@pytest.mark.parametrize("limit", [0.0, -0.1, 1.0, float("nan")])
def test_impossible_limits_are_named(basis, limit):
    with pytest.raises(PlanError, match=f"max_score_error={limit}"):
        plan_from_error(basis, max_score_error=limit)
