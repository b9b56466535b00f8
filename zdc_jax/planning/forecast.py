"""Predicted costs of plans before any plan is measured (`Forecast`). Not part of the ZDC paper."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.layer_costs import LayerCosts, build_layer, cheapest_path


class Draft(NamedTuple):
    """Short form of a plan of a forecast. Drafts are much faster to make than plans.

    Attributes:
      layers: what each layer stores.
      window: window in tokens; 0 for the unmodified model.
    """

    layers: tuple[LayerRanks, ...]
    window: int


@dataclass(frozen=True, eq=False)
class Forecast:
    """Predicted costs of single layers, which are assumed to add up, and the plans that they describe.

    Attributes:
      full: plan of the unmodified model, which costs nothing; it is bound to the model.
      floor: cost of every other plan in addition to its layers, in nats per token.
      costs: costs of single layers in nats per token, for each window that plans can have.
      make: function that returns the plan with these layers and this window.
    """

    full: CompressionPlan
    floor: float
    costs: dict[int, LayerCosts]
    make: Callable[[Sequence[LayerRanks], int], CompressionPlan]
    _sizes: dict[tuple[LayerRanks, int, int], list[int]] = field(default_factory=dict, repr=False)

    @property
    def full_draft(self) -> Draft:
        """Draft of the unmodified model."""
        return Draft(self.full.layers, 0)

    def draft(self, layers: Iterable[LayerRanks], window: int) -> Draft:
        """Make a draft in normal form.

        A sliding-window layer of the model stores either its own window or the plan's window, so all nonzero
        ranks mean the same for it.
        """
        most = build_layer(self.costs[window].keys[-1], self.costs[window].values[-1])
        pairs = zip(layers, self.full.layers, strict=True)
        return Draft(tuple(most if ranks.qk and whole.window else ranks for ranks, whole in pairs), window)

    def plan(self, draft: Draft) -> CompressionPlan:
        """Return the plan of a draft."""
        if not draft.window:
            return self.full
        return self.make(draft.layers, draft.window).for_model(self.full.fingerprint)

    def nats(self, draft: Draft) -> Float[np.ndarray, " costs"]:
        """Return the predicted costs of the basis and of each layer, in nats per token."""
        if not draft.window:
            return np.zeros(1 + len(draft.layers))
        costs = self.costs[draft.window]
        return np.array([self.floor, *(costs.of(i, ranks) for i, ranks in enumerate(draft.layers))])

    def bytes(self, draft: Draft, context: int) -> int:
        """Return the bytes of a bfloat16 cache for `context` tokens, without the length of the sequence."""
        if not draft.window:
            return sum(spec.bytes(context, 1) for spec in self.full.layer_caches("bfloat16"))
        return sum(
            self._compute_sizes(ranks, draft.window, context)[i] for i, ranks in enumerate(draft.layers)
        )

    def path(self, window: int) -> list[Draft]:
        """Return the drafts of `cheapest_path`, from the largest one to one without far tokens."""
        return list(dict.fromkeys(self.draft(ranks, window) for ranks in cheapest_path(self.costs[window])))

    def paths(self) -> list[Draft]:
        """Return the drafts of the paths of all windows."""
        return [draft for window in self.costs for draft in self.path(window)]

    def _compute_sizes(self, ranks: LayerRanks, window: int, context: int) -> list[int]:
        """Return the bytes of each layer if it stores `ranks`."""
        key = ranks, window, context
        if key not in self._sizes:
            plan = self.make([ranks] * len(self.full.layers), window)
            self._sizes[key] = [spec.bytes(context, 1) for spec in plan.layer_caches("bfloat16")]
        return self._sizes[key]
