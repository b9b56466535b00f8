"""A predicted plan checked on text: a few plans are measured, each chosen by all measured before it.

Constrained optimisation by expected improvement (Gardner et al., 2014), with a surrogate of ours. Predictions
of a regression over other models tell plans that differ little from one another better than they tell what
a plan costs; so a plan's degradation is expected to be that of the measured plan nearest to it, and what
prediction says of the layers in which the two differ.
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr

from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.forecast import Draft, Forecast
from zdc_jax.planning.layer_costs import LayerCosts, build_layer
from zdc_jax.planning.predictor import check_limit

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
    forecast: Forecast,
    measure: Callable[[CompressionPlan], float],
    *,
    max_degradation: float,
    context: int,
) -> CompressionPlan | None:
    """The smallest of at most `CHECKS` plans whose measured degradation is within the limit; None if none is.

    Args:
      forecast: what plans are expected to cost.
      measure: the relative increase of perplexity of a plan, on whatever text; NaN is over any limit.
      context: tokens at which bytes count.

    Raises:
      PlanError: a limit of 0 or below.
    """
    check_limit(max_degradation)
    surrogate = Surrogate(forecast, context)
    allowed, best = float(np.log1p(max_degradation)), forecast.nothing
    seen = {best: 0.0}
    for _ in range(CHECKS):
        draft = surrogate.next_draft(seen, best, allowed)
        if draft is None:
            break
        seen[draft] = float(np.nan_to_num(np.log1p(measure(forecast.plan(draft))), nan=np.inf))
        if seen[draft] <= allowed:
            best = draft
    return None if best == forecast.nothing else forecast.plan(best)


class Surrogate:
    """What is expected of plans, from prediction and from plans that were measured."""

    def __init__(self, forecast: Forecast, context: int):
        self.forecast, self.context = forecast, context
        self.paths = forecast.paths()
        self.known = dict[Draft, tuple[Float[np.ndarray, " costs"], int]]()

    def of(self, draft: Draft) -> tuple[Float[np.ndarray, " costs"], int]:
        """Predicted nats a token of the basis and of each layer; bytes of the cache at `context` tokens."""
        if draft not in self.known:
            self.known[draft] = self.forecast.nats(draft), self.forecast.bytes(draft, self.context)
        return self.known[draft]

    def next_draft(self, seen: dict[Draft, float], best: Draft, allowed: float) -> Draft | None:
        """Of all paths and of all changes of `best`: what saves most by expectation, if it is worth it.

        seen: measured nats a token. best: the smallest of them within `allowed`.
        """
        size = self.of(best)[1]
        changes = self._changed(best) if best.window else ()
        new = [draft for draft in dict.fromkeys((*self.paths, *changes)) if draft not in seen]
        drafts = [draft for draft in new if self.of(draft)[1] < (1 - LEAST_SAVING) * size]
        if not drafts:
            return None
        predicted, sizes = (np.array(each) for each in zip(*map(self.of, drafts), strict=True))
        difference = predicted[:, None] - np.array([self.of(draft)[0] for draft in seen])
        distance = np.linalg.norm(difference, axis=-1)
        near = np.arange(len(drafts)), distance.argmin(1)
        expected = np.array(list(seen.values()))[near[1]] + difference[near].sum(-1)
        deviation = np.maximum(SPREAD * distance[near], LEAST_DEVIATION)
        saving = ndtr((allowed - expected) / deviation) * (size - sizes)
        return drafts[saving.argmax()] if saving.max() > LEAST_SAVING * size else None

    def _changed(self, best: Draft) -> Iterator[Draft]:
        """It with every window, and with each of its layers keeping all else that it may."""
        for window, costs in self.forecast.costs.items():
            choices = _choices(costs)
            for layer in range(len(best.layers)):
                for ranks in choices:
                    layers = (*best.layers[:layer], ranks, *best.layers[layer + 1 :])
                    yield self.forecast.draft(layers, window)


def _choices(costs: LayerCosts) -> list[LayerRanks]:
    """All that a layer may keep."""
    return [LayerRanks(0, 0), *(build_layer(keys, values) for keys in costs.keys for values in costs.values)]
