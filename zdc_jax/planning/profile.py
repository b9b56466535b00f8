"""`Profile`: how much each layer writes that comes from distant tokens (ours)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np

from zdc_jax.basis import Basis, load_fields, save_fields
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import CalibrationError, CheckpointError

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
    """What calibration saw of far attention, layer by layer, where one layer alone sees less than all of
    distant tokens. No spectrum says whether a layer needs them at all.

    Attributes:
      far_nats: increase of the mean negative log likelihood, nats a token, where the layer sees nothing but
        the sinks and its window, that at `cost_window(windows)`; float64 [L].
      far_write: change of what the layer then adds to the residual stream, root mean square over tokens,
        relative to the residual stream that enters it; float64 [L, W].
      score_error, value_error: such a change where far pairs keep `ranks` coordinates of Q/K alone, and of
        V/O alone, relative to that of keeping none; float64 [L, Q].
      windows: tokens, int32 [W]. ranks: int32 [Q], ascending, below the head dim.
      fingerprint: of the model. basis: whose coordinates were kept (`Basis.coordinates_hash`); empty where a
        folder was written before it was kept: any basis of this model.
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
        later = {"basis"}
        names = {f.name for f in fields(cls)} - later
        profile = cls(**load_fields(folder, "profile", names, optional=later))
        L, W, Q = len(profile.far_nats), len(profile.windows), len(profile.ranks)
        for name, shape in {"far_write": (L, W), "score_error": (L, Q), "value_error": (L, Q)}.items():
            if (found := getattr(profile, name).shape) != shape:
                raise CheckpointError(f"{folder}: {name} has shape {found}, not {shape}")
        return profile


def stored_profile(checkpoint: Checkpoint, basis: Basis) -> Profile:
    """The profile in the folder; raises `CalibrationError` where there is none of this model and basis."""
    folder = checkpoint.calibration_path / "profile"
    if not folder.exists():
        raise CalibrationError(
            f"{checkpoint.path} has no profile; run: zdc calibrate {checkpoint.path} TEXT --overwrite"
        )
    profile = Profile.load(folder)
    if profile.fingerprint != checkpoint.fingerprint:
        raise CalibrationError(f"the profile is of another model, {profile.fingerprint!r}")
    if profile.basis and profile.basis != basis.coordinates_hash:
        raise CalibrationError(
            f"the profile is of basis {profile.basis!r}, this one is {basis.coordinates_hash!r}; "
            f"run: zdc calibrate {checkpoint.path} TEXT --overwrite"
        )
    return profile
