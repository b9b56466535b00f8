"""Search for plans of method `coded`: the smallest within the limits, or the one that reads least (ours).

*Near* tokens are those in window and sinks, *far* tokens are all others. Plans are simulated
(`convert.search.simulation`), so that a new plan needs no compilation. The search has these stages:

1. Uniform. The same precision (ranks and bits) in all layers, so that an early end leaves a plan.
2. Measure layers, each alone, on little text: at one precision of keys, and at one of values. The loss is the
   KL divergence, which is never negative and has little noise, and that of tasks. Losses at the other
   precisions follow from the error of scores.
3. Knapsack. Plans of least predicted loss for each size (`convert.search.knapsack`), of few kinds of layers.
4. Refine, if the caller wants it. Single steps from the best plan. Only then is each layer measured without
   far tokens, layers drop them, and the window is halved.
5. Verify, unless the caller measures plans itself. The best plan is measured with arrays of its size. If it
   is not within the limits, the search goes on from stage 3 with tighter ones.
6. Read less, with the objective `read`. All layers read only chosen far tokens, as few as the limits allow.
   Then single layers read fewer.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Float

from convert.search.knapsack import MOST_KINDS, knapsack_path
from convert.search.search import REFINE_FAILURES, Exhausted, Search, SearchOptions, put_layer
from convert.search.simulation import Simulation
from convert.search.trials import Trial, TrialBook
from kernels_pallas import index_fits, plane_fits
from kernels_pallas.select.scan_inputs import INDEX_BITS
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import PlanError
from zdc_jax.evaluation.sheets import TaskDocument
from zdc_jax.loading import choose_dtype, stored_basis
from zdc_jax.methods.coded import INDEX_STEP, Settings
from zdc_jax.plan import RANK_STEP, CompressionPlan, LayerRanks
from zdc_jax.planning.coded_costs import coded_levels, coded_plan, key_shares
from zdc_jax.planning.layer_costs import LayerCosts, Precision, build_layer
from zdc_jax.planning.profile import cost_window, windows_for

SHORTEST_WINDOW = 32
"""Shortest window that steps halve to, in tokens: quantized rings of shorter ones are not smaller."""
KERNEL_HEADS = (64, 128, 256)
"""Head dimensions for which the kernels decode every precision."""
LEAST_INDEX_BITS = 4
"""Fewest bits of an index. With fewer bits, an index chooses tokens badly."""
UNIFORM = ((8, 0, 8), (4, 6, 4), (3, 5, 3), (2, 5, 3), (2, 4, 3), (2, 5, 2), (2, 4, 2))
"""Uniform plans by falling size: bits of keys, bits of their index (0: no index), bits of values."""
MEASURED_KEYS, MEASURED_VALUES = (2, 5), 2
"""Precision at which single layers are measured: bits of keys and of their index, bits of values. Losses at
fewer bits are so large that they no longer grow with the error."""
FEW_WINDOWS, FEW_DOCUMENTS = 2, 2
"""Text on which single layers are measured."""
LIST_GROWTH = 1.01
"""Smallest size of a larger plan, relative to the one before."""
CUT_FAILURES = 3
"""Failures that end the attempts to drop the far tokens of a layer."""
REAL_TRIALS = 4
"""Most plans of the stage `verify`."""
REAL_SHARE = 1 / 5
"""Share of trials and minutes reserved for plans with arrays of their size, which must be compiled."""
CHOICE_SHARE = {"bytes": 0, "read": 2 / 5}
"""Share of trials and minutes reserved for the last stage, by objective."""
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


@dataclass(frozen=True)
class CodedBooks:
    """Measurements of the same plans at three costs.

    Attributes:
      simulated: simulates plans on all text.
      few: simulates plans on little text.
      open_real: function that returns the measurements with arrays of a plan's size, on all text, and
        measures the unmodified model when it is first called.
    """

    simulated: TrialBook
    few: TrialBook
    open_real: Callable[[], TrialBook]

    @classmethod
    def open(
        cls,
        path: str | Path,
        windows: np.ndarray,
        documents: Sequence[TaskDocument],
        *,
        dtype: str | None,
        batch: int,
        journal: Path | None,
    ) -> Self:
        """Measure the unmodified model; the arguments are those of `TrialBook`."""
        checkpoint = Checkpoint.open(path)
        basis = stored_basis(checkpoint)
        options: dict[str, Any] = {"basis": basis, "dtype": dtype, "batch": batch, "journal": journal}
        simulation = Simulation(checkpoint, basis, choose_dtype(checkpoint.config, dtype))
        simulated = few = TrialBook(path, windows, documents, simulation=simulation, **options)
        if len(windows) > FEW_WINDOWS or len(documents) > FEW_DOCUMENTS:
            text = windows[:FEW_WINDOWS], documents[:FEW_DOCUMENTS]
            few = TrialBook(path, *text, simulation=simulation, **options)
        real = functools.cache(lambda: TrialBook(path, windows, documents, **options))
        return cls(simulated, few, real)


class CodedSearch(Search):
    """Search for plans of method `coded` with the fewest bytes stored or read; its mode is `window`.

    Args:
      books: measurements.
      options, watch, began: as for `Search`.
    """

    reading = False
    """Whether size means the bytes that a token reads, as in the last stage, and not the bytes stored."""

    def __init__(
        self,
        books: CodedBooks,
        options: SearchOptions,
        watch: Callable[[Trial, Trial | None], None] | None = None,
        began: float | None = None,
    ):
        super().__init__(books.simulated, options, watch, began)
        self.books = books
        self.within: list[Trial] = []  # Simulated plans within the limits.
        # Losses of the highest precision in all layers, and of single layers without far tokens.
        self.base = np.zeros(2)
        self.cut_losses: dict[int, float] = {}

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

    def list_larger(self, most: float) -> list[CompressionPlan]:
        """Return plans of least predicted loss that are larger than the best one, by rising size.

        Only after `run`. The plans are bound to the model. Each has at least `LIST_GROWTH` times the size of
        the one before. There are none if no time was left to measure layers.

        Args:
          most: largest size, relative to the best plan's.
        """
        if self.costs is None or self.best is None:
            return []
        last = smallest = self.size(self.best.plan)
        larger = []
        for ranks in reversed(self._list_path(self.costs)):
            plan = self._make_plan(ranks, self.best.plan.window)
            if LIST_GROWTH * last <= self.size(plan) <= most * smallest:
                larger.append(plan)
                last = self.size(plan)
        return larger

    def predict_loss(self, plan: CompressionPlan) -> float | None:
        """Return the loss of a plan if losses of layers add up, in shares of the limit on perplexity.

        None if no time was left to measure layers.
        """
        if self.costs is None:
            return None
        return float(self.base[0]) + sum(self.costs.of(i, layer) for i, layer in enumerate(plan.layers))

    def try_plan(self, plan: CompressionPlan) -> Trial:
        trial = super().try_plan(plan)
        if self.cost(trial) <= self.allowed:
            self.within.append(trial)
        return trial

    def _search_window(self) -> None:
        choice, verifies = CHOICE_SHARE[self.options.objective], self.options.verifies
        self.allowed = limit = 1 if self.options.objective == "bytes" else STORED_LIMIT
        for _ in range(REAL_TRIALS):
            self.budget = 1 - choice - verifies * REAL_SHARE
            with contextlib.suppress(Exhausted):
                self._search_simulated()
            self.budget = 1 - choice
            if self.best is None or not verifies or self._verify(self.best, limit):
                break
        self.budget, self.allowed = 1, 1
        if self.best is not None and self.options.objective == "read":
            self.reading = True
            self._read_less(self.best.plan)

    def _search_simulated(self) -> None:
        windows = windows_for(self.length)
        window = windows[cost_window(windows)]
        if self.costs is None:
            self.find_last_within(self._list_uniform(window))
            self.costs, self.is_expected_within = self._choose_layer_costs(window)
        self._search_paths(self.costs, self.is_expected_within, [window])
        if self.best is not None and self.options.refines:
            self._refine(self.costs)
            self._cut_layers(window)
            self._halve_window()

    def _verify(self, simulated: Trial, limit: float) -> bool:
        """Measure a plan with arrays of its size, and return whether it is within the limits.

        If it is not, the next search leaves room for twice the difference between arrays and simulation. If
        no time is left, the simulated plan stays the best.
        """
        allowed = self.allowed
        self.book, self.best, self.allowed = self.books.open_real(), None, limit
        try:
            real = self.try_plan(simulated.plan)
        except Exhausted:
            self.best = simulated
            raise
        if self.best is not None:
            return True
        self.book, self.allowed = self.books.simulated, allowed - 2 * (self.cost(real) - self.cost(simulated))
        within = (trial for trial in self.within if self.cost(trial) <= self.allowed)
        self.best = min(within, key=lambda trial: self.size(trial.plan), default=None)
        return False

    def _list_uniform(self, window: int) -> list[CompressionPlan]:
        """Return the plans of `UNIFORM`."""
        keys, _ = self._list_levels()
        H, L = self.config.head_dim, self.config.num_layers
        layers = (
            build_layer(find_keys(keys, bits, index, H), Precision(H, bits_v))
            for bits, index, bits_v in UNIFORM
        )
        return [self._make_plan([layer] * L, window) for layer in layers]

    def _list_levels(self) -> tuple[tuple[Precision, ...], tuple[Precision, ...]]:
        return coded_levels(self.config.head_dim)

    def _list_path(self, costs: LayerCosts) -> list[tuple[LayerRanks, ...]]:
        return knapsack_path(costs, [spec.window is None for spec in self.config.layers])

    def _compute_losses(self, trial: Trial) -> Float[np.ndarray, "2"]:
        """Return the shares of the limits on KL divergence, for that on perplexity, and on tasks."""
        tasks = super()._compute_losses(trial)[1]
        return np.array([trial.kl / np.log1p(self.options.max_degradation), tasks])

    def _measure_layer_costs(self, window: int) -> tuple[Float[np.ndarray, "2"], LayerCosts, LayerCosts]:
        """Measure each layer alone on little text, and predict its losses at all precisions."""
        keys, values = self._list_levels()
        L = self.config.num_layers
        self.base = self._measure_few(self._make_plan(self._list_highest(), window))
        key = find_keys(keys, *MEASURED_KEYS, self.config.head_dim)
        value = Precision(self.config.head_dim, MEASURED_VALUES)
        far = self._list_far_layers()
        lost_keys = [self._measure_alone(layer, build_layer(key, values[-1]), window) for layer in far]
        lost_values = [self._measure_alone(layer, build_layer(keys[-1], value), window) for layer in far]
        qk, v = np.zeros((L, len(keys), 2)), np.zeros((L, len(values), 2))
        for layer, of_keys, of_values in zip(far, shrink(lost_keys), shrink(lost_values), strict=True):
            qk[layer] = np.outer(key_shares(self.book.basis, layer, keys, key), of_keys)
            v[layer] = np.outer(key_shares(self.book.basis, layer, values, value), of_values)
        nats, tasks = (LayerCosts(keys, values, qk[..., i], v[..., i], np.zeros(L)) for i in (0, 1))
        return self.base, nats._replace(cut=np.full(L, np.inf)), tasks

    def _list_far_layers(self) -> list[int]:
        """Return the layers that store far tokens: those without a sliding window."""
        return [layer for layer, spec in enumerate(self.config.layers) if spec.window is None]

    def _measure_alone(self, layer: int, ranks: LayerRanks, window: int) -> Float[np.ndarray, "2"]:
        """Return what a layer with these ranks loses, if all others have the highest precision."""
        plan = self._make_plan(put_layer(self._list_highest(), layer, ranks), window)
        return self._measure_few(plan) - self.base

    def _measure_few(self, plan: CompressionPlan) -> Float[np.ndarray, "2"]:
        """Return the losses of a plan on little text.

        Raises:
          Exhausted: no trials or no time are left.
        """
        self.spend()
        return self._compute_losses(self.books.few.measure(plan))

    def _make_plan(self, ranks: Sequence[LayerRanks], window: int) -> CompressionPlan:
        return self.book.bind(coded_plan(self.config, ranks, window))

    def _list_steps(self, costs: LayerCosts, plan: CompressionPlan) -> list[CompressionPlan]:
        """Return the plans one step below `plan` that keep far tokens and few kinds of layers."""
        return [
            step
            for step in super()._list_steps(costs, plan)
            if _count_far(step) == _count_far(plan) and len(_list_kinds(step)) <= MOST_KINDS
        ]

    def _cut_layers(self, window: int) -> None:
        """Drop the far tokens of single layers, least loss first, until several fail.

        `window` is that of the other measurements of single layers.
        """
        for layer in self._list_far_layers():
            if layer not in self.cut_losses:
                self.cut_losses[layer] = float(self._measure_alone(layer, LayerRanks(0, 0), window).max())
        failures = 0
        for layer in sorted(self.cut_losses, key=self.cut_losses.__getitem__):
            assert self.best is not None
            if failures == CUT_FAILURES or self.cut_losses[layer] > self.allowed:
                break
            plan = replace(self.best.plan, layers=put_layer(self.best.plan.layers, layer, LayerRanks(0, 0)))
            failures += self.try_plan(plan) is not self.best

    def _halve_window(self) -> None:
        """Reduce the window while the limits hold. Each window needs a compilation."""
        assert self.best is not None
        while (half := self.best.plan.window // 2) >= SHORTEST_WINDOW:
            if self.try_plan(replace(self.best.plan, window=half)) is not self.best:
                break

    def _read_less(self, plan: CompressionPlan) -> None:
        """Move layers of a plan that reads all tokens along the choices while the limits hold.

        Layers whose far tokens matter least move first, as far as time sufficed to measure that.
        """
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
            layer = min(movable, key=lambda layer: (steps[layer], self.cut_losses.get(layer, 0.0), layer))
            further = [step + (index == layer) for index, step in enumerate(steps)]
            candidate = make_plan(further)  # Equal to the best where keys have no room for the wider index.
            if candidate == self.best.plan or self.try_plan(candidate) is self.best:
                steps, failures = further, 0
            else:  # Further choices of this layer cost even more.
                movable.remove(layer)
                failures += 1


def shrink(losses: Sequence[Float[np.ndarray, "2"]]) -> Float[np.ndarray, "L 2"]:
    """Move the losses of layers half of the way to their mean (decision 0029).

    Layers lose other amounts together than alone. Plans from these losses lose less at equal bytes.
    """
    measured = np.array(losses).reshape(-1, 2)
    return (measured + measured.mean(0)) / 2 if len(measured) else measured


def find_keys(keys: Sequence[Precision], bits: int, index: int, head_dim: int) -> Precision:
    """Return the precision of keys with all coordinates, these bits, and these bits of the index."""
    whole = (each for each in keys if each.rank == head_dim)
    return next(each for each in whole if (each.bits, each.bits_index) == (bits, index))


def _count_far(plan: CompressionPlan) -> int:
    return sum(bool(ranks.qk) for ranks in plan.layers)


def _list_kinds(plan: CompressionPlan) -> set[LayerRanks]:
    """Return the distinct layers that store far tokens."""
    return {replace(ranks, shift=False) for ranks in plan.layers if ranks.qk}
