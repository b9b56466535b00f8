"""Checked plans against the smallest of all plans of made-up models whose true costs are not as predicted."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from conftest import LLAMA
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.checked import CHECKS, Surrogate, checked_plan
from zdc_jax.planning.predictor import Predictor
from zdc_jax.planning.profile import SINKS, Profile

LAYERS, CONTEXT = 8, 4096
CONFIG = replace(LLAMA, layers=LLAMA.layers[:1] * LAYERS, head_dim=48, max_positions=CONTEXT)
FULL = CompressionPlan.full(CONFIG)
WINDOWS, RANKS = np.array([128, 512], np.int32), np.array([16, 32], np.int32)
CHOICES = [LayerRanks(0, 0), *(LayerRanks(qk, v) for qk, v in product((16, 32, 48), repeat=2))]
PREDICTOR = Predictor.stored()


def profile(seed: int) -> Profile:
    """Of layers whose distant tokens are worth from much less to much more than the limits below."""
    rng = np.random.default_rng(seed)
    error = lambda: np.sort(rng.random((LAYERS, len(RANKS))) ** 2, axis=1)[:, ::-1]
    write = np.array([1.0, 0.8]) * np.exp(rng.normal(0, 0.1, (LAYERS, 2)))
    return Profile(np.exp(rng.normal(-4, 1.5, LAYERS)), write, error(), error(), WINDOWS, RANKS, "made-up")


class Truth:
    """What plans cost: of each layer what is predicted times a factor of its own, and noise."""

    def __init__(self, seed: int, spread: float, noise: float = 0.0):
        rng = np.random.default_rng(seed + 1)
        self.profile, self.noise, self.measured = profile(seed), noise, dict[CompressionPlan, float]()
        factors = np.exp(rng.normal(0, spread, LAYERS))
        self.costs = {
            window: [[factor * costs.of(i, ranks) for ranks in CHOICES] for i, factor in enumerate(factors)]
            for window, costs in PREDICTOR.costs(CONFIG, self.profile).items()
        }

    def measure(self, plan: CompressionPlan) -> float:
        """The relative increase of perplexity, once for each plan."""
        assert plan not in self.measured
        kept = (self.costs[plan.window][i][CHOICES.index(ranks)] for i, ranks in enumerate(plan.layers))
        noise = self.noise * np.random.default_rng(len(self.measured)).normal()
        return self.measured.setdefault(plan, float(np.expm1(sum(kept) + noise)))

    def checked(self, limit: float) -> CompressionPlan | None:
        """What is under test."""
        return checked_plan(
            PREDICTOR, CONFIG, self.profile, self.measure, max_degradation=limit, context=CONTEXT
        )

    def smallest(self, limit: float) -> int:
        """Bytes of the smallest of all plans within the limit: dynamic programming over coordinates kept."""
        sizes = []
        for window, layers in self.costs.items():
            least: dict[int, tuple[float, tuple[LayerRanks, ...]]] = {0: (0.0, ())}
            for costs in layers:
                longer: dict[int, tuple[float, tuple[LayerRanks, ...]]] = {}
                for (kept, (cost, plan)), (more, ranks) in product(
                    least.items(), zip(costs, CHOICES, strict=True)
                ):
                    count = kept + ranks.qk + ranks.v
                    longer[count] = min(longer.get(count, (np.inf, ())), (cost + more, (*plan, ranks)))
                least = longer
            held = [plan for cost, plan in least.values() if cost <= np.log1p(limit)]
            plans = (replace(FULL, layers=plan, window=window, sinks=SINKS) for plan in held)
            sizes += [plan.bytes(CONTEXT) for plan in plans]
        return min(sizes)


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 2**16),
    spread=st.floats(0, 1.5),
    noise=st.sampled_from([0, 2e-3]),
    limit=st.sampled_from([0.01, 0.02, 0.05]),
)
def test_checked_plans_hold_the_limit(seed, spread, noise, limit):
    """However wrong predictions and measurements are; a plan is measured once, and at most `CHECKS` are."""
    truth = Truth(seed, spread, noise)
    plan = truth.checked(limit)
    held = [each for each, increase in truth.measured.items() if increase <= limit]
    assert len(truth.measured) <= CHECKS
    assert plan == (min(held, key=lambda each: each.bytes(CONTEXT)) if held else None)


def bytes_over_smallest() -> np.ndarray:
    """Of ten models whose layers cost half to twice what is predicted."""
    truths = [Truth(seed, spread=0.6) for seed in range(10)]
    plans = [truth.checked(0.02) or FULL for truth in truths]
    least = [truth.smallest(0.02) for truth in truths]
    return np.array([plan.bytes(CONTEXT) for plan in plans]) / least


def test_checked_plans_are_near_the_smallest_of_all(monkeypatch):
    """And changes of single layers bring them there: paths alone do not."""
    ratios = bytes_over_smallest()
    monkeypatch.setattr(Surrogate, "_changed", lambda self, plan: ())
    along_paths = bytes_over_smallest()
    assert ratios.min() >= 1
    assert np.median(ratios) <= 1.05
    assert ratios.max() <= 1.2
    assert ratios.mean() < along_paths.mean() - 0.02


@pytest.mark.parametrize("increase", [1.0, float("nan")])
def test_nothing_holds_the_limit(increase):
    arguments = PREDICTOR, CONFIG, profile(0), lambda _: increase
    assert checked_plan(*arguments, max_degradation=0.01, context=CONTEXT) is None


def test_an_impossible_limit():
    with pytest.raises(PlanError, match="max_degradation=0 must be > 0"):
        checked_plan(PREDICTOR, CONFIG, profile(0), pytest.fail, max_degradation=0, context=CONTEXT)
