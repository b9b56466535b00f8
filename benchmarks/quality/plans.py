"""Plans of each cache method for a budget, a share of all bytes of the 16-bit cache.

A method has a list of settings, best first; the first one that fits the budget is used. The rest of the
budget goes to recent tokens kept whole (in eviction methods, to more kept tokens), so that all methods use
the same bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from zdc_jax import methods
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan

SINKS = 4
BUDGETS = (0.52, 0.36, 0.28, 0.20, 0.15, 0.12)
TWO_BUDGETS = (0.36, 0.20)
"""Budgets of methods outside the first list."""
WINDOW_STEP = 16
KEPT_STEP = 8

Ladder = Callable[[ModelConfig, int], CompressionPlan]
"""Plan of a size n in tokens; a larger n needs more bytes."""


@dataclass(frozen=True)
class Entry:
    """One method of the table.

    Attributes:
      name: name of the method.
      ladders: plans by size, best settings first.
      least: least size.
      step: step of the size.
      most: largest size; None for the context.
      budgets: budgets at which the method is judged.
      judged_by: what a budget limits: bytes stored, or bytes read for methods that choose.
    """

    name: str
    ladders: Sequence[Ladder]
    least: int = 0
    step: int = WINDOW_STEP
    most: int | None = None
    budgets: Sequence[float] = BUDGETS
    judged_by: str = "bytes"

    def at_budget(self, config: ModelConfig, context: int, budget: float, dtype: str) -> CompressionPlan:
        """Return the largest plan within the budget of the first ladder that fits.

        Raises:
          PlanError: the method has no plan so small, with its least share.
        """
        size = share_held if self.judged_by == "bytes" else share_read

        def share(plan):
            return size(plan, context, dtype)

        smallest = []
        for ladder in self.ladders:
            least = share(ladder(config, self.least))
            if least <= budget:
                return _largest(lambda n, ladder=ladder: ladder(config, n), share, budget, self, context)
            smallest.append(least)
        raise PlanError(f"{self.name} takes at least {min(smallest):.1%} at {context} tokens, {budget=:.0%}")


def _largest(
    plan: Callable[[int], CompressionPlan],
    share: Callable[[CompressionPlan], float],
    budget: float,
    entry: Entry,
    context: int,
) -> CompressionPlan:
    low, high = 0, ((entry.most or context) - entry.least) // entry.step
    while low < high:
        middle = (low + high + 1) // 2
        fits = share(plan(entry.least + middle * entry.step)) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return plan(entry.least + low * entry.step)


def share_held(plan: CompressionPlan, context: int, dtype: str) -> float:
    """Return the bytes that stay in memory, as a share of the 16-bit cache."""
    return plan.bytes(context, 1, dtype) / _dense(plan).bytes(context, 1, dtype)


def share_read(plan: CompressionPlan, context: int, dtype: str) -> float:
    """Return the bytes that decoding a token reads, as a share of the 16-bit cache."""

    def read(plan):
        return sum(spec.bytes_read(context) for spec in plan.layer_caches(dtype))

    return read(plan) / read(_dense(plan))


def _dense(plan: CompressionPlan) -> CompressionPlan:
    """Return the plan that keeps all coordinates of all tokens; a plain one also for plans of studies."""
    H = plan.head_dim
    layers = tuple(replace(ranks, qk=H, v=H, window=None, settings=None) for ranks in plan.layers)
    own = {field.name: getattr(plan, field.name) for field in fields(CompressionPlan)}
    plain = {"method": "zdc", "settings": None, "sinks": 0, "window": 0, "layers": layers}
    return CompressionPlan(**own | plain)


def method_plan(
    config: ModelConfig,
    method: str,
    *,
    ranks: tuple[int, int] | None = None,
    window: int = 0,
    sinks: int | None = None,
    **settings: Any,
) -> CompressionPlan:
    """Return a plan of a method.

    Args:
      ranks: (R, Z) in the calibrated basis; all coordinates of the checkpoint by default.
    """
    R, Z = ranks or (config.head_dim, config.head_dim)
    near = {"window": window, "sinks": (SINKS if window else 0) if sinks is None else sinks}
    return replace(
        CompressionPlan.uniform(config, qk=R, v=Z, **near),
        rotated=ranks is not None or method == "loki",
        method=method,
        settings=methods.settings_from_json(method, settings),
    )


def _window(method: str, **options: Any) -> Ladder:
    return lambda config, n: method_plan(config, method, window=n, **options)


def _kept(method: str, *, window: int, **options: Any) -> Ladder:
    return lambda config, n: method_plan(config, method, window=window, kept=n, **options)


def _half_recent(method: str, **options: Any) -> Ladder:
    """Return plans with as many recent tokens as heavy hitters, as in H2O; blocks of 64 count as recent."""
    return lambda config, n: method_plan(config, method, window=max(n - 64, 0), kept=n, **options)


RANKS = ((64, 64), (48, 48), (32, 48), (32, 32), (16, 32), (16, 16))
"""Uniform ranks to try for low rank, of a head dimension of 64."""
DUO_WINDOW = 256
"""Recent tokens of all heads, as in the paper."""
COMPOSED = (48, 48)
"""Ranks of compositions with ZDC, of a head dimension of 64."""
FIRST = (
    Entry("rotated", [lambda config, n: method_plan(config, "zdc", ranks=RANKS[0])], most=0, budgets=(1.0,)),
    Entry("window", [_window("window")], least=16),
    Entry("fp8", [_window("fp8")]),
    Entry("int8", [_window("int8")]),
    Entry("kivi", [_window("kivi", bits=bits) for bits in (4, 3, 2)], least=32),
    Entry(
        "turboquant",
        [_window("turboquant", bits_k=k, bits_v=v) for k, v in ((4, 4), (4, 3), (3, 3), (3, 2), (2, 2))],
    ),
    Entry("h2o", [_half_recent("h2o")], least=KEPT_STEP, step=KEPT_STEP),
    Entry("snapkv", [_kept("snapkv", window=64)], least=KEPT_STEP, step=KEPT_STEP),
    Entry("gear", [_window("gear", bits=bits) for bits in (4, 3, 2)], least=64),
    Entry("h2o-zdc", [_half_recent("h2o", ranks=COMPOSED)], least=KEPT_STEP, step=KEPT_STEP),
    Entry("gear-zdc", [_window("gear", bits=bits, ranks=COMPOSED) for bits in (4, 3, 2)], least=64),
    Entry("zdc", [_window("zdc", ranks=ranks) for ranks in RANKS], least=64),
)
"""Methods judged at all budgets. `rotated` keeps all coordinates: the cost of rounding alone."""


def others(heads: Callable[[int], tuple[tuple[int, ...], ...]]) -> tuple[Entry, ...]:
    """Return methods judged at two budgets.

    Args:
      heads: function that returns the best n of all KV heads, for `duo`.
    """
    kept: dict[str, Any] = {"least": KEPT_STEP, "step": KEPT_STEP, "budgets": TWO_BUDGETS}
    read: dict[str, Any] = {"least": 16, "budgets": TWO_BUDGETS, "judged_by": "bytes_read"}

    def choosing(name):
        return lambda config, n: method_plan(config, name, window=64, read=n)

    def duo(config, n):
        return method_plan(config, "duo", window=DUO_WINDOW, heads=heads(n))

    most = sum(map(len, heads(10**6)))
    return (
        Entry("tova", [_kept("tova", window=16)], **kept),
        Entry("knorm", [_kept("knorm", window=0)], **kept),
        Entry("quest", [choosing("quest")], **read),
        Entry("loki", [choosing("loki")], **read),
        Entry("duo", [duo], least=1, step=1, most=most, budgets=TWO_BUDGETS),
        Entry("palu", [_window("palu", ranks=ranks) for ranks in RANKS[2:]], least=64, budgets=(0.52, 0.36)),
    )
