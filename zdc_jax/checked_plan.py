"""A predicted plan made sure on text: a few plans are measured, each chosen by all measured before it (ours).

Predictions of a regression over other models tell plans that differ little from one another better than they
tell what a plan costs. So a plan's degradation is expected to be that of the measured plan nearest to it,
and what prediction says of the layers in which the two differ; and the next plan to measure is the one of
largest expected saving.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import numpy as np

from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.predictor import Predictor
from zdc_jax.profile import SINKS, Profile

CHECKS = 12
"""Plans measured at most."""
SPREAD = 0.7
"""Standard deviation of what one layer costs, as a share of its prediction. Of models left out of the fit,
plans that differ in one layer differ by what is predicted, up to 0.36 to 0.96 of it for two thirds."""
NOISE = 5e-4
"""Nats a token; differences of plans cannot be told better than this."""
LEAST_SAVING = 0.005
"""Share of the bytes that must be expected to be saved for one more measurement."""


def checked_plan(
    predictor: Predictor,
    config: ModelConfig,
    profile: Profile,
    measure: Callable[[CompressionPlan], float],
    *,
    max_degradation: float,
    context: int,
) -> CompressionPlan | None:
    """The smallest of a few measured plans that holds the limit; None where none does.

    Args:
      measure: the relative increase of perplexity of a plan.
      context: tokens at which bytes count.

    Raises:
      PlanError: a limit of 0 or below.
    """
    if not max_degradation > 0:
        raise PlanError(f"max_degradation={max_degradation} must be > 0 (0.02 means 2 %)")
    neighbourhood = Neighbourhood(predictor, config, profile, context)
    allowed, best = float(np.log1p(max_degradation)), neighbourhood.full
    seen = {best: 0.0}
    for _ in range(CHECKS):
        plan = neighbourhood.most_promising(seen, best, allowed)
        if plan is None:
            break
        seen[plan] = float(np.log1p(measure(plan)))
        if seen[plan] <= allowed:
            best = plan
    return None if best == neighbourhood.full else best


class Neighbourhood:
    """Plans near one another, and what is expected of them."""

    def __init__(self, predictor: Predictor, config: ModelConfig, profile: Profile, context: int):
        self.context, self.floor = context, predictor.floor(config)
        self.full = CompressionPlan.full(config).for_model(profile.fingerprint)
        self.costs = predictor.costs(config, profile)
        self.paths = [plan for path in predictor.paths(config, profile) for plan, _ in path]

    def bytes(self, plan: CompressionPlan) -> int:
        """Of the cache at `context` tokens."""
        return plan.bytes(self.context)

    def nats(self, plan: CompressionPlan) -> np.ndarray:
        """What prediction says: of the basis, and of each layer [1 + L]."""
        if plan == self.full:
            return np.zeros(1 + len(plan.layers))
        costs = self.costs[plan.window]
        return np.array([self.floor, *(costs.of(i, ranks) for i, ranks in enumerate(plan.layers))])

    def changed(self, plan: CompressionPlan) -> Iterator[CompressionPlan]:
        """The plan with every window, and with each of its layers at all other ranks."""
        for window, costs in self.costs.items():
            choices = [LayerRanks(0, 0), *(LayerRanks(qk, v) for qk in costs.ranks for v in costs.ranks)]
            for layer in range(len(plan.layers)):
                for ranks in choices:
                    layers = (*plan.layers[:layer], ranks, *plan.layers[layer + 1 :])
                    yield replace(self.full, layers=layers, window=window, sinks=SINKS)

    def most_promising(
        self, seen: dict[CompressionPlan, float], best: CompressionPlan, allowed: float
    ) -> CompressionPlan | None:
        """Of all paths and of all changes of `best`: the plan of largest expected saving, if it is worth it.

        seen: measured nats a token of plans. best: the smallest of them within `allowed`.
        """
        worth = LEAST_SAVING * self.bytes(best)
        options = dict.fromkeys((*self.paths, *(self.changed(best) if best != self.full else ())))
        plans = [plan for plan in options if plan not in seen and self.bytes(plan) < self.bytes(best) - worth]
        if not plans:
            return None
        known = np.array([self.nats(plan) for plan in seen])
        predicted = np.array([self.nats(plan) for plan in plans])
        difference = predicted[:, None] - known
        distance = np.linalg.norm(difference, axis=-1)
        nearest = distance.argmin(1)
        at = np.arange(len(plans)), nearest
        mean = np.array(list(seen.values()))[nearest] + difference[at].sum(-1)
        deviation = np.maximum(SPREAD * distance[at], NOISE)
        holds = np.asarray(jax.scipy.stats.norm.cdf((allowed - mean) / deviation))
        saving = holds * (self.bytes(best) - np.array([self.bytes(plan) for plan in plans]))
        return plans[saving.argmax()] if saving.max() > worth else None
