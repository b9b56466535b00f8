"""Ranks from spectra: the budget, the distribution of coordinates, and every refusal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zdc_jax.basis import Basis
from zdc_jax.errors import PlanError
from zdc_jax.planning.spectrum import MAX_DISTINCT_RANKS, QK_SHARE, plan_from_spectrum


def spectra(layers: int = 12, heads: int = 3, dim: int = 64, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.2, 3, (layers, heads, 1))
    return -np.sort(-np.abs(rng.normal(size=(layers, heads, dim))) * scale, axis=-1)


def basis_of(qk: np.ndarray, vo: np.ndarray) -> Basis:
    """Return a basis with these spectra [L, K, H]; its other fields do not matter."""
    maps, errors = np.zeros((*qk.shape, 1)), np.zeros((*qk.shape[:2], qk.shape[2] + 1))
    ones = np.ones(qk.shape[:2])
    return Basis(maps, maps, "balanced", "balanced", qk, vo, errors, errors, ones, ones, 1, 1, "abc")


@given(
    budget=st.floats(0.1, 1.0),
    window=st.sampled_from([0, 128]),
    seed=st.integers(0, 100),
)
def test_the_budget_is_kept_with_few_kernels(budget, window, seed):
    qk, vo = spectra(seed=seed), spectra(seed=seed + 1000)
    least = 16 / 128 / QK_SHARE + 0.01
    budget = max(budget, least)
    plan = plan_from_spectrum(basis_of(qk, vo), budget=budget, window=window)
    assert len(set(plan.layers)) <= MAX_DISTINCT_RANKS
    mean = np.mean([(r.qk + r.v) / 128 for r in plan.layers])
    # Merges of rare pairs may change a few layers by one rank level.
    assert mean <= budget + 0.06


def test_ranks_go_where_the_energy_is():
    qk = np.full((2, 1, 64), 0.01)
    qk[1] = 1.0
    plan = plan_from_spectrum(basis_of(qk, qk), budget=0.625)
    assert plan.layers[0].qk < plan.layers[1].qk
    assert sum(r.qk for r in plan.layers) == 64


@pytest.mark.parametrize("budget", [0, 1.5])
def test_bad_budgets_are_named(budget):
    with pytest.raises(PlanError, match=f"budget={budget}"):
        plan_from_spectrum(basis_of(spectra(), spectra()), budget=budget)


def test_the_least_possible_budget_is_said():
    with pytest.raises(PlanError, match="the least possible is 192"):
        plan_from_spectrum(basis_of(spectra(), spectra()), budget=0.05)


def test_the_plan_is_of_the_model_and_the_basis():
    basis = basis_of(spectra(), spectra())
    plan = plan_from_spectrum(basis, budget=0.5, window=64, sinks=4)
    assert (plan.fingerprint, plan.basis) == ("abc", basis.coordinates_hash)
    assert (plan.window, plan.sinks) == (64, 4)
