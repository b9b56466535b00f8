"""Search of plans with two token classes: the paper's parameters, and a greedy descent (ZDC §5.2, Eq. 6)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks, TokenClasses
from zdc_jax.planning.layer_costs import rank_levels

FRACTIONS = (0.1, 0.25, 0.5, 0.75)
"""Shares of important tokens that a search tries."""


@dataclass(frozen=True)
class ClassNumbers:
    """Parameters of a plan with token classes; all layers share them but for the share of important tokens.

    Attributes:
      important: ranks of important tokens.
      rest: ranks of the other tokens.
      leaders: ranks of all tokens in the leading layer of each group.
      first: share of important tokens in the first group, in (0, 1). Shares are linear between first and
        last.
      last: share of important tokens in the last group, in (0, 1).
      group: layers per group, at least 1; the last group may have fewer.
      window: recent tokens at full rank.
      sinks: first tokens at full rank.
      block: tokens that are classified together.
    """

    important: LayerRanks
    rest: LayerRanks
    leaders: LayerRanks
    first: float
    last: float
    group: int
    window: int = 0
    sinks: int = 0
    block: int = 512

    @classmethod
    def largest(cls, config: ModelConfig, *, constrained: bool, block: int) -> Self:
        """Return the largest plan: all coordinates, the smallest groups and no window.

        With `constrained`, unimportant tokens keep one rank level less.

        Raises:
          PlanError: the head dimension allows no smaller rank.
        """
        levels, full = rank_levels(config.head_dim), LayerRanks(config.head_dim, config.head_dim)
        if constrained and len(levels) == 1:
            raise PlanError(
                "constrained=True: unimportant tokens need a smaller rank, and head_dim="
                f"{config.head_dim} allows none; use constrained=False or another mode"
            )
        rest = LayerRanks(levels[-2], levels[-2]) if constrained else full
        return cls(full, rest, full, FRACTIONS[-1], FRACTIONS[-1], list_group_sizes(config)[0], block=block)

    def make_plan(self, config: ModelConfig) -> CompressionPlan:
        """Make the plan for any model of this shape."""
        L = config.num_layers
        leaders = tuple(range(0, L, self.group))
        shares = tuple(round(float(x), 4) for x in np.linspace(self.first, self.last, len(leaders)))

        def spread(ranks: LayerRanks) -> tuple[LayerRanks, ...]:
            return tuple(self.leaders if i in leaders else ranks for i in range(L))

        classes = TokenClasses(leaders, shares, spread(self.important), self.block)
        return CompressionPlan(
            spread(self.rest),
            config.num_kv_heads,
            config.head_dim,
            self.sinks,
            self.window,
            classes=classes,
        )

    def meets_constraints(self) -> bool:
        """Return whether the plan satisfies Eq. 6.

        The share of important tokens does not fall with depth. Unimportant tokens keep less of Q/K and of V
        than important tokens. No class keeps more of Q/K than of V.
        """
        keeps_less = self.rest.qk < self.important.qk and self.rest.v < self.important.v
        pairs = self.important, self.rest, self.leaders
        return self.first <= self.last and keeps_less and all(ranks.qk <= ranks.v for ranks in pairs)

    def list_neighbors(
        self, config: ModelConfig, size: Callable[[CompressionPlan], float], *, constrained: bool
    ) -> dict[str, "ClassNumbers"]:
        """Return the smaller plans that differ in one parameter by one level, by the parameter's name.

        Args:
          config: the model.
          size: size of a plan.
          constrained: leave out plans that violate Eq. 6.
        """
        candidates = self._lower_ranks(config) | self._lower_shares()
        if larger := [n for n in list_group_sizes(config) if n > self.group]:
            candidates["group"] = replace(self, group=larger[0])
        own_size = size(self.make_plan(config))
        return {
            name: other
            for name, other in candidates.items()
            if (other.meets_constraints() or not constrained) and size(other.make_plan(config)) < own_size
        }

    def _lower_ranks(self, config: ModelConfig) -> dict[str, "ClassNumbers"]:
        """Return the steps to lower ranks; a plan cannot keep less of important tokens than of the rest."""
        levels, steps = rank_levels(config.head_dim), {}
        for name in ("important", "rest", "leaders"):
            ranks: LayerRanks = getattr(self, name)
            for part in ("qk", "v"):
                floor = getattr(self.rest, part) if name == "important" else 0
                if lower := [level for level in levels if floor <= level < getattr(ranks, part)]:
                    rank: dict[str, Any] = {part: lower[-1]}
                    change: dict[str, Any] = {name: replace(ranks, **rank)}
                    steps[f"{name}.{part}"] = replace(self, **change)
        return steps

    def _lower_shares(self) -> dict[str, "ClassNumbers"]:
        steps = {}
        for name in ("first", "last"):
            if lower := [share for share in FRACTIONS if share < getattr(self, name)]:
                change: dict[str, Any] = {name: lower[-1]}
                steps[name] = replace(self, **change)
        return steps


def list_group_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Return the layers per group that a search tries: powers of two from 2, and all layers."""
    L = config.num_layers
    return (*(1 << power for power in range(1, L.bit_length()) if 1 << power < L), L)


def descend(
    start: ClassNumbers,
    list_neighbors: Callable[[ClassNumbers], dict[str, ClassNumbers]],
    size: Callable[[ClassNumbers], float],
    increase: Callable[[ClassNumbers], float],
    limit: float,
) -> ClassNumbers:
    """Descend from `start` to smaller plans, always by the least increase of cost per size saved (ours).

    Lazy greedy search: the price of a step is measured again only when the step would come first, as if
      prices
    only rose while plans shrink. A step that led beyond the limit is not tried again. Both save most trials.

    Args:
      start: parameters of the first plan.
      list_neighbors: returns smaller plans by the name of the step.
      size: size of a plan.
      increase: measures the cost of a plan.
      limit: largest cost.

    Returns:
      The last plan within the limit, or `start`.
    """
    here, cost = start, increase(start)
    prices: dict[str, float] = {}
    failed: set[str] = set()
    while cost <= limit:
        steps = {name: other for name, other in list_neighbors(here).items() if name not in failed}
        costs: dict[str, float] = {}
        while steps:
            name = min(steps, key=lambda step: prices.get(step, -np.inf))
            if name in costs:
                here, cost = steps[name], costs[name]
                break
            costs[name] = increase(steps[name])
            prices[name] = (costs[name] - cost) / (size(here) - size(steps[name]))
            if costs[name] > limit:
                failed.add(name)
                del steps[name]
        else:
            break
    return here
