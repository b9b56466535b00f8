"""Search for plans of method `coded`: the smallest within the limits, then the one that reads least (ours).

*Near* tokens are those in window and sinks, *far* tokens are all others. The search has the stages of
`convert.search.search`, with precisions (ranks and bits) instead of ranks:

1. Predict. Losses of plans come from the calibrated losses of layers without far tokens, and from the error
   of scores at each precision.
2. Measure layers. The stage measures one precision of keys and one of values in each layer. Losses at the
   other precisions follow from the error of scores. Layers read all far tokens; near tokens have eight bits.
3. Refine, as in `Search`. A step may also halve the window.
4. Read less. All layers read only chosen far tokens, as few as the limits allow. Then single layers read
   fewer.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from jaxtyping import Float

from convert.search.search import REFINE_FAILURES, Exhausted, MeasureLevel, Search, SearchOptions
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
"""Shortest window that steps halve to, in tokens. Next to quantized tokens, a window takes a large share."""
KERNEL_HEADS = (64, 128, 256)
"""Head dimensions for which the kernels decode every precision."""
LEAST_INDEX_BITS = 4
"""Fewest bits of an index. With fewer bits, an index chooses tokens badly."""
CHOICE_SHARE = {"bytes": 1 / 5, "read": 2 / 5}
"""Share of trials and minutes reserved for the last stage, by objective.

The first plans of that stage take longest to compile, because no earlier plan has layers like theirs.
"""
STORED_LIMIT = 2 / 3
"""Share of the limits that plans may use before the last stage, with the objective `read`."""


@dataclass(frozen=True)
class TokenChoice:
    """Choice of the far tokens that a layer reads.

    Attributes:
      index: coordinates of keys by which tokens are chosen.
      read: far tokens that are read.
    """

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
"""Choices by falling bytes read. Neither number rises from one choice to the next, so costs do not fall."""


def list_choices(context: int) -> tuple[TokenChoice, ...]:
    """Return the choices that read at most a quarter of a context."""
    return tuple(choice for choice in CHOICES if choice.read <= context // 4)


def limit_reads(ranks: LayerRanks, choice: TokenChoice) -> LayerRanks:
    """Return a layer that reads only chosen tokens.

    The index may need more coordinates or bits than the layer had, and so may grow the cache.
    """
    settings = ranks.settings
    assert isinstance(settings, Settings)
    index = max(settings.index, min(choice.index, ranks.qk - INDEX_STEP))
    bits = max(settings.bits_index if settings.index else settings.bits_k, LEAST_INDEX_BITS)
    return replace(ranks, settings=replace(settings, bits_index=bits, index=index, read=choice.read))


def limit_reads_on_kernels(ranks: LayerRanks, choice: TokenChoice) -> LayerRanks:
    """Return a layer that reads only chosen tokens, by the smallest index that the GPU kernels can read.

    The index has at least the choice's coordinates, and may have fewer bits than before. Where no such index
    exists, the layer stays the same.
    """
    settings, rank = ranks.settings, ranks.qk
    assert isinstance(settings, Settings)
    fitting = [
        (index, bits)
        for index, bits in product(range(RANK_STEP, rank, RANK_STEP), INDEX_BITS)
        if index >= choice.index and bits >= max(LEAST_INDEX_BITS, settings.bits_k)
        if index_fits(index, bits) and plane_fits(rank - index, settings.bits_k)
    ]
    if not fitting:
        return ranks
    index, bits = min(fitting, key=lambda size: (size[0] * size[1], size))
    return replace(ranks, settings=replace(settings, index=index, bits_index=bits, read=choice.read))


class CodedSearch(Search):
    """Search for plans of method `coded` with the fewest bytes stored or read; its mode is `window`."""

    reading = False
    """Whether size means the bytes that a token reads, as in the last stage, and not the bytes stored."""

    @classmethod
    def check(cls, options: SearchOptions) -> None:
        for name, allowed in (("mode", ("window",)), ("objective", ("bytes", "read"))):
            if (value := getattr(options, name)) not in allowed:
                words = " or ".join(map(repr, allowed))
                raise PlanError(f"{name}={value!r}: must be {words} for plans of method 'coded'")

    def size(self, plan: CompressionPlan) -> float:
        return self.book.read_share(plan) if self.reading else self.book.share(plan)

    def run(self) -> Trial:
        """Search and return the best plan.

        Raises:
          PlanError: the kernels cannot decode the model's heads, or no plan is within the limits.
        """
        H = self.config.head_dim
        if self.options.on_kernels and H not in KERNEL_HEADS:
            raise PlanError(
                f"on_kernels=True: the kernels decode head dimensions {KERNEL_HEADS}, this model has {H}; "
                "use on_kernels=False"
            )
        return super().run()

    def _search_window(self) -> None:
        self.budget = 1 - CHOICE_SHARE[self.options.objective]
        self.allowed = 1 if self.options.objective == "bytes" else STORED_LIMIT
        with contextlib.suppress(Exhausted):
            super()._search_window()
        self.budget, self.allowed = 1, 1
        if self.best is not None:
            self.reading = True
            self._read_less(self.best.plan)

    def _forecast(self) -> Forecast:
        return coded_forecast(self.config, self.book.profile, self.book.basis)

    def _list_levels(self) -> tuple[tuple[Precision, ...], tuple[Precision, ...]]:
        return coded_levels(self.config.head_dim)

    def _measure_levels(
        self, layer: int, levels: Sequence[Precision], measure: MeasureLevel
    ) -> Float[np.ndarray, "levels 2"]:
        """Measure the lowest precision, whose loss stands out most, and scale it by the error of scores."""
        return np.outer(key_shares(self.book.basis, layer, levels), measure(levels[0]))

    def _make_plan(self, ranks: Sequence[LayerRanks], window: int) -> CompressionPlan:
        return coded_plan(self.config, ranks, window)

    def _list_steps(self, costs: LayerCosts, plan: CompressionPlan) -> list[CompressionPlan]:
        """Return the plans one step below `plan`, cheapest first, and the plan with half the window."""
        steps, half = super()._list_steps(costs, plan), plan.window // 2
        return [*steps, replace(plan, window=half)] if half >= SHORTEST_WINDOW else steps

    def _read_less(self, plan: CompressionPlan) -> None:
        """Move layers of a plan that reads all tokens along the choices while the limits hold.

        Layers whose far tokens matter least move first. Their costs were measured, or are predicted where
        time ran out before the measurement.
        """
        costs = self.costs or next(iter(self._forecast().costs.values()))
        choices = list_choices(self.length)
        limit = limit_reads_on_kernels if self.options.on_kernels else limit_reads

        def make_plan(steps: Sequence[int]) -> CompressionPlan:
            """Return the plan whose layers use the choices at these positions; 0 reads all tokens."""
            layers = (
                limit(ranks, choices[step - 1]) if step and ranks.qk else ranks
                for ranks, step in zip(plan.layers, steps, strict=True)
            )
            return replace(plan, layers=tuple(layers))

        L = len(plan.layers)
        uniform = [make_plan([step] * L) for step in range(len(choices) + 1)]
        self.find_last_within(uniform[1:])
        assert self.best is not None
        steps = [uniform.index(self.best.plan)] * L
        movable, failures = {layer for layer in range(L) if plan.layers[layer].qk}, 0
        while failures < REFINE_FAILURES:
            movable = {layer for layer in movable if steps[layer] < len(choices)}
            if not movable:
                break
            layer = min(movable, key=lambda layer: (steps[layer], costs.cut[layer], layer))
            further = [step + (index == layer) for index, step in enumerate(steps)]
            candidate = make_plan(further)  # Equal to the best where keys have no room for the wider index.
            if candidate == self.best.plan or self.try_plan(candidate) is self.best:
                steps, failures = further, 0
            else:  # Further choices of this layer cost even more.
                movable.remove(layer)
                failures += 1
