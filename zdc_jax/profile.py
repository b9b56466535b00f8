"""`Profile`: how much each layer writes that comes from distant tokens (ours)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np

from zdc_jax.basis import load_fields, save_fields
from zdc_jax.errors import CheckpointError

WINDOWS = (64, 128, 256, 512)
"""Windows of recent tokens that plans are searched and predicted for."""
COST_WINDOW = 128
"""Of these, the one with which single layers are measured."""
SINKS = 4
"""First tokens kept at full rank in those plans."""


def windows_for(context: int) -> tuple[int, ...]:
    """Those of `WINDOWS` that are at most a quarter of a context; the smallest where none is."""
    return tuple(window for window in WINDOWS if window <= context // 4) or WINDOWS[:1]


def cost_window(windows: Sequence[int]) -> int:
    """Index of the window that single layers are measured with."""
    return min(range(len(windows)), key=lambda index: abs(windows[index] - COST_WINDOW))


@dataclass(frozen=True, eq=False)
class Profile:
    """What calibration saw of far attention, layer by layer, where one layer alone sees nothing but its
    window of recent tokens and the sinks. No spectrum says whether a layer needs distant tokens at all.

    Attributes:
      far_write: change of what the layer adds to the residual stream, root mean square over tokens, relative
        to the residual stream that enters it; float64 [L, W].
      far_nats: increase of the mean negative log likelihood, nats a token, with the window at
        `cost_window(windows)`; float64 [L].
      windows: tokens, int32 [W].
      fingerprint: of the model.
    """

    far_write: np.ndarray
    far_nats: np.ndarray
    windows: np.ndarray
    fingerprint: str

    def relative_write(self) -> np.ndarray:
        """`far_write` [L, W], of that with the window of `far_nats`."""
        measured = self.far_write[:, cost_window(self.windows.tolist()), None]
        return self.far_write / np.maximum(measured, 1e-12)

    def save(self, folder: str | Path) -> None:
        """Writes `profile.safetensors` and `profile.json`; a crash never leaves half a folder.

        Raises:
          CheckpointError: the folder exists and holds something that is not a profile.
        """
        save_fields(folder, "profile", {f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Reads what `save` wrote.

        Raises:
          CheckpointError: missing, corrupt, or of another format version.
        """
        profile = cls(**load_fields(folder, "profile", {f.name for f in fields(cls)}))
        shapes = profile.far_write.shape, profile.far_nats.shape + profile.windows.shape
        if shapes[0] != shapes[1]:
            raise CheckpointError(f"{folder}: far_write {shapes[0]} is not [L, W] = {shapes[1]}")
        return profile
