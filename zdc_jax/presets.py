"""Named plans that need no search (`preset_plan`), and the judged plan of a converted folder."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from zdc_jax import methods
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import CalibrationError, PlanError
from zdc_jax.plan import CompressionPlan

logger = logging.getLogger("zdc_jax")

Preset = Literal["8bit", "4bit", "3bit", "small", "none"]
PRESETS: tuple[Preset, ...] = get_args(Preset)

PLAN_FILE = "plan.json"
"""File of a converted folder that holds its judged plan."""
WINDOW, SINKS = 128, 4
"""Recent and first tokens that presets keep in 8 bits."""
INDEX_SHARE = 4
"""`3bit` keeps the first coordinates of keys, about one of four, in more bits."""
KERNEL_COORDINATES = 16
"""Kernels read planes whose coordinates are a multiple of this number."""


MOST_NOISE = 2.4
"""Largest mean noise of scores (`mean_noise`) at which `3bit` is allowed.

At 8,192 tokens, Qwen2.5-Coder-1.5B with 1.9 keeps 0.97 of the worst retrieval task. SmolLM2-135M with 2.9
keeps 0.67 if other coordinates of keys have 2 bits instead of 3 (`real-models.json`).
"""


def resolve_plan(name: str | Path, path: str | Path) -> CompressionPlan | None:
    """Return the plan that a name stands for: a preset, or the path of a JSON file.

    Args:
      name: preset or path; presets come first.
      path: converted folder.

    Returns:
      The plan; None for `none`.

    Raises:
      PlanError: there is no such file, it contains no plan, or the plan or preset does not suit the model.
      CalibrationError: the preset needs a calibration that the folder lacks.
    """
    if str(name) in PRESETS:
        return preset_plan(str(name), Checkpoint.open(path))
    if not Path(name).is_file():
        what = "is a folder" if str(name) and Path(name).is_dir() else "no such file"
        raise PlanError(f"plan={str(name)!r}: {what}; give the file of a plan or one of {', '.join(PRESETS)}")
    label = f"plan={str(name)!r}"
    plan = CompressionPlan.load(name, label=label)
    checkpoint = Checkpoint.open(path)
    try:
        plan.check_model(checkpoint.config, checkpoint.fingerprint)
    except PlanError as error:
        raise PlanError(f"{label}: {error}") from error
    return plan


def default_plan(path: str | Path) -> CompressionPlan | None:
    """Return the judged plan of a converted folder, or None if it has none."""
    if not (Path(path) / PLAN_FILE).exists():
        return None
    logger.warning("using the plan in %s; --plan none keeps 16 bits", Path(path) / PLAN_FILE)
    return CompressionPlan.load(Path(path) / PLAN_FILE)


def preset_plan(name: str, checkpoint: Checkpoint) -> CompressionPlan | None:
    """Return the plan of a preset for a model.

    - `8bit`: keys and values in 8 bits, without calibration.
    - `4bit`: keys and values in 4 bits, keys of small heads in 5, in the calibrated basis if there is one.
    - `3bit`: a quarter of the coordinates of keys in 5 bits, or 4 for small heads, and the others and values
      in 3, in the calibrated basis.
    - `small`: the judged plan that `zdc compress` stored in the folder.
    - `none`: no plan.

    All but the last two keep `WINDOW` recent tokens and `SINKS` first tokens in 8 bits. Their keys leave out
    their mean (`zdc_jax.ops.shift`). Without calibration that mean is the bias of the keys.

    Raises:
      PlanError: the folder has no judged plan, or the preset would lose too much on this model.
      CalibrationError: `3bit` without a calibration.
    """
    if name == "none":
        return None
    if name == "small":
        if (plan := default_plan(checkpoint.path)) is None:
            raise PlanError(
                f"plan='small': {checkpoint.path} has no judged plan; run `zdc compress` to make one, "
                "or use plan='4bit'"
            )
        return plan
    folder = checkpoint.calibration_path / "basis"
    basis = Basis.load(folder) if name != "8bit" and folder.exists() else None
    if name == "3bit":
        if basis is None:
            raise CalibrationError(
                f"plan='3bit': {checkpoint.path} is not calibrated; {checkpoint.calibration_advice}, "
                "or use plan='4bit'"
            )
        if (noise := mean_noise(basis)) > MOST_NOISE:
            raise PlanError(
                "plan='3bit': would lose too much on this model, whose calibrated score noise is "
                f"{noise:.1f}; at most {MOST_NOISE} is allowed; use plan='4bit', or let `zdc compress` "
                "choose and judge a plan"
            )
    return coded_plan(checkpoint, basis, preset_settings(name, checkpoint.config.head_dim))


def mean_noise(basis: Basis) -> float:
    """Return the variance of scaled scores if the noise of keys equals their signal, as a mean over heads.

    Codes of b bits have about 4⁻ᵇ of this variance. It is infinite for a basis without root mean squares.
    """
    if basis.q_rms is None or basis.k_rms is None:
        return float("inf")
    H = basis.q_rms.shape[-1]
    return float(((basis.q_rms**2).sum(-1) * (basis.k_rms**2).mean(-1) / H).mean())


def preset_settings(name: str, head_dim: int) -> dict[str, int]:
    """Return the settings of method `coded` that `8bit`, `4bit` or `3bit` stands for, without `bits_near`."""
    index = head_dim // INDEX_SHARE // KERNEL_COORDINATES * KERNEL_COORDINATES
    is_small = head_dim < 128
    bits_index = 4 if is_small else 5  # The scales of small heads take more of the bytes.
    values: dict[str, dict[str, int]] = {
        "8bit": {"bits_k": 8, "bits_v": 8},
        "4bit": {"bits_k": 5 if is_small else 4, "bits_v": 4},
        "3bit": {"index": index, "bits_index": bits_index, "bits_k": 3, "bits_v": 3},
    }
    return values[name]


def coded_plan(checkpoint: Checkpoint, basis: Basis | None, settings: dict[str, int]) -> CompressionPlan:
    """Return the plan that quantizes all layers alike, with the shift of keys where it pays.

    Args:
      checkpoint: converted folder.
      basis: calibrated basis; None uses the checkpoint's coordinates, and the bias of keys as their mean.
      settings: settings of method `coded`, except `bits_near`.
    """
    config, H = checkpoint.config, checkpoint.config.head_dim
    plan = replace(
        CompressionPlan.uniform(config, qk=H, v=H, window=WINDOW, sinks=SINKS),
        fingerprint=checkpoint.fingerprint,
        basis="" if basis is None else basis.coordinates_hash,
        rotated=basis is not None,
        method="coded",
        settings=methods.settings_from_json("coded", {"bits_near": 8} | settings),
    )
    # Without a basis, keys can leave out their bias (`mean_of_bias`).
    biased = [config.qkv_bias and spec.window is None and not spec.qk_norm for spec in config.layers]
    return plan.with_shift(biased if basis is None else basis.shifted)
