"""Choosing the ranks of each layer from the spectra of a basis, within a budget of coordinates.

Not part of the ZDC paper.
"""

from collections.abc import Sequence

import numpy as np

from zdc_jax.basis import Basis
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks, allowed_ranks

MAX_DISTINCT_RANKS = 6
"""Largest number of distinct (R, Z) pairs in a plan. Each pair is compiled separately."""


def plan_from_spectrum(
    basis: Basis,
    *,
    budget: float,
    qk_share: float = 0.4,
    window: int = 0,
    sinks: int = 0,
    far: Sequence[bool] | None = None,
) -> CompressionPlan:
    """Choose ranks greedily by the largest σ² over all layers.

    Every layer with older tokens stores at least 16 coordinates of them. σ² measures how sharp the scores of
    a layer are, but not whether the layer needs older tokens. It therefore cannot choose layers to cut off.

    Args:
      basis: calibrated basis. Its spectra σ [L, K, H] are comparable between layers.
      budget: share of the coordinates of keys and values to store for older tokens, in (0, 1].
      qk_share: share of the stored coordinates for Q/K; the rest is for V/O.
      window: window of the plan, in tokens.
      sinks: sinks of the plan, in tokens.
      far: whether each layer stores older tokens, [L]. Default: all layers do.

    Raises:
      PlanError: a share is out of range, the budget is too small for the layers, or `far` has a wrong length.
    """
    if not 0 < budget <= 1:
        raise PlanError(
            f"budget={budget} must lie in (0, 1]: it is a share of all coordinates of keys and values"
        )
    if not 0 < qk_share < 1:
        raise PlanError(f"qk_share={qk_share} must lie strictly between 0 and 1")
    num_layers, num_kv_heads, head_dim = basis.qk_spectrum.shape
    total = round(budget * 2 * head_dim * num_layers)
    qk_total = min(round(total * qk_share), head_dim * num_layers)
    v_total = min(total - qk_total, head_dim * num_layers)
    open_layers = np.ones(num_layers, bool) if far is None else np.array(far, bool)
    if open_layers.shape != (num_layers,):
        raise PlanError(f"far has {len(open_layers)} entries, it must have {num_layers}: one per layer")
    qk = _greedy_ranks(basis.qk_spectrum, qk_total, open_layers)
    v = _greedy_ranks(basis.vo_spectrum, v_total, open_layers)
    ranks = _merge_ranks([LayerRanks(int(r), int(z)) for r, z in zip(qk, v, strict=True)])
    plan = CompressionPlan(ranks, num_kv_heads, head_dim, sinks, window)
    return plan.for_model(basis.fingerprint, basis.coordinates_hash, basis.shifted)


def _greedy_ranks(spectrum: np.ndarray, total: int, open_layers: np.ndarray) -> np.ndarray:
    """Return the ranks [L]: within `total`, raise them where a step adds the most σ² per coordinate."""
    num_layers, _, head_dim = spectrum.shape
    steps = np.array(allowed_ranks(head_dim))
    energy = np.concatenate([np.zeros((num_layers, 1)), np.cumsum((spectrum**2).sum(1), axis=1)], 1)
    level = open_layers.astype(int)
    if steps[level].sum() > total:
        raise PlanError(
            f"the budget of {total} coordinates is too small for {open_layers.sum()} layers with older "
            f"tokens; the least possible is {steps[level].sum()} ({steps[1]} per layer)"
        )
    while True:
        raised = np.minimum(level + 1, len(steps) - 1)
        rows = np.arange(num_layers)
        cost = steps[raised] - steps[level]
        gain = np.where(
            open_layers & (cost > 0) & (steps[level].sum() + cost <= total),
            (energy[rows, steps[raised]] - energy[rows, steps[level]]) / np.maximum(cost, 1),
            -np.inf,
        )
        best = int(np.argmax(gain))
        if gain[best] == -np.inf:
            return steps[level]
        level[best] += 1


def _merge_ranks(layers: list[LayerRanks]) -> tuple[LayerRanks, ...]:
    """Replace the rarest rank pairs by their nearest neighbor until `MAX_DISTINCT_RANKS` are left."""
    while len(set(layers)) > MAX_DISTINCT_RANKS:
        rarest = min(sorted(set(layers), key=lambda r: (r.qk, r.v)), key=layers.count)
        similar = [r for r in set(layers) if r != rarest and (r.qk == 0) == (rarest.qk == 0)]
        pool = similar or [r for r in set(layers) if r != rarest]
        nearest = min(
            pool,
            key=lambda r: (abs(r.qk - rarest.qk) + abs(r.v - rarest.v), r.qk + r.v, r.qk),
        )
        layers = [nearest if ranks == rarest else ranks for ranks in layers]
    return tuple(layers)
