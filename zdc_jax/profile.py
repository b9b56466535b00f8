"""`Profile`: how much each layer writes that comes from distant tokens (ours)."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np

from zdc_jax.basis import load_fields, save_fields
from zdc_jax.errors import CheckpointError

WINDOWS = (64, 128, 256, 512)
"""Windows of recent tokens that plans are searched and predicted for."""
SINKS = 4
"""First tokens kept at full rank in those plans."""


def windows_for(context: int) -> tuple[int, ...]:
    """Those of `WINDOWS` that are at most a quarter of a context; the smallest where none is."""
    return tuple(window for window in WINDOWS if window <= context // 4) or WINDOWS[:1]


@dataclass(frozen=True, eq=False)
class Profile:
    """What calibration saw of far attention, layer by layer.

    Where a layer sees its window of recent tokens and the sinks alone, what it adds to the residual stream
    changes. `far_write` is that change's root mean square over tokens, relative to the residual stream that
    enters the layer. It tells far better than a spectrum whether a layer needs distant tokens at all.

    Attributes:
      far_write: float64 [L, W].
      windows: tokens, int32 [W].
      fingerprint: of the model.
    """

    far_write: np.ndarray
    windows: np.ndarray
    fingerprint: str

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
        if profile.far_write.ndim != 2 or profile.far_write.shape[1:] != profile.windows.shape:
            shapes = f"far_write {profile.far_write.shape}, windows {profile.windows.shape}"
            raise CheckpointError(f"{folder}: {shapes} are not [L, W] and [W]")
        return profile
