"""`Moments`: all that a basis needs to know about Q, K, V and O over a token stream (ours)."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, Self

import numpy as np

from zdc_jax.basis import load_fields, save_fields
from zdc_jax.errors import CalibrationError

Quantity = Literal["q", "k", "v", "o"]
QUANTITIES: tuple[Quantity, ...] = ("q", "k", "v", "o")


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over tokens of first and second moments, per layer and KV head.

    q and k are as attention sees them (after the rotary embedding), o is a head's output before
    W_O.

    Attributes:
      q, k, v, o: Σ xᵀx, float64 [L, K, H, H]; q and o are also summed over the G query heads of the
        group.
      q_sum, k_sum, v_sum, o_sum: Σ x, float64 [L, K, H], likewise.
      group_size: G.
      num_tokens: tokens summed over (weights of centroids, if tokens were clustered).
      context_length: length of the windows the tokens came from.
      fingerprint: of the model.
      k_before: Σ xᵀx of keys before their rotary embedding, float64 [L, K, H, H]; None where they were not
        seen (K-means, and folders written before they were kept).
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray
    q_sum: np.ndarray
    k_sum: np.ndarray
    v_sum: np.ndarray
    o_sum: np.ndarray
    group_size: int
    num_tokens: int
    context_length: int
    fingerprint: str
    k_before: np.ndarray | None = None

    def count(self, name: Quantity) -> int:
        """Vectors summed over: tokens, times G for q and o, which every query head has."""
        return self.num_tokens * (self.group_size if name in ("q", "o") else 1)

    def second(self, name: Quantity, layer: int) -> np.ndarray:
        """Mean of xᵀx per vector, [K, H, H]: per token, for q and o per token and query head."""
        return getattr(self, name)[layer] / self.count(name)

    def mean(self, name: Quantity, layer: int) -> np.ndarray:
        """Mean vector [K, H], for q and o over the query heads too."""
        return getattr(self, f"{name}_sum")[layer] / self.count(name)

    def covariance(self, name: Quantity, layer: int) -> np.ndarray:
        """`second` about the mean, [K, H, H]."""
        mean = self.mean(name, layer)
        return self.second(name, layer) - mean[:, :, None] * mean[:, None, :]

    def merge(self, other: Self) -> Self:
        """Moments of both token streams together.

        Raises:
          CalibrationError: they are of different models, shapes or context lengths.
        """
        for name in ("fingerprint", "group_size", "context_length"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise CalibrationError(
                    f"cannot merge moments of {name}={mine!r} and {theirs!r}: they must be equal"
                )
        if self.q.shape != other.q.shape:
            raise CalibrationError(f"cannot merge moments of shapes {self.q.shape} and {other.q.shape}")
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for quantity in QUANTITIES
            for name in (quantity, f"{quantity}_sum")
        }
        mine, theirs = self.k_before, other.k_before
        sums["k_before"] = None if mine is None or theirs is None else mine + theirs
        return replace(self, **sums, num_tokens=self.num_tokens + other.num_tokens)

    def save(self, folder: str | Path) -> None:
        """Writes `moments.safetensors` and `moments.json`; a crash never leaves half a folder.

        Raises:
          CheckpointError: the folder exists and holds something that is not moments.
        """
        save_fields(folder, "moments", {f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Reads what `save` wrote.

        Raises:
          CheckpointError: missing, corrupt, or of another format version.
        """
        later = {"k_before"}
        names = {f.name for f in fields(cls)} - later
        return cls(**load_fields(folder, "moments", names, optional=later))
