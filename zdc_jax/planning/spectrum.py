"""Choosing the ranks of each layer from the spectra of a basis, within a budget of coordinates.

Not part of the ZDC paper.
"""

import numpy as np

from zdc_jax.basis import Basis
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks, allowed_ranks

QK_SHARE = 0.4
"""Share of the stored coordinates for Q/K; the rest is for V/O."""
MAX_DISTINCT_RANKS = 6
"""Largest number of distinct (R, Z) pairs in a plan. Each pair is compiled separately."""


def plan_from_spectrum(
    basis: Basis,
    *,
    budget: float,
    window: int = 0,
    sinks: int = 0,
) -> CompressionPlan:
    """Choose ranks greedily by the largest σ² over all layers.

    Every layer with older tokens stores at least 16 coordinates of them. σ² measures how sharp the scores of
    a layer are, but not whether the layer needs older tokens. It therefore cannot choose layers to cut off.

    Args:
      basis: calibrated basis. Its spectra σ [L, K, H] are comparable between layers.
      budget: share of the coordinates of keys and values to store for older tokens, in (0, 1].
      window: window of the plan, in tokens.
      sinks: sinks of the plan, in tokens.

    Raises:
      PlanError: the budget is out of range, or too small for the layers.
    """
    if not 0 < budget <= 1:
        raise PlanError(
            f"budget={budget} must lie in (0, 1]: it is a share of all coordinates of keys and values"
        )
    num_layers, num_kv_heads, head_dim = basis.qk_spectrum.shape
    total = round(budget * 2 * head_dim * num_layers)
    qk_total = min(round(total * QK_SHARE), head_dim * num_layers)
    v_total = min(total - qk_total, head_dim * num_layers)
    qk = _greedy_ranks(basis.qk_spectrum, qk_total)
    v = _greedy_ranks(basis.vo_spectrum, v_total)
    ranks = _merge_ranks([LayerRanks(int(r), int(z)) for r, z in zip(qk, v, strict=True)])
    plan = CompressionPlan(ranks, num_kv_heads, head_dim, sinks, window)
    return plan.for_model(basis.fingerprint, basis.coordinates_hash, basis.shifted)


def _greedy_ranks(spectrum: np.ndarray, total: int) -> np.ndarray:
    """Return the ranks [L]: within `total`, raise them where a step adds the most σ² per coordinate."""
    num_layers, _, head_dim = spectrum.shape
    steps = np.array(allowed_ranks(head_dim))
    energy = np.concatenate([np.zeros((num_layers, 1)), np.cumsum((spectrum**2).sum(1), axis=1)], 1)
    level = np.ones(num_layers, int)
    if steps[level].sum() > total:
        raise PlanError(
            f"the budget of {total} coordinates is too small for {num_layers} layers with older "
            f"tokens; the least possible is {steps[level].sum()} ({steps[1]} per layer)"
        )
    while True:
        raised = np.minimum(level + 1, len(steps) - 1)
        rows = np.arange(num_layers)
        cost = steps[raised] - steps[level]
        gain = np.where(
            (cost > 0) & (steps[level].sum() + cost <= total),
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
        nearest = min(
            set(layers) - {rarest},
            key=lambda r: (abs(r.qk - rarest.qk) + abs(r.v - rarest.v), r.qk + r.v, r.qk),
        )
        layers = [nearest if ranks == rarest else ranks for ranks in layers]
    return tuple(layers)
