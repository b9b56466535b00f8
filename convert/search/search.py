"""Search for the smallest plan within limits on perplexity and on tasks, `zdc plan --texts` (ours).

Size means bytes of the KV cache or predicted time of attention. Every plan is measured with arrays of its
size. Mode `window` has three stages, each of which starts from the best plan so far:

1. Predict. Calibration (`zdc_jax.planning.predictor`) gives a path from all coordinates to none, for the
   middle window. The stage finds the last plan of the path within the limits.
2. Measure layers. One layer at a time, the stage lowers the ranks of Q/K or of V, or drops older tokens, and
   measures the loss in perplexity and in tasks. Losses are assumed to add up over layers, which gives a path
   for each window. A *price* weighs lost task accuracy against lost perplexity. The search chooses the price
   whose path leads to the smallest plan within both limits.
3. Refine. The stage takes single steps from the best plan, cheapest first, and keeps those within the limits.

Mode `uniform` has no window and one pair of ranks. Mode `classes` has the paper's two token classes
(`convert.search.class_search`), and `window+classes` adds a window. Plans of method `coded` are searched by
`convert.search.coded_search`.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float

from convert.search.class_search import ClassNumbers, class_block, descend, list_windows
from convert.search.trials import Trial, TrialBook
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.methods.coded import Settings
from zdc_jax.plan import CompressionPlan, LayerRanks, allowed_ranks
from zdc_jax.planning.costs import request_seconds
from zdc_jax.planning.layer_costs import (
    LayerCosts,
    Precision,
    build_layer,
    cheapest_path,
    list_reductions,
    rank_levels,
)
from zdc_jax.planning.predictor import Predictor
from zdc_jax.planning.profile import SINKS, cost_window, windows_for

Mode = Literal["window", "uniform", "classes", "window+classes"]
Objective = Literal["bytes", "time", "read"]

NEGLIGIBLE = 0.01
"""Share of the limits: a layer that loses less without older tokens needs no measurement at other ranks."""
PRICES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.0)
"""Prices of a share of the limit on tasks, in shares of the limit on perplexity.

Some layers harm tasks. Too high a price drops their older tokens and spends the gain in tasks on a loss of
perplexity beyond its limit, so lower prices are tried too.
"""
REFINE_FAILURES = 8
"""Consecutive failures that end the last stage."""


@dataclass(frozen=True)
class SearchOptions:
    """Limits, plans and objective of a search.

    Attributes:
      max_degradation: limit on the relative increase of perplexity, above 0.
      mode: kinds of plans.
      trials: most plans to measure.
      objective: quantity to minimize at the windows' length. `bytes`: KV cache; `time`: seconds of attention
        as predicted by `zdc_jax.planning.costs.request_seconds`; `read`: bytes that decoding a token reads.
      min_retention: limit on the retention of each task that counts, in [0, 1); 0 ignores tasks.
      minutes: time after which no further plan is measured, above 0.
      on_kernels: whether layers choose older tokens only by indexes that the GPU kernels can read.
      verifies: whether a search that simulates plans measures the best one with arrays of its size.
      refines: whether the search goes on from the best plan of the path in single steps.

    Raises:
      PlanError: an impossible value.
    """

    max_degradation: float
    mode: Mode = "window"
    trials: int = 400
    objective: Objective = "bytes"
    min_retention: float = 0.0
    minutes: float = math.inf
    on_kernels: bool = False
    verifies: bool = True
    refines: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.max_degradation < 1:
            raise PlanError(
                f"max_degradation={self.max_degradation}: must lie strictly between 0 and 1 (0.02 means 2 %)"
            )
        if not 0 <= self.min_retention < 1:
            raise PlanError(f"min_retention={self.min_retention}: must be in [0, 1) (0.97 means 97 %)")
        if self.trials < 1:
            raise PlanError(f"trials={self.trials}: must be at least 1")
        if not self.minutes > 0:
            raise PlanError(f"minutes={self.minutes}: must be above 0")
        for name, allowed in (("mode", get_args(Mode)), ("objective", get_args(Objective))):
            if getattr(self, name) not in allowed:
                raise PlanError(f"{name}={getattr(self, name)!r}: must be one of {allowed}")


class Exhausted(Exception):
    """The end of a search that has used its trials or its time."""


class Search:
    """A search that measures plans through a `TrialBook` and keeps the best plan within the limits.

    Args:
      book: measures plans.
      options: limits, plans and objective.
      watch: called after every trial with the trial and the best so far, which is None until there is one.
      began: start of the search's minutes by `time.monotonic`; default now.

    Raises:
      PlanError: this search does not support the options.
    """

    def __init__(
        self,
        book: TrialBook,
        options: SearchOptions,
        watch: Callable[[Trial, Trial | None], None] | None = None,
        began: float | None = None,
    ):
        self.check(options)
        self.book, self.options, self.watch = book, options, watch
        self.config = book.config
        self.length = book.windows.shape[1]
        self.best: Trial | None = None
        self.measured, self.began = 0, time.monotonic() if began is None else began
        self.budget = 1.0  # Share of trials and minutes that the current stage may use.
        self.allowed = 1.0  # Share of the limits that a plan may use.
        self.costs: LayerCosts | None = None  # Measured costs of layers, after the second stage.

    @classmethod
    def check(cls, options: SearchOptions) -> None:
        """Raise `PlanError` for options that this search does not support."""
        if options.objective == "read":
            raise PlanError(
                "objective='read': plans of method 'zdc' read the whole cache; use 'bytes' or method 'coded'"
            )
        if options.objective == "time" and "classes" in options.mode:
            raise PlanError(f"objective='time': mode={options.mode!r} minimizes bytes only; use 'bytes'")
        if options.on_kernels:
            raise PlanError("on_kernels=True: applies to plans of method 'coded' only")

    def run(self) -> Trial:
        """Search and return the best plan.

        Raises:
          PlanError: no measured plan is within the limits and smaller than the dense cache.
        """
        options = self.options
        with contextlib.suppress(Exhausted):
            match options.mode:
                case "window":
                    self._search_window()
                case "uniform":
                    self._search_uniform()
                case "classes" | "window+classes":
                    self._search_classes(with_window=options.mode == "window+classes")
        if self.best is None:
            raise PlanError(
                f"mode={options.mode!r}: no measured plan stays within {options.max_degradation:.2%} of "
                f"perplexity, retains {options.min_retention:.0%} of each task and is smaller in "
                f"{options.objective} than the dense cache; allow larger losses, or more trials and minutes"
            )
        return self.best

    def size(self, plan: CompressionPlan) -> float:
        """Return the objective of a plan, as a share of the dense cache's."""
        if self.options.objective == "bytes":
            return self.book.share(plan)
        full, heads = CompressionPlan.full(self.config), self.config.num_heads
        return request_seconds(plan, heads, self.length) / request_seconds(full, heads, self.length)

    def smallest(self) -> float:
        """Return the size of the best plan so far; 1, the dense cache's, until there is one."""
        return 1.0 if self.best is None else self.size(self.best.plan)

    def try_plan(self, plan: CompressionPlan) -> Trial:
        """Measure a plan, and keep it if it is within the limits and smaller than the best.

        Raises:
          Exhausted: no trials or no time are left.
        """
        self.spend()
        trial = self.book.measure(plan)
        if self.cost(trial) <= self.allowed and self.size(plan) < self.smallest():
            self.best = trial
        if self.watch is not None:
            self.watch(trial, self.best)
        return trial

    def spend(self) -> None:
        """Count one more measurement; raise `Exhausted` if no trials or no time are left."""
        minutes = (time.monotonic() - self.began) / 60
        if self.measured >= self.budget * self.options.trials or minutes > self.budget * self.options.minutes:
            raise Exhausted
        self.measured += 1

    def cost(self, trial: Trial) -> float:
        """Return the larger share of a limit that a plan uses; up to `allowed`, both limits hold."""
        nats, retention = np.log1p(trial.increase), self.options.min_retention
        tasks = np.log(trial.least_retention) / np.log(retention) if retention else 0.0
        # NaN is within no limit.
        return float(np.maximum(nats / np.log1p(self.options.max_degradation), tasks))

    def _compute_losses(self, trial: Trial) -> Float[np.ndarray, "2"]:
        """Return the shares of the limits on perplexity and on tasks that a plan uses.

        Perplexity alone would drop older tokens in the layers that retrieve. Unlike `cost`, tasks count by
        their mean, because the worst of several tasks is the one with the most unlucky noise.
        """
        nats = np.log1p(trial.increase) / np.log1p(self.options.max_degradation)
        if self.options.min_retention == 0 or not trial.retention:
            return np.array([nats, 0.0])
        lost = np.log(list(trial.retention.values())) / np.log(self.options.min_retention)
        return np.array([nats, lost.mean()])

    def find_last_within(self, plans: Sequence[CompressionPlan], guess: int | None = None) -> None:
        """Find the last plan within the limits by bisection.

        Plans that are not smaller than the best count as within the limits, without a measurement.

        Args:
          plans: plans of falling size and rising cost.
          guess: index near the result. Doubling steps from there bracket the result before the bisection.
        """
        low, high, step = 0, len(plans), 1
        while low < high:
            middle = (low + high) // 2 if guess is None else min(max(guess, low), high - 1)
            is_larger = self.size(plans[middle]) >= self.smallest()
            is_within = is_larger or self.cost(self.try_plan(plans[middle])) <= self.allowed
            low, high = (middle + 1, high) if is_within else (low, middle)
            if guess is not None:
                is_bracketed = high < len(plans) if is_within else low > 0
                guess, step = None if is_bracketed else middle + (step if is_within else -step), 2 * step

    def _search_window(self) -> None:
        windows = list(windows_for(self.length))
        near = windows[cost_window(windows)]
        self._try_predicted(near)
        # From the middle window outwards, because a good early plan saves the others most of their trials.
        windows.sort(key=lambda window: abs(np.log2(window / near)))
        self.costs, is_expected_within = self._choose_layer_costs(near)
        self._search_paths(self.costs, is_expected_within, windows)
        if self.options.refines:
            self._refine(self.costs)

    def _search_paths(
        self,
        costs: LayerCosts,
        is_expected_within: Callable[[Sequence[LayerRanks]], bool],
        windows: Sequence[int],
    ) -> None:
        """Find the last plan within the limits on the path of each window, from the last expected one."""
        path = self._list_path(costs)
        last = max((i for i, ranks in enumerate(path) if is_expected_within(ranks)), default=0)
        for window in windows:
            self.find_last_within([self._make_plan(ranks, window) for ranks in path], guess=last)

    def _try_predicted(self, window: int) -> None:
        forecast = Predictor.stored().forecast(self.config, self.book.profile)
        if window in forecast.costs:  # Calibration on short contexts has no costs for long windows.
            self.find_last_within([forecast.plan(draft).for_model("") for draft in forecast.path(window)])

    def _search_uniform(self) -> None:
        ranks = allowed_ranks(self.config.head_dim)[:0:-1]
        for v in ranks:
            self.find_last_within([CompressionPlan.uniform(self.config, qk=qk, v=v) for qk in ranks])

    def _search_classes(self, *, with_window: bool) -> None:
        """Descend once per window from the last plan, because longer windows allow more steps."""
        numbers = ClassNumbers.largest(self.config, class_block(self.length))
        for window in list_windows(self.length) if with_window else (0,):
            numbers = descend(
                replace(numbers, window=window),
                lambda here: here.list_neighbors(self.config),
                lambda here: self.size(here.make_plan(self.config)),
                lambda here: self.cost(self.try_plan(here.make_plan(self.config))),
                1.0,
            )

    def _list_path(self, costs: LayerCosts) -> list[tuple[LayerRanks, ...]]:
        """Return the layers of plans of falling size and rising cost."""
        return cheapest_path(costs)

    def _make_plan(self, ranks: Sequence[LayerRanks], window: int) -> CompressionPlan:
        return CompressionPlan.of_layers(self.config, ranks, window=window, sinks=SINKS)

    def _list_levels(self) -> tuple[tuple[Precision, ...], tuple[Precision, ...]]:
        """Return the precisions at which single layers are measured, of keys and of values."""
        levels = tuple(map(Precision, rank_levels(self.config.head_dim)))
        return levels, levels

    def _list_highest(self) -> list[LayerRanks]:
        """Return all layers at the highest precision."""
        keys, values = self._list_levels()
        return [build_layer(keys[-1], values[-1])] * self.config.num_layers

    def _choose_layer_costs(self, window: int) -> tuple[LayerCosts, Callable[[Sequence[LayerRanks]], bool]]:
        """Measure layers and combine both losses at the best price.

        Returns:
          costs: costs at the price whose path is expected to reach the smallest plan within the limits.
          is_expected_within: predicts whether a plan with given ranks is within the limits.
        """
        base, nats, tasks = self._measure_layer_costs(window)

        def is_expected_within(ranks: Sequence[LayerRanks]) -> bool:
            sums = [sum(costs.of(i, layer) for i, layer in enumerate(ranks)) for costs in (nats, tasks)]
            return bool((base + sums <= self.allowed).all())

        def expected_size(costs: LayerCosts) -> float:
            within = [ranks for ranks in self._list_path(costs) if is_expected_within(ranks)]
            return self.size(self._make_plan(within[-1], window)) if within else 1.0

        priced = (_add_at_price(nats, tasks, price).monotone() for price in PRICES)
        return min(priced, key=expected_size), is_expected_within

    def _measure_layer_costs(self, window: int) -> tuple[Float[np.ndarray, "2"], LayerCosts, LayerCosts]:
        """Measure each layer alone at lower precisions and without older tokens.

        Returns:
          Losses of the plan with all layers at the highest precision, [2]; and the further losses of single
          layers in perplexity and in tasks.
        """
        keys, values = self._list_levels()
        best_keys, best_values = keys[-1], values[-1]
        highest = self._list_highest()
        base = self._compute_losses(self.try_plan(self._make_plan(highest, window)))

        def measure_layer(layer: int, ranks: LayerRanks) -> Float[np.ndarray, "2"]:
            plan = self._make_plan(put_layer(highest, layer, ranks), window)
            return self._compute_losses(self.try_plan(plan)) - base

        def measure_side(
            layer: int, levels: Sequence[Precision], make_ranks: Callable[[Precision], LayerRanks]
        ) -> Float[np.ndarray, "levels 2"]:
            if cut[layer].max() <= NEGLIGIBLE:  # Then every precision costs no more, and saves less.
                return np.array([cut[layer]] * (len(levels) - 1) + [np.zeros(2)])
            lost = (measure_layer(layer, make_ranks(precision)) for precision in levels[:-1])
            return np.array([*lost, np.zeros(2)])  # The last and highest one loses nothing.

        layers = range(self.config.num_layers)
        cut = np.array([measure_layer(layer, LayerRanks(0, 0)) for layer in layers])
        qk = np.array([measure_side(layer, keys, lambda p: build_layer(p, best_values)) for layer in layers])
        v = np.array([measure_side(layer, values, lambda p: build_layer(best_keys, p)) for layer in layers])
        nats, tasks = (LayerCosts(keys, values, qk[..., i], v[..., i], cut[:, i]) for i in (0, 1))
        return base, nats, tasks

    def _refine(self, costs: LayerCosts) -> None:
        """Take single steps from the best plan, cheapest first, until several fail."""
        progress = self.best is not None
        while progress:
            progress, before = False, self.best
            assert before is not None
            for plan in self._list_steps(costs, before.plan)[:REFINE_FAILURES]:
                if self.try_plan(plan) is self.best:
                    progress = True
                    break

    def _list_steps(self, costs: LayerCosts, plan: CompressionPlan) -> list[CompressionPlan]:
        """Return the plans one step below `plan`, cheapest first."""
        steps = list_reductions(costs, plan.layers, single=True)
        return [replace(plan, layers=put_layer(plan.layers, layer, ranks)) for layer, ranks in steps]


def put_layer(layers: Sequence[LayerRanks], index: int, ranks: LayerRanks) -> tuple[LayerRanks, ...]:
    """Return the layers with other ranks for one of them."""
    return (*layers[:index], ranks, *layers[index + 1 :])


def _add_at_price(nats: LayerCosts, tasks: LayerCosts, price: float) -> LayerCosts:
    """Return the costs in perplexity plus `price` times the costs in tasks."""
    sums = (a + price * b for a, b in zip(nats[2:], tasks[2:], strict=True))
    return LayerCosts(nats.keys, nats.values, *sums)


def describe_bytes(trial: Trial) -> str:
    """Return a plan's cache size in words, with the share that a token reads where it is smaller."""
    stored = f"{trial.bytes_share:.1%} of the dense KV bytes"
    reads_less = trial.read_share < trial.bytes_share - 1e-3
    return stored + (f" (a token reads {trial.read_share:.1%})" if reads_less else "")


def describe(config: ModelConfig, trial: Trial) -> str:
    """Return one line about a measured plan."""
    plan, (low, high) = trial.plan, trial.interval
    R, Z = np.mean([(ranks.qk, ranks.v) for ranks in plan.layers], axis=0)
    cut = sum(ranks.qk == 0 for ranks in plan.layers)
    tasks = f", at least {trial.least_retention:.1%} of each task" if trial.retention else ""
    return (
        f"{describe_bytes(trial)} at {trial.increase:+.2%} [{low:+.2%}, {high:+.2%}]{tasks}: "
        f"window {plan.window}, mean R={R:.0f} Z={Z:.0f} of {config.head_dim}, "
        f"{cut} of {config.num_layers} layers drop all tokens outside the window{_describe_settings(plan)}"
    )


def _describe_settings(plan: CompressionPlan) -> str:
    """Return the settings of the method; those of `coded` with their numbers of layers."""
    per_layer = [plan.settings_of(layer) for layer, ranks in enumerate(plan.layers) if ranks.qk]
    coded = [settings for settings in per_layer if isinstance(settings, Settings)]
    if not coded:
        return "".join(f", {name}={value}" for name, value in asdict(plan.settings).items())
    key_bits = [f"{each.bits_index} then {each.bits_k}" if each.index else str(each.bits_k) for each in coded]
    value_bits = [str(each.bits_v) for each in coded]
    reads = [
        f"{each.read} tokens, chosen by {each.index} coordinates" if each.read else "all tokens"
        for each in coded
    ]
    keys, values, read = map(_count_layers, (key_bits, value_bits, reads))
    return f"; keys in bits: {keys}; values in bits: {values}; read: {read}"


def _count_layers(words: Sequence[str]) -> str:
    return ", ".join(f"{word} ({n} layers)" for word, n in Counter(words).most_common())
