"""Plans of two token classes by the paper's few numbers, and a descent through them (ZDC §5.2, Eq. 6)."""

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
    """What a plan of token classes is made of, the same in all layers but for the share of important tokens.

    important, rest, leaders: ranks of the two classes, and of all tokens in the leaders of groups. first,
    last: share of important tokens in the first and in the last group, in (0, 1), linear between. group:
    layers a group, at least 1; the last may have fewer. window, sinks, block: tokens, as in the plan.
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
        """Everything kept, the smallest groups, no window; `constrained`: one level less of the rest.

        Raises:
          PlanError: the head dim has no smaller rank for the rest.
        """
        levels, full = rank_levels(config.head_dim), LayerRanks(config.head_dim, config.head_dim)
        if constrained and len(levels) == 1:
            raise PlanError(
                f"head_dim={config.head_dim} has no smaller rank for the rest of the tokens; "
                "classes need one, or constrained=False"
            )
        rest = LayerRanks(levels[-2], levels[-2]) if constrained else full
        return cls(full, rest, full, FRACTIONS[-1], FRACTIONS[-1], group_sizes(config)[0], block=block)

    def plan(self, config: ModelConfig) -> CompressionPlan:
        """The plan, for any model of this shape."""
        L = config.num_layers
        leaders = tuple(range(0, L, self.group))
        shares = tuple(round(float(x), 4) for x in np.linspace(self.first, self.last, len(leaders)))

        def in_layers(ranks):
            return tuple(self.leaders if i in leaders else ranks for i in range(L))

        classes = TokenClasses(leaders, shares, in_layers(self.important), self.block)
        return CompressionPlan(
            in_layers(self.rest),
            config.num_kv_heads,
            config.head_dim,
            self.sinks,
            self.window,
            classes=classes,
        )

    def meets_constraints(self) -> bool:
        """Eq. 6: important shares do not fall with depth, the rest keeps less of Q/K and of V than the
        important tokens, and Q/K no more than V."""
        less = self.rest.qk < self.important.qk and self.rest.v < self.important.v
        pairs = self.important, self.rest, self.leaders
        return self.first <= self.last and less and all(ranks.qk <= ranks.v for ranks in pairs)

    def neighbours(
        self, config: ModelConfig, size: Callable[[CompressionPlan], float], *, constrained: bool
    ) -> dict[str, "ClassNumbers"]:
        """Plans with one number one level on that are smaller by `size`, by the number's name.

        `constrained` leaves out those that break Eq. 6.
        """
        found = self._ranks_lower(config) | self._shares_lower()
        if larger := [n for n in group_sizes(config) if n > self.group]:
            found["group"] = replace(self, group=larger[0])
        now = size(self.plan(config))
        return {
            name: other
            for name, other in found.items()
            if (other.meets_constraints() or not constrained) and size(other.plan(config)) < now
        }

    def _ranks_lower(self, config: ModelConfig) -> dict[str, "ClassNumbers"]:
        """Important tokens never keep less than the rest: no plan can say that."""
        levels, found = rank_levels(config.head_dim), {}
        for name in ("important", "rest", "leaders"):
            ranks: LayerRanks = getattr(self, name)
            for part in ("qk", "v"):
                floor = getattr(self.rest, part) if name == "important" else 0
                if lower := [level for level in levels if floor <= level < getattr(ranks, part)]:
                    kept: dict[str, Any] = {part: lower[-1]}
                    step: dict[str, Any] = {name: replace(ranks, **kept)}
                    found[f"{name}.{part}"] = replace(self, **step)
        return found

    def _shares_lower(self) -> dict[str, "ClassNumbers"]:
        found = {}
        for name in ("first", "last"):
            if lower := [share for share in FRACTIONS if share < getattr(self, name)]:
                step: dict[str, Any] = {name: lower[-1]}
                found[name] = replace(self, **step)
        return found


def group_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Layers a group that a search tries: powers of two, and all layers. A group of one has no classes."""
    L = config.num_layers
    return (*(1 << power for power in range(1, L.bit_length()) if 1 << power < L), L)


def descend(
    start: ClassNumbers,
    neighbours: Callable[[ClassNumbers], dict[str, ClassNumbers]],
    size: Callable[[ClassNumbers], float],
    increase: Callable[[ClassNumbers], float],
    limit: float,
) -> ClassNumbers:
    """Steps from `start` to smaller neighbours, the least increase for what it saves first (ours).

    A step's price is measured anew only when it would come first, as if prices only rose while plans shrink
    (lazy greedy), and a step that led beyond the limit is not tried again: a fraction of the trials. Returns
    the last within the limit, or `start`.

    Args:
      neighbours: smaller ones, by name of the step. size, increase: of a plan; `increase` measures.
      limit: on the cost.
    """
    here, now = start, increase(start)
    prices: dict[str, float] = {}
    beyond: set[str] = set()
    while now <= limit:
        steps = {name: other for name, other in neighbours(here).items() if name not in beyond}
        measured: dict[str, float] = {}
        while steps:
            name = min(steps, key=lambda step: prices.get(step, -np.inf))
            if name in measured:
                here, now = steps[name], measured[name]
                break
            measured[name] = increase(steps[name])
            prices[name] = (measured[name] - now) / (size(here) - size(steps[name]))
            if measured[name] > limit:
                beyond.add(name)
                del steps[name]
        else:
            break
    return here
