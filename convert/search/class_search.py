"""Search of plans with two token classes: the paper's parameters, and a greedy descent (ZDC §5.2, Eq. 6)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.methods.token_classes import Settings
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.layer_costs import rank_levels
from zdc_jax.planning.profile import SINKS

FRACTIONS = (0.1, 0.25, 0.5, 0.75)
"""Shares of important tokens that a search tries."""
WINDOWS = (128, 256, 512)
"""Windows that mode `window+classes` tries."""


def class_block(length: int) -> int:
    """Return the number of tokens that are classified together in plans searched on windows of `length`."""
    return min(Settings.block, length)


@dataclass(frozen=True)
class ClassNumbers:
    """Parameters of a plan with token classes.

    Attributes:
      important: ranks of important tokens.
      leaders: ranks of all tokens in the leading layer of each group.
      settings: ranks of the other tokens, shares of important tokens, layers per group, and the block.
      window: recent tokens at full rank.
    """

    important: LayerRanks
    leaders: LayerRanks
    settings: Settings
    window: int = 0

    @classmethod
    def largest(cls, config: ModelConfig, block: int) -> Self:
        """Return the largest plan: all coordinates, the smallest groups and no window.

        Unimportant tokens keep one rank level less.

        Raises:
          PlanError: the head dimension allows no smaller rank.
        """
        levels, full = rank_levels(config.head_dim), LayerRanks(config.head_dim, config.head_dim)
        if len(levels) == 1:
            raise PlanError(
                f"head_dim={config.head_dim} allows no smaller rank for unimportant tokens; use another mode"
            )
        group, share, rest = list_group_sizes(config)[0], FRACTIONS[-1], levels[-2]
        return cls(full, full, Settings(group, share, share, rest, rest, block))

    def make_plan(self, config: ModelConfig) -> CompressionPlan:
        """Make the plan for any model of this shape."""
        return CompressionPlan.of_layers(
            config,
            [
                self.important if layer % self.settings.group else self.leaders
                for layer in range(config.num_layers)
            ],
            window=self.window,
            sinks=SINKS if self.window else 0,
            method="token_classes",
            settings=self.settings,
        )

    def meets_constraints(self) -> bool:
        """Return whether the plan satisfies Eq. 6.

        The share of important tokens does not fall with depth. Unimportant tokens keep less of Q/K and of V
        than important tokens. No class keeps more of Q/K than of V.
        """
        rest = LayerRanks(self.settings.rest_qk, self.settings.rest_v)
        keeps_less = rest.qk < self.important.qk and rest.v < self.important.v
        pairs = self.important, rest, self.leaders
        return self.settings.first <= self.settings.last and keeps_less and all(r.qk <= r.v for r in pairs)

    def list_neighbors(self, config: ModelConfig) -> dict[str, "ClassNumbers"]:
        """Return the plans that differ in one parameter by one level, by its name, and satisfy Eq. 6."""
        levels = rank_levels(config.head_dim)[::-1]
        steps = {}
        for name in ("important", "leaders"):
            ranks = getattr(self, name)
            for part in ("qk", "v"):
                for level in _list_later(getattr(ranks, part), levels):
                    change: dict[str, Any] = {name: replace(ranks, **{part: level})}
                    steps[f"{name}.{part}"] = replace(self, **change)
        choices: dict[str, Sequence[float]] = {
            "rest_qk": levels,
            "rest_v": levels,
            "first": FRACTIONS[::-1],
            "last": FRACTIONS[::-1],
            "group": list_group_sizes(config),
        }
        for name, values in choices.items():
            for value in _list_later(getattr(self.settings, name), values):
                change = {name: value}
                steps[name] = replace(self, settings=replace(self.settings, **change))
        return {name: other for name, other in steps.items() if other.meets_constraints()}


def _list_later(value: float, choices: Sequence[float]) -> Sequence[float]:
    """Return the choice after `value`, or nothing after the last."""
    index = choices.index(value)
    return choices[index + 1 : index + 2]


def list_group_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Return the layers per group that a search tries: powers of two from 2, and all layers."""
    L = config.num_layers
    return (*(1 << power for power in range(1, L.bit_length()) if 1 << power < L), L)


def list_windows(length: int) -> tuple[int, ...]:
    """Return the windows that mode `window+classes` tries on text of `length` tokens."""
    return tuple(window for window in WINDOWS if window <= length // 4) or WINDOWS[:1]


def descend(
    start: ClassNumbers,
    list_neighbors: Callable[[ClassNumbers], dict[str, ClassNumbers]],
    size: Callable[[ClassNumbers], float],
    increase: Callable[[ClassNumbers], float],
    limit: float,
) -> ClassNumbers:
    """Descend from `start` to smaller plans, always by the least increase of cost per size saved (ours).

    Lazy greedy search: the price of a step is measured again only when the step would come first, as if
    prices only rose while plans shrink. A step that led beyond the limit is not tried again. Both save most
    trials.

    Args:
      start: parameters of the first plan.
      list_neighbors: returns other plans by the name of the step.
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
        steps = {
            name: other
            for name, other in list_neighbors(here).items()
            if name not in failed and size(other) < size(here)
        }
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
