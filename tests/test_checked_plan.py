"""Checked plans against all plans of a made-up model whose true costs differ from what is predicted."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from conftest import LLAMA
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.checked_plan import CHECKS, checked_plan
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.predictor import Predictor
from zdc_jax.profile import SINKS, Profile

LAYERS, CONTEXT = 3, 4096
CONFIG = replace(LLAMA, num_layers=LAYERS, head_dim=48, max_positions=CONTEXT)
WINDOWS, RANKS = np.array([128, 512], np.int32), np.array([16, 32], np.int32)
PREDICTOR = Predictor.stored()


def profile(seed: int) -> Profile:
    """Of layers that differ by orders of magnitude in what their distant tokens are worth."""
    rng = np.random.default_rng(seed)
    error = lambda: np.sort(rng.random((LAYERS, len(RANKS))), axis=1)[:, ::-1]
    write = np.array([1.0, 0.3]) * np.exp(rng.normal(0, 0.1, (LAYERS, 2)))
    return Profile(np.exp(rng.normal(-5, 1.5, LAYERS)), write, error(), error(), WINDOWS, RANKS, "made-up")


def true_nats(found: Profile, factors: np.ndarray, plan: CompressionPlan) -> float:
    """Costs of layers as predicted, times a factor of each; the basis costs nothing."""
    costs = PREDICTOR.costs(CONFIG, found)[plan.window]
    return sum(factor * costs.of(i, plan.layers[i]) for i, factor in enumerate(factors))


def smallest(found: Profile, factors: np.ndarray, allowed: float) -> int:
    """Bytes of the smallest of all plans within the limit, by enumeration."""
    ranks = [LayerRanks(0, 0), *(LayerRanks(qk, v) for qk, v in product((16, 32, 48), repeat=2))]
    full, sizes = CompressionPlan.full(CONFIG), []
    for window, costs in PREDICTOR.costs(CONFIG, found).items():
        each = [[factor * costs.of(i, r) for r in ranks] for i, factor in enumerate(factors)]
        for chosen in product(range(len(ranks)), repeat=LAYERS):
            if sum(each[layer][choice] for layer, choice in enumerate(chosen)) <= allowed:
                plan = replace(full, layers=tuple(ranks[c] for c in chosen), window=window, sinks=SINKS)
                sizes.append(plan.bytes(CONTEXT))
    return min(sizes)


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**16), spread=st.floats(0, 1.5), limit=st.sampled_from([0.01, 0.02, 0.05]))
def test_checked_plans_hold_the_limit(seed, spread, limit):
    """However wrong the prediction of each layer is; each plan is measured once, and at most `CHECKS` are."""
    found, measured = profile(seed), {}
    factors = np.exp(np.random.default_rng(seed + 1).normal(0, spread, LAYERS))

    def measure(plan: CompressionPlan) -> float:
        assert plan not in measured
        return measured.setdefault(plan, float(np.expm1(true_nats(found, factors, plan))))

    plan = checked_plan(PREDICTOR, CONFIG, found, measure, max_degradation=limit, context=CONTEXT)
    held = [each for each, increase in measured.items() if increase <= limit]
    assert len(measured) <= CHECKS
    assert plan == (min(held, key=lambda each: each.bytes(CONTEXT)) if held else None)


def test_checked_plans_are_near_the_smallest_of_all():
    """Of twenty models whose layers cost half to twice what is predicted: within a tenth, for most."""
    ratios = []
    for seed in range(20):
        found, factors = profile(seed), np.exp(np.random.default_rng(seed).normal(0, 0.5, LAYERS))
        measure = lambda plan, of=(found, factors): float(np.expm1(true_nats(*of, plan)))
        plan = checked_plan(PREDICTOR, CONFIG, found, measure, max_degradation=0.02, context=CONTEXT)
        kept = CompressionPlan.full(CONFIG) if plan is None else plan
        ratios.append(kept.bytes(CONTEXT) / smallest(found, factors, np.log1p(0.02)))
    assert min(ratios) >= 1
    assert np.quantile(ratios, 0.8) <= 1.1, ratios


def test_nothing_holds_the_limit():
    arguments = PREDICTOR, CONFIG, profile(0), lambda _: 1.0
    assert checked_plan(*arguments, max_degradation=0.01, context=CONTEXT) is None


def test_an_impossible_limit():
    with pytest.raises(PlanError, match="max_degradation=0 must be > 0"):
        checked_plan(PREDICTOR, CONFIG, profile(0), pytest.fail, max_degradation=0, context=CONTEXT)
