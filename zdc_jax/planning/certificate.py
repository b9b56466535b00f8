"""The error certificate: what a plan loses of scores and outputs, as calibrated (ours)."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from zdc_jax.basis import Basis


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

    @classmethod
    def of(cls, basis: Basis, qk_ranks: np.ndarray, v_ranks: np.ndarray) -> Self:
        """For ranks [L] of each layer."""
        layers = np.arange(len(qk_ranks))
        errors = basis.qk_error[layers, :, qk_ranks], basis.vo_error[layers, :, v_ranks]
        return cls(*errors, far=qk_ranks > 0)

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


def least_ranks(errors: np.ndarray, limit: float, allowed: np.ndarray) -> np.ndarray:
    """The smallest of the `allowed` ranks [L] with which every head of a layer stays within `limit`.

    errors: [L, K, H + 1] by rank, as a basis has them. The largest rank where none does: rounding leaves a
    little error at full rank too.
    """
    within = errors[:, :, allowed].max(1) <= limit
    first = np.where(within.any(1), within.argmax(1), len(allowed) - 1)
    return allowed[first]
