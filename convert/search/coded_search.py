"""Search for the smallest plan of method `coded` within the limits, then for the least that is read (ours).

The stages of `convert.search.search`, with *grades* in the place of ranks: so many coordinates at so many
bits. Prediction goes by what calibration measured of layers without far tokens, and by the error of scores.
Then one grade of keys and one of values are measured in each layer; what others cost is foretold from that
error. All far tokens are read there; near ones have eight bits. A last stage lets layers read fewer far
tokens: first one choice for all, the furthest within the limits, then single layers one choice further.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from jaxtyping import Float

from convert.search.search import REFINE_FAILURES, Exhausted, Measured, Search, SearchOptions
from convert.search.trials import Trial
from kernels_pallas import index_fits, plane_fits
from kernels_pallas.coded_scan import INDEX_BITS
from zdc_jax.errors import PlanError
from zdc_jax.methods.coded import INDEX_STEP, Settings
from zdc_jax.plan import RANK_STEP, CompressionPlan, LayerRanks
from zdc_jax.planning.coded_costs import coded_forecast, coded_levels, coded_plan, key_shares
from zdc_jax.planning.forecast import Forecast
from zdc_jax.planning.layer_costs import LayerCosts, Precision

SHORTEST_WINDOW = 16
"""Tokens; windows are halved down to here. Beside codes a window is a large share of the bytes."""
KERNEL_HEADS = (64, 128, 256)
"""Head dims of which kernels decode every grade."""
LEAST_INDEX_BITS = 4
"""Fewest of an index."""
CHOICE_SHARE = {"bytes": 1 / 5, "read": 2 / 5}
"""Of trials and minutes, left to the last stage, by objective. Its first plans have settings that no layer
had before, and take longest to compile."""
HELD_LIMIT = 2 / 3
"""Share of the limits that what is held may use up where what is read is to be least."""


@dataclass(frozen=True)
class TokenChoice:
    """So many coordinates of keys choose so many far tokens, which are read."""

    index: int
    read: int


CHOICES = (
    TokenChoice(24, 2048),
    TokenChoice(24, 1024),
    TokenChoice(24, 512),
    TokenChoice(16, 512),
    TokenChoice(16, 256),
    TokenChoice(16, 128),
)
"""By falling bytes read. No choice has more of either number than one before it, so that costs rise."""


def choices_for(context: int) -> tuple[TokenChoice, ...]:
    """Those that read at most a quarter of a context."""
    return tuple(choice for choice in CHOICES if choice.read <= context // 4)


def choosing(ranks: LayerRanks, choice: TokenChoice) -> LayerRanks:
    """The layer where only chosen tokens are read. Its index has four bits at least: with fewer it chooses
    badly. What is held grows by what the index takes more than before."""
    codes = ranks.settings
    assert isinstance(codes, Settings)
    index = max(codes.index, min(choice.index, ranks.qk - INDEX_STEP))
    bits = max(codes.bits_index if codes.index else codes.bits_k, LEAST_INDEX_BITS)
    return replace(ranks, settings=replace(codes, bits_index=bits, index=index, read=choice.read))


def choosing_on_kernels(ranks: LayerRanks, choice: TokenChoice) -> LayerRanks:
    """`choosing` with an index that kernels read, of as many coordinates or more; else the same layer.

    It may have fewer bits than the one before.
    """
    codes, rank = ranks.settings, ranks.qk
    assert isinstance(codes, Settings)
    fitting = [
        (index, bits)
        for index, bits in product(range(RANK_STEP, rank, RANK_STEP), INDEX_BITS)
        if index >= choice.index and bits >= max(LEAST_INDEX_BITS, codes.bits_k)
        if index_fits(index, bits) and plane_fits(rank - index, codes.bits_k)
    ]
    if not fitting:
        return ranks
    index, bits = min(fitting, key=lambda size: (size[0] * size[1], size))
    return replace(ranks, settings=replace(codes, index=index, bits_index=bits, read=choice.read))


class CodedSearch(Search):
    """`Search` for plans of method `coded`: mode `window`, fewest bytes held or read."""

    reading = False
    """Whether size is what a token reads, as in the last stage, and not what is held."""

    @classmethod
    def check(cls, options: SearchOptions) -> None:
        """`Search.check`."""
        for name, allowed in (("mode", ("window",)), ("objective", ("bytes", "read"))):
            if (value := getattr(options, name)) not in allowed:
                raise PlanError(f"{name}={value!r}: plans of method 'coded' are searched by one of {allowed}")

    def size(self, plan: CompressionPlan) -> float:
        """`Search.size`."""
        return self.book.read_share(plan) if self.reading else self.book.share(plan)

    def run(self) -> Trial:
        """`Search.run`; raises `PlanError` first where kernels do not decode the model's heads."""
        H = self.config.head_dim
        if self.options.on_kernels and H not in KERNEL_HEADS:
            raise PlanError(f"on_kernels=True: kernels decode heads of {KERNEL_HEADS} coordinates, not {H}")
        return super().run()

    def _window_search(self) -> None:
        self.budget = 1 - CHOICE_SHARE[self.options.objective]
        self.allowed = 1 if self.options.objective == "bytes" else HELD_LIMIT
        with contextlib.suppress(Exhausted):
            super()._window_search()
        self.budget, self.allowed = 1, 1
        if self.best is not None:
            self.reading = True
            self._read_less(self.best.plan)

    def _forecast(self) -> Forecast:
        return coded_forecast(self.config, self.book.profile, self.book.basis)

    def _levels(self) -> tuple[tuple[Precision, ...], tuple[Precision, ...]]:
        return coded_levels(self.config.head_dim)

    def _costs(
        self, layer: int, levels: Sequence[Precision], measured: Measured
    ) -> Float[np.ndarray, "levels 2"]:
        """Measured at the fewest bits, where they tell most; more cost as much less as scores err less."""
        return np.outer(key_shares(self.book.basis, layer, levels), measured(levels[0]))

    def _plan(self, ranks: Sequence[LayerRanks], window: int) -> CompressionPlan:
        return coded_plan(self.config, ranks, window)

    def _steps(self, costs: LayerCosts, plan: CompressionPlan) -> list[CompressionPlan]:
        """Also the plan with half the window."""
        steps, half = super()._steps(costs, plan), plan.window // 2
        return [*steps, replace(plan, window=half)] if half >= SHORTEST_WINDOW else steps

    def _read_less(self, plan: CompressionPlan) -> None:
        """From a plan that reads everything: each layer goes so many steps along the choices.

        Layers go first whose far tokens matter least, as was measured, or foretold if time was out before.
        """
        costs = self.costs or next(iter(self._forecast().costs.values()))
        choices = choices_for(self.length)
        chosen = choosing_on_kernels if self.options.on_kernels else choosing

        def after(steps: Sequence[int]) -> CompressionPlan:
            def far(ranks, step):
                return chosen(ranks, choices[step - 1]) if step and ranks.qk else ranks

            return replace(plan, layers=tuple(map(far, plan.layers, steps)))

        L = len(plan.layers)
        alike = [after([step] * L) for step in range(len(choices) + 1)]
        self.last_within(alike[1:])
        assert self.best is not None
        steps = [alike.index(self.best.plan)] * L
        left, failures = {layer for layer in range(L) if plan.layers[layer].qk}, 0
        while failures < REFINE_FAILURES:
            left = {layer for layer in left if steps[layer] < len(choices)}
            if not left:
                break
            layer = min(left, key=lambda layer: (steps[layer], costs.cut[layer], layer))
            further = [step + (index == layer) for index, step in enumerate(steps)]
            less = after(further)  # The same where keys have no room for the wider index.
            if less == self.best.plan or self.try_plan(less) is self.best:
                steps, failures = further, 0
            else:  # Further on it costs more yet.
                left.remove(layer)
                failures += 1
