"""Statistics of Q, K, V and O over calibration text, from which a basis is made (ours)."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Self

import numpy as np

from zdc_jax.basis import load_fields, save_fields

Quantity = Literal["q", "k", "v", "o"]
QUANTITIES: tuple[Quantity, ...] = ("q", "k", "v", "o")


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over tokens of vectors and of their outer products, per layer and KV head.

    q and k are those of attention, after the rotary embedding; o is a head's output before W_O.

    Attributes:
      q, k, v, o: Σ xᵀx, float64 [L, K, H, H]; for q and o also summed over the G query heads of the group.
      q_sum, k_sum, v_sum, o_sum: Σ x, float64 [L, K, H], summed over the same vectors.
      group_size: query heads per KV head, G.
      num_tokens: tokens summed over; the weights of centroids where tokens were clustered.
      context_length: length of the windows of text, in tokens.
      fingerprint: fingerprint of the model.
      k_before: Σ xᵀx of keys before the rotary embedding, float64 [L, K, H, H]; None after K-means, and in
        folders of older releases.
      key_shift: m of `zdc_jax.ops.shift`, estimated from the first windows, float64 [L, K, H]; None as for
        `k_before`.
      k_rest: Σ xᵀx of keys without the mean key of their block, float64 [L, K, H, H]; None as for `k_before`.
      v_scored: Σ s xᵀx of values, float64 [L, K, H, H]; None as for `k_before`. The weight s sums the squared
        scores of the value's key with all queries of its window and group.
      v_far: Σ p x of values, float64 [L, K, H]; None unless collected for centering. The weight p sums the
        attention of every fourth query, if the value belongs neither to its sinks nor to its window.
      far: Σ p, float64 [L, K]; None as for `v_far`.
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
    key_shift: np.ndarray | None = None
    k_rest: np.ndarray | None = None
    v_scored: np.ndarray | None = None
    v_far: np.ndarray | None = None
    far: np.ndarray | None = None

    def count(self, name: Quantity) -> int:
        """Return the number of vectors summed over: tokens, times G for q and o."""
        return self.num_tokens * (self.group_size if name in ("q", "o") else 1)

    def second(self, name: Quantity, layer: int) -> np.ndarray:
        """Return the mean of xᵀx over vectors, [K, H, H]."""
        return getattr(self, name)[layer] / self.count(name)

    def mean(self, name: Quantity, layer: int) -> np.ndarray:
        """Return the mean vector [K, H]."""
        return getattr(self, f"{name}_sum")[layer] / self.count(name)

    def far_mean(self, layer: int) -> np.ndarray:
        """Return the mean value weighted by attention to older tokens, [K, H].

        It is the mean of all values where the weights are unknown or zero.
        """
        mean = self.mean("v", layer)
        if self.v_far is None or self.far is None:
            return mean
        weight = self.far[layer, :, None]
        return np.where(weight > 0, self.v_far[layer] / np.where(weight > 0, weight, 1), mean)

    def covariance(self, name: Quantity, layer: int) -> np.ndarray:
        """Return the second moments about the mean, [K, H, H]."""
        mean = self.mean(name, layer)
        return self.second(name, layer) - mean[:, :, None] * mean[:, None, :]

    def save(self, folder: str | Path) -> None:
        """Write `moments.safetensors` and `moments.json`; the folder appears complete or not at all.

        Raises:
          CheckpointError: the folder exists and contains anything but moments.
        """
        save_fields(folder, "moments", {f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read moments that `save` wrote.

        Raises:
          CheckpointError: the files are missing, corrupt, or of another format version.
        """
        optional = {"k_before", "key_shift", "k_rest", "v_scored", "v_far", "far"}
        names = {f.name for f in fields(cls)} - optional
        return cls(**load_fields(folder, "moments", names, optional=optional))
