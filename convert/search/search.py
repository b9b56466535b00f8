"""Search for the smallest plan within limits on perplexity and on tasks: `zdc plan --texts` (ours).

Smallest in bytes of the KV cache, or in predicted time of attention. The stages of `window`, each starting
from what the last one found:

1. prediction: from calibration (`zdc_jax.planning.predictor`), for the middle window, the last plan within
   the limits on the path from all coordinates to none;
2. layers: what lowering Q/K or V or cutting off distant tokens in one layer alone costs of either limit.
   Costs are taken to add up, which gives such paths once more, for each window. What tasks lose has a
   *price* beside what perplexity loses: that with which the sums hold both limits at the smallest size;
3. refine: single further steps from there, cheapest first, kept where the limit still holds.

`uniform` knows no window and one pair of ranks, `classes` the paper's two token classes (see
`convert.search.class_search`), `window+classes` these and a window. Plans of method `coded` are searched in
`convert.search.coded_search`. Every plan is measured with arrays of its size.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float

from convert.search.class_search import ClassNumbers, descend
from convert.search.trials import Trial, TrialBook
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.methods.coded import Settings
from zdc_jax.plan import CompressionPlan, LayerRanks, TokenClasses, allowed_ranks
from zdc_jax.planning.costs import request_seconds
from zdc_jax.planning.forecast import Forecast
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
Measured = Callable[[Precision], Float[np.ndarray, "2"]]
"""What a layer's keys, or values, cost of the limits on perplexity and on tasks at a grade."""

CLASS_WINDOWS = (128, 256, 512)
"""Windows tried with token classes."""
NEGLIGIBLE = 0.01
"""Share of the limits that cutting a layer off may cost so that its ranks are not measured."""
PRICES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.0)
"""Of a share of the limit on tasks, in shares of that on perplexity. Some layers do tasks harm: at too high a
price they are cut off, and their gains pay for what perplexity then loses beyond its limit."""
REFINE_FAILURES = 8
"""Steps of the last stage that may fail one after another."""


@dataclass(frozen=True)
class SearchOptions:
    """What to search for.

    max_degradation: limit on the relative increase of perplexity, > 0. min_retention: limit on what is
    retained of each task that counts, in [0, 1); 0 asks nothing of tasks. mode: what plans may do. trials:
    most plans measured. minutes: no plan is begun after so many, > 0. objective: what is to be least at the
    length of the windows, bytes of the KV cache, seconds of attention as
    `zdc_jax.planning.costs.request_seconds` predicts them, or bytes that a decoded token reads. constrained:
    whether token classes keep to the paper's Eq. 6 (`ClassNumbers.meets_constraints`). on_kernels: whether
    far tokens are chosen by such indexes alone as GPU kernels read.

    Raises:
      PlanError: on any other value, naming it and what is allowed.
    """

    max_degradation: float
    mode: Mode = "window"
    trials: int = 400
    objective: Objective = "bytes"
    constrained: bool = True
    min_retention: float = 0.0
    minutes: float = math.inf
    on_kernels: bool = False

    def __post_init__(self) -> None:
        if not self.max_degradation > 0:
            raise PlanError(f"max_degradation={self.max_degradation} must be > 0 (0.02 means 2 %)")
        if not 0 <= self.min_retention < 1:
            raise PlanError(f"min_retention={self.min_retention} must be in [0, 1) (0.97 means 97 %)")
        if self.trials < 1:
            raise PlanError(f"trials={self.trials} must be >= 1")
        if not self.minutes > 0:
            raise PlanError(f"minutes={self.minutes} must be > 0")
        for name, allowed in (("mode", get_args(Mode)), ("objective", get_args(Objective))):
            if getattr(self, name) not in allowed:
                raise PlanError(f"{name}={getattr(self, name)!r} must be one of {allowed}")


def class_block(length: int) -> int:
    """Positions that are classified together in plans searched on windows of so many tokens."""
    return min(TokenClasses.block, length)


class Exhausted(Exception):
    """As many plans as allowed were measured, or for as long."""


class Search:
    """One search: measures through a `TrialBook`, remembers the best plan within the limit.

    `watch`, if given, is called after every new trial with it and the best so far (None until there is one).
    `began`: when its minutes begin, by `time.monotonic`; default now.

    Raises:
      PlanError: options that this search has not.
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
        self.budget = 1.0  # Share of trials and minutes that may be used up.
        self.allowed = 1.0  # Share of the limits that plans may use up.
        self.costs: LayerCosts | None = None

    @classmethod
    def check(cls, options: SearchOptions) -> None:
        """Raises `PlanError` for options that this search has not."""
        if options.objective == "read":
            raise PlanError("objective='read': plans of method 'zdc' read all they hold; search for 'bytes'")
        if options.on_kernels:
            raise PlanError("on_kernels=True: of use to plans of method 'coded' alone")

    def run(self) -> Trial:
        """The best plan found.

        Raises:
          PlanError: no plan of this mode holds the limit.
        """
        options = self.options
        with contextlib.suppress(Exhausted):
            match options.mode:
                case "window":
                    self._window_search()
                case "uniform":
                    self._uniform_search()
                case "classes":
                    self._class_search([0])
                case "window+classes":
                    windows = [window for window in windows_for(self.length) if window in CLASS_WINDOWS]
                    self._class_search(windows or [CLASS_WINDOWS[0]])
        if self.best is None:
            raise PlanError(
                f"no plan measured in mode {options.mode!r} stays within {options.max_degradation:.2%} of "
                f"perplexity, retains {options.min_retention:.0%} of each task and takes less "
                f"{options.objective} than the dense cache: allow more, or more than {options.trials} trials "
                f"and {options.minutes:g} minutes"
            )
        return self.best

    def size(self, plan: CompressionPlan) -> float:
        """The objective, as a share of what the dense cache takes."""
        if self.options.objective == "bytes":
            return self.book.share(plan)

        def seconds(plan):
            return request_seconds(plan, self.config.num_heads, self.length)

        return seconds(plan) / seconds(CompressionPlan.full(self.config))

    def smallest(self) -> float:
        """`size` of the best so far; 1, the dense cache's, until there is one."""
        return 1.0 if self.best is None else self.size(self.best.plan)

    def try_plan(self, plan: CompressionPlan) -> Trial:
        """Measures, and keeps what is smaller within the limit."""
        minutes = (time.monotonic() - self.began) / 60
        if self.measured >= self.budget * self.options.trials or minutes > self.budget * self.options.minutes:
            raise Exhausted
        trial = self.book.measure(plan)
        self.measured += 1
        if self.cost(trial) <= self.allowed and self.size(plan) < self.smallest():
            self.best = trial
        if self.watch is not None:
            self.watch(trial, self.best)
        return trial

    def cost(self, trial: Trial) -> float:
        """What a plan costs of the limit that it uses up most; up to `allowed` it holds both."""
        nats = np.log1p(trial.increase) / np.log1p(self.options.max_degradation)
        return float(np.maximum(nats, self._retention_cost(trial)))  # NaN holds no limit.

    def _retention_cost(self, trial: Trial) -> float:
        if self.options.min_retention == 0:
            return 0.0
        return float(np.log(trial.least_retention) / np.log(self.options.min_retention))

    def _losses(self, trial: Trial) -> Float[np.ndarray, "2"]:
        """What a plan loses of the limits on perplexity and on tasks: perplexity alone would cut the layers
        that retrieve.

        The mean of all tasks, unlike `cost`: the worst of several is the one that chance was hardest on.
        """
        nats = np.log1p(trial.increase) / np.log1p(self.options.max_degradation)
        if self.options.min_retention == 0 or not trial.retention:
            return np.array([nats, 0.0])
        lost = np.log(list(trial.retention.values())) / np.log(self.options.min_retention)
        return np.array([nats, lost.mean()])

    def last_within(self, plans: Sequence[CompressionPlan], guess: int | None = None) -> None:
        """Looks for the last within the limit of plans of falling size, passing over those known larger.

        It bisects; from the index `guess`, if given, it first goes in doubling steps to the other side.
        """
        low, high, step = 0, len(plans), 1
        while low < high:
            middle = (low + high) // 2 if guess is None else min(max(guess, low), high - 1)
            larger = self.size(plans[middle]) >= self.smallest()
            held = larger or self.cost(self.try_plan(plans[middle])) <= self.allowed
            low, high = (middle + 1, high) if held else (low, middle)
            if guess is not None:
                passed = high < len(plans) if held else low > 0
                guess, step = None if passed else middle + (step if held else -step), 2 * step

    def _window_search(self) -> None:
        windows = list(windows_for(self.length))
        near = windows[cost_window(windows)]
        self._predicted(near)
        # From the middle window outwards: the best so far spares the others most of their trials.
        windows.sort(key=lambda window: abs(np.log2(window / near)))
        self.costs, holds = self._layer_costs(near)
        path = cheapest_path(self.costs)
        last = max((i for i, ranks in enumerate(path) if holds(ranks)), default=0)
        for window in windows:
            self.last_within([self._plan(ranks, window) for ranks in path], guess=last)
        self._refine(self.costs)

    def _forecast(self) -> Forecast:
        """Of plans, from calibration alone."""
        return Predictor.stored().forecast(self.config, self.book.profile)

    def _predicted(self, window: int) -> None:
        forecast = self._forecast()
        if window in forecast.costs:  # Calibration on a short context knows short windows alone.
            self.last_within([forecast.plan(draft).for_model("") for draft in forecast.path(window)])

    def _uniform_search(self) -> None:
        ranks = allowed_ranks(self.config.head_dim)[:0:-1]
        for v in ranks:
            self.last_within([CompressionPlan.uniform(self.config, qk=qk, v=v) for qk in ranks])

    def _class_search(self, windows: Sequence[int]) -> None:
        """Descends once a window, from where the last one ended: a longer window leaves room for more."""
        constrained = self.options.constrained
        block = class_block(self.length)
        numbers = ClassNumbers.largest(self.config, constrained=constrained, block=block)
        for window in windows:
            numbers = descend(
                replace(numbers, window=window, sinks=SINKS if window else 0),
                lambda here: here.neighbours(self.config, self.size, constrained=constrained),
                lambda here: self.size(here.plan(self.config)),
                lambda here: self.cost(self.try_plan(here.plan(self.config))),
                1.0,
            )

    def _plan(self, ranks: Sequence[LayerRanks], window: int) -> CompressionPlan:
        return CompressionPlan.of_layers(self.config, ranks, window=window, sinks=SINKS)

    def _levels(self) -> tuple[tuple[Precision, ...], tuple[Precision, ...]]:
        """What single layers are measured at, of keys and of values."""
        levels = tuple(map(Precision, rank_levels(self.config.head_dim)))
        return levels, levels

    def _layer_costs(self, window: int) -> tuple[LayerCosts, Callable[[Sequence[LayerRanks]], bool]]:
        """Of both limits together, at the price with which least is expected to hold them; and whether ranks
        of layers are, by costs that add up."""
        whole, nats, tasks = self._measured_costs(window)

        def holds(ranks: Sequence[LayerRanks]) -> bool:
            sums = [sum(costs.of(i, layer) for i, layer in enumerate(ranks)) for costs in (nats, tasks)]
            return bool((whole + sums <= self.allowed).all())

        def least(costs: LayerCosts) -> float:
            within = [ranks for ranks in cheapest_path(costs) if holds(ranks)]
            return self.size(self._plan(within[-1], window)) if within else 1.0

        return min((_priced(nats, tasks, price).monotone() for price in PRICES), key=least), holds

    def _measured_costs(self, window: int) -> tuple[Float[np.ndarray, "2"], LayerCosts, LayerCosts]:
        """What keeping all costs of both limits; what single layers cost of each."""
        keys, values = self._levels()
        most = keys[-1], values[-1]
        whole = [build_layer(*most)] * self.config.num_layers
        nothing = self._losses(self.try_plan(self._plan(whole, window)))

        def alone(layer: int, ranks: LayerRanks) -> Float[np.ndarray, "2"]:
            layers = [*whole[:layer], ranks, *whole[layer + 1 :]]
            return self._losses(self.try_plan(self._plan(layers, window))) - nothing

        def lowered(
            layer: int, levels: Sequence[Precision], ranks: Callable[[Precision], LayerRanks]
        ) -> Float[np.ndarray, "levels 2"]:
            if cut[layer].max() <= NEGLIGIBLE:  # Then any grade costs no more, and saves less.
                return np.array([cut[layer]] * (len(levels) - 1) + [np.zeros(2)])
            return self._costs(layer, levels, lambda precision: alone(layer, ranks(precision)))

        layers = range(self.config.num_layers)
        cut = np.array([alone(layer, LayerRanks(0, 0)) for layer in layers])
        qk = np.array(
            [lowered(layer, keys, lambda precision: build_layer(precision, most[1])) for layer in layers]
        )
        v = np.array(
            [lowered(layer, values, lambda precision: build_layer(most[0], precision)) for layer in layers]
        )
        of_nats, of_tasks = (LayerCosts(keys, values, qk[..., i], v[..., i], cut[:, i]) for i in (0, 1))
        return nothing, of_nats, of_tasks

    def _costs(
        self, layer: int, levels: Sequence[Precision], measured: Measured
    ) -> Float[np.ndarray, "levels 2"]:
        """Of a layer that keeps its keys, or its values, at these; the last costs nothing."""
        return np.array([*map(measured, levels[:-1]), np.zeros(2)])

    def _refine(self, costs: LayerCosts) -> None:
        """Single steps down from the best, cheapest first by its layer's costs, until several fail."""
        progress = self.best is not None
        while progress:
            progress, before = False, self.best
            assert before is not None
            for plan in self._steps(costs, before.plan):
                if self.try_plan(plan) is self.best:
                    progress = True
                    break

    def _steps(self, costs: LayerCosts, plan: CompressionPlan) -> list[CompressionPlan]:
        """Plans a single step below this one, cheapest first."""
        steps = list_reductions(costs, plan.layers, single=True)[:REFINE_FAILURES]

        def changed(layer, ranks):
            return (*plan.layers[:layer], ranks, *plan.layers[layer + 1 :])

        return [replace(plan, layers=changed(*step)) for step in steps]


def _priced(nats: LayerCosts, tasks: LayerCosts, price: float) -> LayerCosts:
    """Both costs together."""
    sums = (a + price * b for a, b in zip(nats[2:], tasks[2:], strict=True))
    return LayerCosts(nats.keys, nats.values, *sums)


def describe_bytes(trial: Trial) -> str:
    """What a plan holds, and what a token reads of it where that is less."""
    held = f"{trial.bytes_share:.1%} of the dense KV bytes"
    less = trial.read_share < trial.bytes_share - 1e-3
    return held + (f" (a token reads {trial.read_share:.1%})" if less else "")


def describe(config: ModelConfig, trial: Trial) -> str:
    """One line for people."""
    low, high = trial.interval
    tasks = f", at least {trial.least_retention:.1%} of each task" if trial.retention else ""
    return (
        f"{describe_bytes(trial)} at {trial.increase:+.2%} [{low:+.2%}, {high:+.2%}]"
        f"{tasks}: "
        f"window {trial.plan.window}, {_describe_ranks(config, trial.plan)}{_describe_codes(trial.plan)}"
    )


def _describe_ranks(config: ModelConfig, plan: CompressionPlan) -> str:
    if plan.classes is not None:
        classes, pair = plan.classes, lambda ranks: f"({ranks.qk}, {ranks.v})"
        member = 1 % config.num_layers  # Behind the first leader.
        return (
            f"{classes.fraction[0]:.0%} to {classes.fraction[-1]:.0%} of tokens important at "
            f"{pair(classes.important[member])} of (R, Z), the rest at {pair(plan.layers[member])}, "
            f"{len(classes.leaders)} leaders at {pair(plan.layers[0])}"
        )
    R, Z = plan.mean_ranks
    cut = sum(ranks.qk == 0 for ranks in plan.layers)
    return (
        f"mean R={R:.0f} Z={Z:.0f} of {config.head_dim}, "
        f"{cut} of {config.num_layers} layers without distant tokens"
    )


def _describe_codes(plan: CompressionPlan) -> str:
    far = [plan.settings_of(layer) for layer, ranks in enumerate(plan.layers) if ranks.qk]
    codes = [settings for settings in far if isinstance(settings, Settings)]

    def counted(words: Callable[[Settings], str]) -> str:
        return ", ".join(f"{what} ({n} layers)" for what, n in Counter(map(words, codes)).most_common())

    def choice(each: Settings) -> str:
        return f"{each.read} tokens, chosen by {each.index} coordinates" if each.read else "all tokens"

    def key_bits(each: Settings) -> str:
        return f"{each.bits_index} then {each.bits_k}" if each.index else str(each.bits_k)

    if not codes:
        return ""
    return (
        f"; keys in bits: {counted(key_bits)}; values in bits: "
        f"{counted(lambda each: str(each.bits_v))}; read: {counted(choice)}"
    )
