"""Search for the plan of fewest bytes within a limit on perplexity: `zdc plan --max-degradation` (ours).

Stages, each starting from what the last one found:

1. spectrum: ranks by σ² (`CompressionPlan.from_spectrum`), as many coordinates as the limit asks for;
2. layers: what lowering Q/K or V or cutting off distant tokens in one layer alone costs in perplexity; costs
   are taken to add up, which orders all steps from the dense cache to the smallest by cost per byte; along
   that path the last plan within the limit, for each window;
3. refine: single further steps from there, cheapest first, kept where the limit still holds.

Every plan is measured with arrays of its own size. `uniform` knows no window and one pair of ranks.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from convert.trials import Trial, TrialBook
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.layer_costs import LayerCosts, cheapest_path, rank_levels, steps_down
from zdc_jax.plan import CompressionPlan, LayerRanks, allowed_ranks

Mode = Literal["window", "uniform"]

WINDOWS = (64, 128, 256, 512)
"""Windows tried, where they are at most a quarter of the context."""
COST_WINDOW = 128
"""The window with which single layers are measured."""
SINKS = 4
BUDGETS = tuple(np.linspace(0.9, 0.1, 17))
"""Shares of the coordinates outside the window that the spectrum stage tries."""
REFINE_FAILURES = 8
"""Steps of the last stage that may fail one after another."""


@dataclass(frozen=True)
class SearchOptions:
    """`max_degradation`: limit on the relative increase of perplexity; `trials`: most plans measured."""

    max_degradation: float
    mode: Mode = "window"
    trials: int = 400

    def __post_init__(self) -> None:
        if not self.max_degradation > 0:
            raise PlanError(f"max_degradation={self.max_degradation} must be > 0 (0.02 means 2 %)")
        if self.trials < 1:
            raise PlanError(f"trials={self.trials} must be >= 1")


class _Exhausted(Exception):
    """As many plans as allowed were measured."""


class Search:
    """One search: measures through a `TrialBook`, remembers the best plan within the limit.

    `watch`, if given, is called after every new trial with it and the best so far (None until there is one).
    """

    def __init__(
        self,
        book: TrialBook,
        options: SearchOptions,
        watch: Callable[[Trial, Trial | None], None] | None = None,
    ):
        self.book, self.options, self.watch = book, options, watch
        self.limit, self.config = options.max_degradation, book.config
        self.best: Trial | None = None
        self.measured = 0

    def run(self) -> Trial:
        """The best plan found.

        Raises:
          PlanError: no plan of this mode holds the limit.
        """
        with contextlib.suppress(_Exhausted):
            if self.options.mode == "window":
                self._window_search()
            else:
                self._uniform_search()
        if self.best is None:
            raise PlanError(
                f"no plan measured in mode {self.options.mode!r} stays within {self.limit:.2%}; the dense "
                f"cache does: raise the limit or the number of trials ({self.options.trials})"
            )
        return self.best

    def try_plan(self, plan: CompressionPlan) -> Trial:
        """Measures, and keeps what is smaller within the limit."""
        if self.measured >= self.options.trials:
            raise _Exhausted
        trial = self.book.measure(plan)
        self.measured += 1
        better = self.best is None or trial.bytes_share < self.best.bytes_share
        if trial.increase <= self.limit and better:
            self.best = trial
        if self.watch is not None:
            self.watch(trial, self.best)
        return trial

    def last_within(self, plans: Sequence[CompressionPlan]) -> None:
        """Bisects plans of falling size for the last within the limit, passing over those known larger."""
        low, high = 0, len(plans)
        while low < high:
            middle = (low + high) // 2
            larger = self.best is not None and self.book.share(plans[middle]) >= self.best.bytes_share
            if larger or self.try_plan(plans[middle]).increase <= self.limit:
                low = middle + 1
            else:
                high = middle

    def _window_search(self) -> None:
        length = self.book.windows.shape[1]
        windows = [w for w in WINDOWS if w <= length // 4] or [WINDOWS[0]]
        near = min(windows, key=lambda w: abs(w - COST_WINDOW))
        self.last_within(self._spectrum_plans(near))
        costs = self._layer_costs(near)
        # From the window that was measured outwards: the best so far spares the others most of their trials.
        for window in sorted(windows, key=lambda w: abs(np.log2(w / near))):
            self.last_within([self._plan(ranks, window) for ranks in cheapest_path(costs)])
        self._refine(costs)

    def _uniform_search(self) -> None:
        ranks = allowed_ranks(self.config.head_dim)[:0:-1]
        for v in ranks:
            self.last_within([CompressionPlan.uniform(self.config, qk=qk, v=v) for qk in ranks])

    def _plan(self, ranks: Sequence[LayerRanks], window: int) -> CompressionPlan:
        full = CompressionPlan.full(self.config)
        return replace(full, layers=tuple(ranks), window=window, sinks=SINKS)

    def _spectrum_plans(self, window: int) -> list[CompressionPlan]:
        basis = self.book.basis
        least = 2 * allowed_ranks(self.config.head_dim)[1] / (2 * self.config.head_dim)
        return [
            CompressionPlan.from_spectrum(
                basis.qk_spectrum, basis.vo_spectrum, budget=budget, qk_share=0.45, window=window, sinks=SINKS
            )
            for budget in BUDGETS
            if budget * 0.45 * 2 >= least
        ]

    def _layer_costs(self, window: int) -> LayerCosts:
        config, H = self.config, self.config.head_dim
        ranks = rank_levels(H)

        def alone(layer: int, qk: int, v: int) -> float:
            layers = [LayerRanks(H, H)] * config.num_layers
            layers[layer] = LayerRanks(qk, v)
            return float(np.log1p(self.try_plan(self._plan(layers, window)).increase))

        layers = range(config.num_layers)
        return LayerCosts(
            ranks,
            np.array([[alone(layer, r, H) for r in ranks[:-1]] + [0.0] for layer in layers]),
            np.array([[alone(layer, H, r) for r in ranks[:-1]] + [0.0] for layer in layers]),
            np.array([alone(layer, 0, 0) for layer in layers]),
        ).monotone()

    def _refine(self, costs: LayerCosts) -> None:
        """Single steps down from the best, cheapest first by its layer's costs, until several fail."""
        progress = self.best is not None
        while progress:
            progress, before = False, self.best
            assert before is not None
            steps = steps_down(costs, before.plan.layers, single=True)
            for layer, ranks in steps[:REFINE_FAILURES]:
                layers = list(before.plan.layers)
                layers[layer] = ranks
                if self.try_plan(replace(before.plan, layers=tuple(layers))) is self.best:
                    progress = True
                    break


def describe(config: ModelConfig, trial: Trial) -> str:
    """One line for people."""
    R, Z = trial.plan.mean_ranks
    cut = sum(ranks.qk == 0 for ranks in trial.plan.layers)
    low, high = trial.interval
    return (
        f"{trial.bytes_share:.1%} of the dense KV bytes at {trial.increase:+.2%} [{low:+.2%}, {high:+.2%}]: "
        f"window {trial.plan.window}, mean R={R:.0f} Z={Z:.0f} of {config.head_dim}, "
        f"{cut} of {config.num_layers} layers without distant tokens"
    )
