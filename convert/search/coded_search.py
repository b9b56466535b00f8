"""Search for the smallest plan of method `coded` within the limits, then for the least that is read (ours).

The stages of `convert.search.search`, with *grades* in the place of ranks: so many coordinates at so many
bits. Prediction goes by what calibration measured of layers without far tokens, and by the error of scores.
Then one grade of keys and one of values are measured in each layer; what others cost is foretold from that
error. All far tokens are read there; near ones have eight bits. A last stage lets layers read fewer far
tokens: first one choice for all, the furthest within the limits, then single layers one choice further.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from convert.search.search import REFINE_FAILURES, Exhausted, Search, SearchOptions
from convert.search.trials import Trial
from zdc_jax.cache.gaussian_codes import gaussian_distortion
from zdc_jax.errors import PlanError
from zdc_jax.methods.coded import INDEX_STEP, Settings
from zdc_jax.plan import CompressionPlan, LayerRanks, allowed_ranks
from zdc_jax.planning.layer_costs import CODED_NEAR, Grade, LayerCosts, cheapest_path
from zdc_jax.planning.profile import SINKS

KEY_GRADES = (
    (1, 2, 0),
    (3 / 4, 2, 4),
    (3 / 4, 2, 5),
    (1, 2, 5),
    (1, 2, 6),
    (1, 3, 5),
    (1, 3, 6),
    (1, 4, 6),
    (1, 6, 8),
    (1, 8, 0),
)
"""Share of the head dim that is kept of keys, its bits, and those of its index; 0: there is none. Of their
sizes these err least on a real model (`expected_error`); fewer coordinates retrieve next to nothing."""
VALUE_BITS = (2, 3, 4, 8)
FORETOLD_KEYS, FORETOLD_VALUES = 0.15, 0.03
"""Of what a layer costs without far tokens: what its keys, or values, cost in two bits. From single layers of
a real model (docs/coding.md), where keys stand from 0.12 to 0.21 and most values at nothing."""
INDEX_SHARE = 1 / 4
"""Of the head dim."""
SHORTEST_WINDOW = 16
"""Tokens; windows are halved down to here. Beside codes a window is a large share of the bytes."""
INDEX_BITS = 4
"""Fewest of an index."""
CHOICE_TRIALS = 1 / 5
"""Share of the trials that are left to the last stage."""
HELD_LIMIT = 2 / 3
"""Share of the limits that what is held may use up where what is read is to be least."""


@dataclass(frozen=True)
class Choice:
    """So many coordinates of keys choose so many far tokens, which are read."""

    index: int
    read: int


CHOICES = (
    Choice(32, 1024),
    Choice(32, 512),
    Choice(24, 512),
    Choice(24, 256),
    Choice(16, 256),
    Choice(16, 128),
)
"""By falling bytes read. No choice has more of either number than one before it, so that costs rise."""


def coded_levels(head_dim: int) -> tuple[tuple[Grade, ...], tuple[Grade, ...]]:
    """Grades of keys and of values by rising size."""
    index = max(1, round(INDEX_SHARE * head_dim / INDEX_STEP)) * INDEX_STEP
    allowed = np.array(allowed_ranks(head_dim)[1:])
    nearest = lambda share: int(allowed[np.abs(allowed - share * head_dim).argmin()])
    keys = {
        Grade(nearest(share), bits, *((index, first) if first else ())) for share, bits, first in KEY_GRADES
    }
    return tuple(sorted(keys, key=lambda grade: (grade.size, grade.bits))), tuple(
        Grade(head_dim, b) for b in VALUE_BITS
    )


def expected_error(grade: Grade, coded: Float[np.ndarray, "K H"], by: Float[np.ndarray, "K H"]) -> float:
    """Expected square error of products with vectors at a grade, where the other side is not coded.

    Turns spread what an index, or the rest, errs alike over its coordinates; of those that are dropped all is
    lost. coded, by: mean squares of the coordinates of both sides.
    """
    ends = {0, grade.index, grade.rank}
    parts = [slice(*pair) for pair in itertools.pairwise(sorted(ends))]
    bits = (grade.bits_index, grade.bits) if grade.index else (grade.bits,)
    errors = (
        gaussian_distortion(b) * coded[:, part].mean(-1) * by[:, part].sum(-1)
        for b, part in zip(bits, parts, strict=True)
    )
    dropped = (coded[:, grade.rank :] * by[:, grade.rank :]).sum(-1)
    return float(sum(errors, start=dropped).sum())


def _of_the_first(errors: Sequence[float]) -> Float[np.ndarray, " levels"]:
    """Shares of the first error, with the last taken off."""
    return (np.array(errors) - errors[-1]) / (errors[0] - errors[-1])


def choices_for(context: int) -> tuple[Choice, ...]:
    """Those that read at most a quarter of a context."""
    return tuple(choice for choice in CHOICES if choice.read <= context // 4)


def choosing(ranks: LayerRanks, choice: Choice) -> LayerRanks:
    """The layer where only chosen tokens are read. Its index has four bits at least: with fewer it chooses
    badly. What is held grows by what the index takes more than before."""
    codes = ranks.settings
    assert isinstance(codes, Settings)
    index = max(codes.index, min(choice.index, ranks.qk - INDEX_STEP))
    bits = max(codes.bits_index if codes.index else codes.bits_k, INDEX_BITS)
    return replace(ranks, settings=replace(codes, bits_index=bits, index=index, read=choice.read))


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

    def cost(self, trial: Trial) -> float:
        """`Search.cost`; before the last stage of a part of the limits, where that is to save the most."""
        part = 1 if self.reading or self.options.objective == "bytes" else HELD_LIMIT
        return super().cost(trial) / part

    def _window_search(self) -> None:
        self.most = self.options.trials - int(self.options.trials * CHOICE_TRIALS)
        with contextlib.suppress(Exhausted):
            super()._window_search()
        self.most = self.options.trials
        if self.best is not None and self.costs is not None:
            self.reading = True
            self._read_less(self.best.plan, self.costs)

    def _predicted(self, window: int) -> None:
        """Along the path by costs that calibration foretells, before any layer is measured."""
        far = np.maximum(self.book.profile.far_nats, 0)
        keys, values = self._levels()
        of_keys = np.array([nats * self._shares(layer, keys) for layer, nats in enumerate(far)])
        of_values = np.outer(far, _of_the_first([gaussian_distortion(grade.bits) for grade in values]))
        parts = FORETOLD_KEYS * of_keys, FORETOLD_VALUES * of_values
        path = cheapest_path(LayerCosts(keys, values, *parts, far).monotone())
        self.last_within([self._plan(ranks, window) for ranks in path])

    def _shares(self, layer: int, levels: Sequence[Grade]) -> Float[np.ndarray, " levels"]:
        """What keys of a layer cost at their grades, as shares of the first's: as scores err."""
        basis = self.book.basis
        alike = np.ones(basis.k_map[layer].shape[:2])  # An old basis does not tell.
        squares = lambda rms: alike if rms is None else np.square(rms[layer])
        return _of_the_first(
            [expected_error(grade, squares(basis.k_rms), squares(basis.q_rms)) for grade in levels]
        )

    def _levels(self) -> tuple[tuple[Grade, ...], tuple[Grade, ...]]:
        return coded_levels(self.config.head_dim)

    def _costs(self, layer: int, levels: Sequence[Grade], measured: Callable[[Grade], float]) -> list[float]:
        """Measured at the fewest bits, where they tell most; more cost as much less as scores err less."""
        return (measured(levels[0]) * self._shares(layer, levels)).tolist()

    def _plan(self, ranks: Sequence[LayerRanks], window: int) -> CompressionPlan:
        near = {"window": window, "sinks": SINKS}
        settings = Settings(index=0, read=0, bits_near=CODED_NEAR)
        return CompressionPlan.of_layers(self.config, ranks, **near, method="coded", settings=settings)

    def _steps(self, costs: LayerCosts, plan: CompressionPlan) -> list[CompressionPlan]:
        """Also the plan with half the window."""
        steps, half = super()._steps(costs, plan), plan.window // 2
        return [*steps, replace(plan, window=half)] if half >= SHORTEST_WINDOW else steps

    def _read_less(self, plan: CompressionPlan, costs: LayerCosts) -> None:
        """From a plan that reads everything: each layer goes so many steps along the choices."""
        choices = choices_for(self.length)

        def after(steps: Sequence[int]) -> CompressionPlan:
            far = lambda ranks, step: choosing(ranks, choices[step - 1]) if step and ranks.qk else ranks
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
            if self.try_plan(after(further)) is self.best:
                steps, failures = further, 0
            else:  # Further on it costs more yet.
                left.remove(layer)
                failures += 1
