"""A predicted plan checked on text: a few plans are measured, each chosen by all measured before it.

Constrained optimisation by expected improvement (Gardner et al., 2014), with a surrogate of ours. Predictions
of a regression over other models tell plans that differ little from one another better than they tell what
a plan costs; so a plan's degradation is expected to be that of the measured plan nearest to it, and what
prediction says of the layers in which the two differ.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr

from zdc_jax.config import ModelConfig
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.layer_costs import LayerCosts, kept
from zdc_jax.planning.predictor import Predictor, check_limit
from zdc_jax.planning.profile import SINKS, Profile

CHECKS = 12
"""Plans measured at most."""
SPREAD = 0.7
"""Standard deviation of what one layer costs, as a share of its prediction; from the models of the fit, each
left out (`benchmarks/LOG.md`)."""
LEAST_DEVIATION = 5e-4
"""Nats a token; what text of a few windows cannot tell apart."""
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
    """The smallest of at most `CHECKS` plans whose measured degradation is within the limit; None if none is.

    Args:
      measure: the relative increase of perplexity of a plan, on whatever text; NaN is over any limit.
      context: tokens at which bytes count.

    Raises:
      PlanError: a limit of 0 or below.
    """
    check_limit(max_degradation)
    surrogate = Surrogate(predictor, config, profile, context)
    allowed, best = float(np.log1p(max_degradation)), surrogate.full
    seen = {best: 0.0}
    for _ in range(CHECKS):
        plan = surrogate.next_plan(seen, best, allowed)
        if plan is None:
            break
        seen[plan] = float(np.nan_to_num(np.log1p(measure(plan)), nan=np.inf))
        if seen[plan] <= allowed:
            best = plan
    return None if best == surrogate.full else best


class Surrogate:
    """What is expected of plans, from prediction and from plans that were measured."""

    def __init__(self, predictor: Predictor, config: ModelConfig, profile: Profile, context: int):
        self.config, self.context, self.floor = config, context, predictor.floor(config)
        self.full = CompressionPlan.full(config).for_model(profile.fingerprint)
        self.costs = predictor.costs(config, profile)
        self.paths = [plan for path in predictor.paths(config, profile) for plan, _ in path]
        self.known = dict[CompressionPlan, tuple[Float[np.ndarray, " costs"], int]]()

    def of(self, plan: CompressionPlan) -> tuple[Float[np.ndarray, " costs"], int]:
        """Predicted nats a token of the basis and of each layer; bytes of the cache at `context` tokens."""
        if plan not in self.known:
            self.known[plan] = self._nats(plan), plan.bytes(self.context)
        return self.known[plan]

    def next_plan(
        self, seen: dict[CompressionPlan, float], best: CompressionPlan, allowed: float
    ) -> CompressionPlan | None:
        """Of all paths and of all changes of `best`: the plan of largest expected saving, if it is worth it.

        seen: measured nats a token of plans. best: the smallest of them within `allowed`.
        """
        size = self.of(best)[1]
        changes = () if best == self.full else self._changed(best)
        new = [plan for plan in dict.fromkeys((*self.paths, *changes)) if plan not in seen]
        plans = [plan for plan in new if self.of(plan)[1] < (1 - LEAST_SAVING) * size]
        if not plans:
            return None
        predicted, sizes = (np.array(each) for each in zip(*map(self.of, plans), strict=True))
        difference = predicted[:, None] - np.array([self.of(plan)[0] for plan in seen])
        distance = np.linalg.norm(difference, axis=-1)
        near = np.arange(len(plans)), distance.argmin(1)
        expected = np.array(list(seen.values()))[near[1]] + difference[near].sum(-1)
        deviation = np.maximum(SPREAD * distance[near], LEAST_DEVIATION)
        saving = ndtr((allowed - expected) / deviation) * (size - sizes)
        return plans[saving.argmax()] if saving.max() > LEAST_SAVING * size else None

    def _nats(self, plan: CompressionPlan) -> Float[np.ndarray, " costs"]:
        if plan == self.full:
            return np.zeros(1 + len(plan.layers))
        costs = self.costs[plan.window]
        return np.array([self.floor, *(costs.of(i, ranks) for i, ranks in enumerate(plan.layers))])

    def _changed(self, plan: CompressionPlan) -> Iterator[CompressionPlan]:
        """The plan with every window, and with each of its layers at all other ranks."""
        for window, costs in self.costs.items():
            for layer in range(len(plan.layers)):
                for ranks in _choices(costs):
                    layers = (*plan.layers[:layer], ranks, *plan.layers[layer + 1 :])
                    changed = replace(self.full, layers=layers, window=window, sinks=SINKS)
                    yield changed.within(self.config)


def _choices(costs: LayerCosts) -> list[LayerRanks]:
    """All that a layer may keep."""
    return [LayerRanks(0, 0), *(kept(keys, values) for keys in costs.keys for values in costs.values)]
