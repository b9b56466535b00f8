"""The error certificate: what a plan loses of scores and outputs, as calibrated, and plans from it (ours)."""

from dataclasses import dataclass

import numpy as np

from zdc_jax.basis import Basis
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks, allowed_ranks


@dataclass(frozen=True, eq=False)
class Certificate:
    """Relative root-mean-square errors of far pairs, per layer and KV head, float64 [L, K].

    score: of the scores q kᵀ; value: of a token's contribution v W_O to the output (of o W_O for the basis
    `output`). Over all query-key pairs of the calibration text; 1 where a layer sees no distant token, which
    `far`, bool [L], tells. Near pairs have no error.
    """

    score: np.ndarray
    value: np.ndarray
    far: np.ndarray

    def __str__(self) -> str:
        """Errors of the layers that see distant tokens."""
        if not self.far.any():
            return "no layer sees distant tokens"
        parts = []
        for name, error in (("score", self.score), ("value", self.value)):
            worst = np.where(self.far, error.max(1), -1)
            parts.append(
                f"{name} error mean {error[self.far].mean():.3f}, worst {worst.max():.3f} "
                f"(layer {worst.argmax()})"
            )
        return "; ".join(parts)


def certificate(plan: CompressionPlan, basis: Basis) -> Certificate:
    """What far pairs lose in `basis` at the ranks of `plan`, per layer and KV head, as calibrated."""
    qk_ranks, v_ranks = np.array([[ranks.qk, ranks.v] for ranks in plan.layers]).T
    layers = np.arange(len(plan.layers))
    errors = basis.qk_error[layers, :, qk_ranks], basis.vo_error[layers, :, v_ranks]
    return Certificate(*errors, far=qk_ranks > 0)


def plan_from_error(
    basis: Basis,
    *,
    max_score_error: float,
    max_value_error: float | None = None,
    window: int = 0,
    sinks: int = 0,
) -> CompressionPlan:
    """The fewest coordinates within limits on the calibrated relative errors of far pairs (ours).

    Args:
      max_score_error: limit for every head's scores (`Certificate.score`), in (0, 1).
      max_value_error: limit for every head's values; default that of the scores.
      window, sinks: tokens, as in the plan.

    Raises:
      PlanError: a limit outside (0, 1).
    """
    limits = {
        "max_score_error": max_score_error,
        "max_value_error": max_score_error if max_value_error is None else max_value_error,
    }
    for name, limit in limits.items():
        if not 0 < limit < 1:
            raise PlanError(f"{name}={limit} must lie strictly between 0 and 1")
    _, K, H = basis.qk_spectrum.shape
    allowed = np.array(allowed_ranks(H)[1:])
    qk = least_ranks(basis.qk_error, limits["max_score_error"], allowed)
    v = least_ranks(basis.vo_error, limits["max_value_error"], allowed)
    layers = tuple(LayerRanks(int(r), int(z)) for r, z in zip(qk, v, strict=True))
    return CompressionPlan(layers, K, H, sinks, window).for_model(basis.fingerprint, basis.coordinates_hash)


def least_ranks(errors: np.ndarray, limit: float, allowed: np.ndarray) -> np.ndarray:
    """The smallest of the `allowed` ranks [L] with which every head of a layer stays within `limit`.

    errors: [L, K, H + 1] by rank, as a basis has them. The largest rank where none does: rounding leaves a
    little error at full rank too.
    """
    within = errors[:, :, allowed].max(1) <= limit
    first = np.where(within.any(1), within.argmax(1), len(allowed) - 1)
    return allowed[first]
