"""Error certificate of a plan, computed from the calibration, and plans within a limit on these errors.

The certificate is not part of the ZDC paper. It covers far pairs: queries with older keys, outside the recent
tokens of the plan.
"""

from dataclasses import dataclass
from numbers import Real

import numpy as np

from zdc_jax.basis import Basis
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks, allowed_ranks


@dataclass(frozen=True, eq=False)
class Certificate:
    """Relative root-mean-square errors of far pairs, per layer and KV head.

    The errors are those of all query-key pairs of the calibration text. Recent tokens have no error.

    Attributes:
      score: error of the scores q kᵀ, float64 [L, K]; 1 in layers without far tokens.
      value: error of a token's contribution v W_O to the output, or of o W_O for the basis `output`;
        float64 [L, K]; 1 in layers without far tokens.
      far: whether each layer stores far tokens, bool [L].
    """

    score: np.ndarray
    value: np.ndarray
    far: np.ndarray

    def __str__(self) -> str:
        """Return the mean and the largest errors of the layers that store far tokens."""
        if not self.far.any():
            return "no layer stores far tokens"
        parts = []
        for name, error in (("score", self.score), ("value", self.value)):
            worst = np.where(self.far, error.max(1), -1)
            parts.append(
                f"{name} error mean {error[self.far].mean():.3f}, worst {worst.max():.3f} "
                f"(layer {worst.argmax()})"
            )
        return "; ".join(parts)


def certificate(plan: CompressionPlan, basis: Basis) -> Certificate:
    """Return the calibrated errors of a basis at the ranks of a plan."""
    qk_ranks, v_ranks = np.array([[ranks.qk, ranks.v] for ranks in plan.layers]).T
    layers = np.arange(len(plan.layers))
    return Certificate(
        score=basis.qk_error[layers, :, qk_ranks],
        value=basis.vo_error[layers, :, v_ranks],
        far=qk_ranks > 0,
    )


def plan_from_error(
    basis: Basis,
    *,
    max_score_error: float,
    window: int = 0,
    sinks: int = 0,
) -> CompressionPlan:
    """Return the plan with the fewest coordinates within a limit on the calibrated errors of far pairs.

    Args:
      basis: calibrated basis.
      max_score_error: limit for the scores and for the values of every head (`Certificate`), in (0, 1).
      window: window of the plan, in tokens.
      sinks: sinks of the plan, in tokens.

    Raises:
      PlanError: the limit is outside (0, 1).
    """
    if not (isinstance(max_score_error, Real) and 0 < max_score_error < 1):
        raise PlanError(f"{max_score_error=} must lie strictly between 0 and 1")
    _, K, H = basis.qk_spectrum.shape
    allowed = np.array(allowed_ranks(H)[1:])
    qk = least_ranks(basis.qk_error, max_score_error, allowed)
    v = least_ranks(basis.vo_error, max_score_error, allowed)
    layers = tuple(LayerRanks(int(r), int(z)) for r, z in zip(qk, v, strict=True))
    plan = CompressionPlan(layers, K, H, sinks, window)
    return plan.for_model(basis.fingerprint, basis.coordinates_hash, basis.shifted)


def least_ranks(errors: np.ndarray, limit: float, allowed: np.ndarray) -> np.ndarray:
    """Return the smallest rank [L] with which all heads of a layer stay within a limit.

    If no rank stays within the limit, the largest is returned: even full rank has a small rounding error.

    Args:
      errors: relative errors by rank, [L, K, H + 1], as in `Basis`.
      limit: largest relative error.
      allowed: ranks to choose from, ascending.
    """
    within = errors[:, :, allowed].max(1) <= limit
    first = np.where(within.any(1), within.argmax(1), len(allowed) - 1)
    return allowed[first]
