"""Checked plans, compared with the smallest of all plans of invented models with mispredicted costs."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import LLAMA
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.checked import CHECKS, Surrogate, checked_plan
from zdc_jax.planning.coded_costs import coded_forecast, coded_levels
from zdc_jax.planning.forecast import Forecast
from zdc_jax.planning.layer_costs import build_layer
from zdc_jax.planning.predictor import Predictor
from zdc_jax.planning.profile import Profile

LAYERS, CONTEXT = 8, 4096
CONFIG = replace(LLAMA, layers=LLAMA.layers[:1] * LAYERS, head_dim=48, max_positions=CONTEXT)
FULL = CompressionPlan.full(CONFIG)
WINDOWS, RANKS = np.array([128, 512], np.int32), np.array([16, 32], np.int32)
PREDICTOR = Predictor.stored()
RANK_CHOICES = [LayerRanks(0, 0), *(LayerRanks(qk, v) for qk, v in product((16, 32, 48), repeat=2))]
CODE_CHOICES = [LayerRanks(0, 0), *(build_layer(keys, values) for keys, values in product(*coded_levels(48)))]


def ranks_size(ranks: LayerRanks) -> int:
    """Return a measure that orders the bytes of a far token."""
    return ranks.qk + ranks.v


def codes_size(ranks: LayerRanks) -> int:
    """Count the bits of a far token and head: levels, and scales of one byte."""
    if not (codes := ranks.settings):
        return 0
    first = codes.bits_index if codes.index else 0
    levels = codes.index * first + (ranks.qk - codes.index) * codes.bits_k + ranks.v * codes.bits_v
    return levels + 8 * (3 if codes.index else 2)


def rank_forecast(profile: Profile) -> Forecast:
    return PREDICTOR.forecast(CONFIG, profile)


def code_forecast(profile: Profile) -> Forecast:
    """Return a forecast for a basis whose energy falls from coordinate to coordinate."""
    rms = np.random.default_rng(0).lognormal(size=(LAYERS, CONFIG.num_kv_heads, 48)) ** 0.5
    basis = SimpleNamespace(k_map=np.zeros((*rms.shape, 48)), k_rms=-np.sort(-rms), q_rms=-np.sort(-rms))
    # Quantization loses a small part of what a layer costs without far tokens.
    return coded_forecast(CONFIG, replace(profile, far_nats=10 * profile.far_nats), basis)


KINDS = {
    "ranks": (rank_forecast, RANK_CHOICES, ranks_size),
    "codes": (code_forecast, CODE_CHOICES, codes_size),
}


def profile(seed: int) -> Profile:
    """Return a profile whose layers' far tokens are worth from much less to much more than the limits."""
    rng = np.random.default_rng(seed)

    def error():
        return np.sort(rng.random((LAYERS, len(RANKS))) ** 2, axis=1)[:, ::-1]

    write = np.array([1.0, 0.8]) * np.exp(rng.normal(0, 0.1, (LAYERS, 2)))
    return Profile(np.exp(rng.normal(-4, 1.5, LAYERS)), write, error(), error(), WINDOWS, RANKS, "made-up")


class Truth:
    """True costs of plans: each layer's predicted cost times a factor of its own, plus noise."""

    def __init__(self, kind: str, seed: int, spread: float, noise: float = 0.0):
        rng = np.random.default_rng(seed + 1)
        forecast, self.choices, self.size = KINDS[kind]
        self.forecast, self.noise, self.measured = forecast(profile(seed)), noise, {}
        factors = np.exp(rng.normal(0, spread, LAYERS))
        self.costs = {
            window: [[f * costs.of(i, ranks) for ranks in self.choices] for i, f in enumerate(factors)]
            for window, costs in self.forecast.costs.items()
        }

    def measure(self, plan: CompressionPlan) -> float:
        """Return the relative increase of perplexity, once for each plan."""
        assert plan not in self.measured
        costs = (self.costs[plan.window][i][self.choices.index(ranks)] for i, ranks in enumerate(plan.layers))
        noise = self.noise * np.random.default_rng(len(self.measured)).normal()
        return self.measured.setdefault(plan, float(np.expm1(sum(costs) + noise)))

    def checked(self, limit: float) -> CompressionPlan | None:
        """Return the checked plan of this limit."""
        return checked_plan(self.forecast, self.measure, max_degradation=limit, context=CONTEXT)

    def smallest(self, limit: float) -> int:
        """Return the bytes of the smallest plan within the limit, by dynamic programming over sizes."""
        sizes = []
        for window, layers in self.costs.items():
            least: dict[int, tuple[float, tuple[LayerRanks, ...]]] = {0: (0.0, ())}
            for costs in layers:
                longer: dict[int, tuple[float, tuple[LayerRanks, ...]]] = {}
                for (held, (cost, plan)), (more, ranks) in product(
                    least.items(), zip(costs, self.choices, strict=True)
                ):
                    count = held + self.size(ranks)
                    longer[count] = min(longer.get(count, (np.inf, ())), (cost + more, (*plan, ranks)))
                least = longer
            within = [plan for cost, plan in least.values() if cost <= np.log1p(limit)]
            plans = (self.forecast.make(plan, window) for plan in within)
            sizes += [plan.bytes(CONTEXT) for plan in plans]
        return min(sizes)


@settings(deadline=None, max_examples=12)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 2**16),
    spread=st.floats(0, 1.5),
    noise=st.sampled_from([0, 2e-3]),
    limit=st.sampled_from([0.01, 0.02, 0.05]),
)
@pytest.mark.full
def test_checked_plans_hold_the_limit(kind, seed, spread, noise, limit):
    # Predictions and measurements may be wrong. Each plan is measured once, and at most `CHECKS` are.
    truth = Truth(kind, seed, spread, noise)
    plan = truth.checked(limit)
    held = [each for each, increase in truth.measured.items() if increase <= limit]
    assert len(truth.measured) <= CHECKS
    assert plan == (min(held, key=lambda each: each.bytes(CONTEXT)) if held else None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full
def test_checked_plans_are_near_the_smallest_of_all(kind, monkeypatch):
    # Layers cost half to twice their prediction, which paths alone do not compensate.
    models = [(kind, seed, 0.6) for seed in range(4)]
    least = np.array([Truth(*model).smallest(0.02) for model in models])

    def sizes():
        return np.array([(Truth(*model).checked(0.02) or FULL).bytes(CONTEXT) for model in models])

    ratios = sizes() / least
    monkeypatch.setattr(Surrogate, "_list_changes", lambda self, best: ())
    along_paths = sizes() / least
    assert ratios.min() >= 1
    assert np.median(ratios) <= 1.05
    assert ratios.max() <= 1.2
    assert ratios.mean() < along_paths.mean()


@pytest.mark.parametrize("increase", [1.0, float("nan")])
def test_nothing_holds_the_limit(increase):
    forecast = rank_forecast(profile(0))
    assert checked_plan(forecast, lambda _: increase, max_degradation=0.01, context=CONTEXT) is None


def test_an_impossible_limit():
    forecast = rank_forecast(profile(0))
    with pytest.raises(PlanError, match="max_degradation=0 must lie strictly between 0 and 1"):
        checked_plan(forecast, pytest.fail, max_degradation=0, context=CONTEXT)
