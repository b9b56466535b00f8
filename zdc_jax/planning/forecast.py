"""`Forecast`: what plans are expected to cost before any is measured (ours)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.layer_costs import LayerCosts, build_layer, cheapest_path


class Draft(NamedTuple):
    """What tells plans of a forecast apart: what layers keep, and the window. Thousands take a second."""

    layers: tuple[LayerRanks, ...]
    window: int


@dataclass(frozen=True, eq=False)
class Forecast:
    """Costs of single layers, which are taken to add up, and the plans that they are of.

    full: the unmodified model's plan, which costs nothing; its draft has window 0. floor: nats a token that
    any other costs, its layers aside. costs: of single layers in nats a token, for each window that plans may
    have. make: the plan of what its layers keep and a window.
    """

    full: CompressionPlan
    floor: float
    costs: dict[int, LayerCosts]
    make: Callable[[Sequence[LayerRanks], int], CompressionPlan]
    _sizes: dict[tuple[LayerRanks, int, int], list[int]] = field(default_factory=dict, repr=False)

    @property
    def nothing(self) -> Draft:
        """Of the unmodified model."""
        return Draft(self.full.layers, 0)

    def draft(self, layers: Iterable[LayerRanks], window: int) -> Draft:
        """Of layers that slide it counts alone whether they keep anything beside the plan's window."""
        most = build_layer(self.costs[window].keys[-1], self.costs[window].values[-1])
        pairs = zip(layers, self.full.layers, strict=True)
        return Draft(tuple(most if ranks.qk and whole.window else ranks for ranks, whole in pairs), window)

    def plan(self, draft: Draft) -> CompressionPlan:
        """What is to be measured."""
        return self.make(draft.layers, draft.window) if draft.window else self.full

    def nats(self, draft: Draft) -> Float[np.ndarray, " costs"]:
        """Of the basis, and of each layer."""
        if not draft.window:
            return np.zeros(1 + len(draft.layers))
        costs = self.costs[draft.window]
        return np.array([self.floor, *(costs.of(i, ranks) for i, ranks in enumerate(draft.layers))])

    def bytes(self, draft: Draft, context: int) -> int:
        """Of a cache of `context` tokens in bfloat16, the row's length aside."""
        if not draft.window:
            return sum(spec.bytes(context, 1) for spec in self.full.layer_caches("bfloat16"))
        return sum(self._bytes(ranks, draft.window, context)[i] for i, ranks in enumerate(draft.layers))

    def path(self, window: int) -> list[Draft]:
        """From all that layers may keep to none of distant tokens."""
        return list(dict.fromkeys(self.draft(ranks, window) for ranks in cheapest_path(self.costs[window])))

    def paths(self) -> list[Draft]:
        """Those of all windows."""
        return [draft for window in self.costs for draft in self.path(window)]

    def _bytes(self, ranks: LayerRanks, window: int, context: int) -> list[int]:
        """Of each layer, if it keeps so much."""
        key = ranks, window, context
        if key not in self._sizes:
            plan = self.make([ranks] * len(self.full.layers), window)
            self._sizes[key] = [spec.bytes(context, 1) for spec in plan.layer_caches("bfloat16")]
        return self._sizes[key]
