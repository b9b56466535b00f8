"""Ranks of each layer from the spectra of a calibrated basis, within a budget of coordinates (ours)."""

from collections.abc import Sequence

import numpy as np

from zdc_jax.basis import Basis
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks, allowed_ranks

MAX_DISTINCT_RANKS = 6
"""Distinct (R, Z) pairs of a plan; each is compiled separately."""


def plan_from_spectrum(
    basis: Basis,
    *,
    budget: float,
    qk_share: float = 0.4,
    window: int = 0,
    sinks: int = 0,
    far: Sequence[bool] | None = None,
) -> CompressionPlan:
    """Per-layer ranks by greedy choice of the largest σ² over all layers (ours).

    Every layer that attends beyond the window keeps at least 16 coordinates: σ² says how sharply a layer
    scores, not whether it needs distant tokens, so it cannot choose layers to cut off.

    Args:
      basis: calibrated; its spectra, σ [L, K, H], are comparable between layers.
      budget: share of the dense K and V coordinates to keep outside the window, in (0, 1].
      qk_share: share of the kept coordinates given to Q/K; the rest goes to V/O.
      window, sinks: tokens, as in the plan.
      far: [L] which layers attend beyond the window at all; default every one.

    Raises:
      PlanError: a share out of its range, a budget too small for the layers, or `far` of another length.
    """
    if not 0 < budget <= 1:
        raise PlanError(f"budget={budget} must lie in (0, 1], a share of the dense KV coordinates")
    if not 0 < qk_share < 1:
        raise PlanError(f"qk_share={qk_share} must lie strictly between 0 and 1")
    num_layers, num_kv_heads, head_dim = basis.qk_spectrum.shape
    total = round(budget * 2 * head_dim * num_layers)
    qk_total = min(round(total * qk_share), head_dim * num_layers)
    v_total = min(total - qk_total, head_dim * num_layers)
    open_layers = np.ones(num_layers, bool) if far is None else np.array(far, bool)
    if open_layers.shape != (num_layers,):
        raise PlanError(f"far must name {num_layers} layers, got {len(open_layers)}")
    qk = _greedy_ranks(basis.qk_spectrum, qk_total, open_layers)
    v = _greedy_ranks(basis.vo_spectrum, v_total, open_layers)
    ranks = _merge_ranks([LayerRanks(int(r), int(z)) for r, z in zip(qk, v, strict=True)])
    plan = CompressionPlan(ranks, num_kv_heads, head_dim, sinks, window)
    return plan.for_model(basis.fingerprint, basis.coordinates_hash)


def _greedy_ranks(spectrum: np.ndarray, total: int, open_layers: np.ndarray) -> np.ndarray:
    """Ranks [L] within `total`, raised step by step where a step adds most σ² per coordinate."""
    num_layers, _, head_dim = spectrum.shape
    steps = np.array(allowed_ranks(head_dim))
    energy = np.concatenate([np.zeros((num_layers, 1)), np.cumsum((spectrum**2).sum(1), axis=1)], 1)
    level = open_layers.astype(int)
    if steps[level].sum() > total:
        raise PlanError(
            f"the budget gives {total} coordinates to {open_layers.sum()} layers that attend beyond the "
            f"window; the least possible is {steps[level].sum()} ({steps[1]} a layer)"
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
    """Moves the rarest rank pairs to their nearest neighbour until few distinct pairs are left."""
    while len(set(layers)) > MAX_DISTINCT_RANKS:
        rarest = min(sorted(set(layers), key=lambda r: (r.qk, r.v)), key=layers.count)
        others = [r for r in set(layers) if r != rarest and (r.qk == 0) == (rarest.qk == 0)]
        pool = others or [r for r in set(layers) if r != rarest]
        nearest = min(
            pool,
            key=lambda r: (abs(r.qk - rarest.qk) + abs(r.v - rarest.v), r.qk + r.v, r.qk),
        )
        layers = [nearest if ranks == rarest else ranks for ranks in layers]
    return tuple(layers)
