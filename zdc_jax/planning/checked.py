"""Choosing a plan by measuring a few predicted plans on text.

The method is constrained optimization by expected improvement (Gardner et al., 2014) with another surrogate.
The predictor of costs is a regression over other models, so it predicts differences between similar plans
better than costs. The surrogate therefore starts from the measured cost of the most similar measured plan. It
adds the predicted difference in the layers that differ.
"""

from collections.abc import Callable, Iterator
from itertools import product, starmap

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr

from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.forecast import Draft, Forecast
from zdc_jax.planning.layer_costs import build_layer
from zdc_jax.planning.predictor import check_limit

CHECKS = 12
"""Largest number of plans to measure."""
SPREAD = 0.7
"""Standard deviation of the cost of a layer, relative to its prediction, from leave-one-out fits of the
predictor (`benchmarks.studies.bench_predictor`)."""
MIN_DEVIATION = 5e-4
"""Smallest standard deviation of an estimate, in nats per token: the resolution of a few windows of text."""
MIN_SAVING = 0.005
"""Smallest expected saving, as a share of the bytes, that justifies another measurement."""


def checked_plan(
    forecast: Forecast,
    measure: Callable[[CompressionPlan], float],
    *,
    max_degradation: float,
    context: int,
) -> CompressionPlan | None:
    """Measure at most `CHECKS` plans and return the smallest one within the limit, or None if there is none.

    Args:
      forecast: predicted costs of plans.
      measure: function that returns the relative increase of the perplexity of a plan on some text. NaN
        exceeds every limit.
      max_degradation: limit on that increase.
      context: context length for the cache size, in tokens.

    Raises:
      PlanError: `max_degradation` is not positive.
    """
    check_limit(max_degradation)
    surrogate = Surrogate(forecast, context)
    allowed, best = float(np.log1p(max_degradation)), forecast.full_draft
    measured = {best: 0.0}
    for _ in range(CHECKS):
        draft = surrogate.next_draft(measured, best, allowed)
        if draft is None:
            break
        measured[draft] = float(np.nan_to_num(np.log1p(measure(forecast.plan(draft))), nan=np.inf))
        if measured[draft] <= allowed:
            best = draft
    return None if best == forecast.full_draft else forecast.plan(best)


class Surrogate:
    """Estimates the costs of plans from predictions and measurements.

    Args:
      forecast: predicted costs of plans.
      context: context length for the cache size, in tokens.
    """

    def __init__(self, forecast: Forecast, context: int):
        self.forecast, self.context = forecast, context
        self.paths = forecast.paths()
        self._predictions = dict[Draft, tuple[Float[np.ndarray, " costs"], int]]()

    def predict(self, draft: Draft) -> tuple[Float[np.ndarray, " costs"], int]:
        """Return the predicted costs of a draft (`Forecast.nats`) and its cache size in bytes."""
        if draft not in self._predictions:
            self._predictions[draft] = self.forecast.nats(draft), self.forecast.bytes(draft, self.context)
        return self._predictions[draft]

    def next_draft(self, measured: dict[Draft, float], best: Draft, allowed: float) -> Draft | None:
        """Return the draft with the largest expected saving, or None if no saving justifies a measurement.

        The candidates are the drafts of all paths, and all changes of one layer and the window of `best`.

        Args:
          measured: measured costs of drafts, in nats per token.
          best: the smallest measured draft within `allowed`.
          allowed: limit on the cost, in nats per token.
        """
        size = self.predict(best)[1]
        changes = self._list_changes(best) if best.window else ()
        new = [draft for draft in dict.fromkeys((*self.paths, *changes)) if draft not in measured]
        drafts = [draft for draft in new if self.predict(draft)[1] < (1 - MIN_SAVING) * size]
        if not drafts:
            return None
        predicted, sizes = (np.array(each) for each in zip(*map(self.predict, drafts), strict=True))
        difference = predicted[:, None] - np.array([self.predict(draft)[0] for draft in measured])
        distance = np.linalg.norm(difference, axis=-1)
        nearest = np.arange(len(drafts)), distance.argmin(1)
        expected = np.array(list(measured.values()))[nearest[1]] + difference[nearest].sum(-1)
        deviation = np.maximum(SPREAD * distance[nearest], MIN_DEVIATION)
        saving = ndtr((allowed - expected) / deviation) * (size - sizes)
        return drafts[saving.argmax()] if saving.max() > MIN_SAVING * size else None

    def _list_changes(self, best: Draft) -> Iterator[Draft]:
        """Yield `best` with every window, combined with every choice for one of its layers."""
        for window, costs in self.forecast.costs.items():
            choices = [LayerRanks(0, 0), *starmap(build_layer, product(costs.keys, costs.values))]
            for layer in range(len(best.layers)):
                for ranks in choices:
                    layers = (*best.layers[:layer], ranks, *best.layers[layer + 1 :])
                    yield self.forecast.draft(layers, window)
