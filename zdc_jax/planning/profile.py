"""Profile of a model: how much each layer depends on older tokens (`Profile`). Not part of the ZDC paper."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np

from zdc_jax.basis import Basis, load_fields, save_fields
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import CalibrationError, CheckpointError

WINDOWS = (64, 128, 256, 512)
"""Windows of recent tokens, for which plans are searched and predicted."""
COST_WINDOW = 128
"""Window with which single layers are measured, if the context allows it."""
SINKS = 4
"""Sinks of these plans."""


def windows_for(context: int) -> tuple[int, ...]:
    """Return the windows that are at most a quarter of a context, or the smallest window if there is none."""
    return tuple(window for window in WINDOWS if window <= context // 4) or WINDOWS[:1]


def cost_window(windows: Sequence[int]) -> int:
    """Return the index of the window with which single layers are measured, closest to `COST_WINDOW`."""
    return min(range(len(windows)), key=lambda index: abs(windows[index] - COST_WINDOW))


@dataclass(frozen=True, eq=False)
class Profile:
    """Calibrated effect of storing less of the older tokens in one layer, with all other layers unchanged.

    The spectra of a basis do not show whether a layer needs older tokens at all; the profile does.

    Attributes:
      far_nats: increase of the mean negative log-likelihood if the layer attends only to the sinks and the
        window `windows[cost_window(windows)]`, in nats per token; float64 [L].
      far_write: change of the layer's output in this case, for each window; float64 [L, W]. It is a root mean
        square over tokens, relative to the residual stream that enters the layer.
      score_error: change of the layer's output if older keys have `ranks` coordinates, relative to the change
        without older tokens; float64 [L, Q].
      value_error: the same for older values; float64 [L, Q].
      windows: windows in tokens, int32 [W].
      ranks: ranks, ascending and less than the head dim, int32 [Q].
      fingerprint: fingerprint of the model.
      basis: hash of the basis whose coordinates were used (`Basis.coordinates_hash`). Empty in folders of
        older releases; any basis of the model is then accepted.
    """

    far_nats: np.ndarray
    far_write: np.ndarray
    score_error: np.ndarray
    value_error: np.ndarray
    windows: np.ndarray
    ranks: np.ndarray
    fingerprint: str
    basis: str = ""

    def relative_write(self) -> np.ndarray:
        """Return `far_write` relative to its value for the window of `far_nats`, float64 [L, W]."""
        measured = self.far_write[:, cost_window(self.windows.tolist()), None]
        return self.far_write / np.maximum(measured, 1e-12)

    def save(self, folder: str | Path) -> None:
        """Write `profile.safetensors` and `profile.json` atomically.

        Raises:
          CheckpointError: the folder exists and contains other files.
        """
        save_fields(folder, "profile", {f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load a profile from a folder that `save` wrote.

        Raises:
          CheckpointError: the folder is missing, corrupt or of another format version.
        """
        names = {f.name for f in fields(cls)}
        profile = cls(**load_fields(folder, "profile", names, optional={"basis"}))
        L, W, Q = len(profile.far_nats), len(profile.windows), len(profile.ranks)
        for name, expected in {"far_write": (L, W), "score_error": (L, Q), "value_error": (L, Q)}.items():
            if (shape := getattr(profile, name).shape) != expected:
                raise CheckpointError(f"{folder}: {name} has shape {shape}, expected {expected}")
        return profile


def stored_profile(checkpoint: Checkpoint, basis: Basis) -> Profile:
    """Load the profile of a converted folder.

    Raises:
      CalibrationError: the folder has no profile, or the profile belongs to another model or basis.
      CheckpointError: the profile is corrupt.
    """
    folder = checkpoint.calibration_path / "profile"
    if not folder.exists():
        raise CalibrationError(
            f"{checkpoint.path} has no profile; run `zdc calibrate {checkpoint.path} TEXT --overwrite`"
        )
    profile = Profile.load(folder)
    if profile.fingerprint != checkpoint.fingerprint:
        raise CalibrationError(
            f"the profile was made for model {profile.fingerprint!r}, this model is "
            f"{checkpoint.fingerprint!r}; run `zdc calibrate {checkpoint.path} TEXT --overwrite`"
        )
    if profile.basis and profile.basis != basis.coordinates_hash:
        raise CalibrationError(
            f"the profile was made for basis {profile.basis!r}, this basis is {basis.coordinates_hash!r}; "
            f"run `zdc calibrate {checkpoint.path} TEXT --overwrite`"
        )
    return profile
