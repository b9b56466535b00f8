"""The calibrated basis of every head (`Basis`), and the folder format of calibration results."""

import json
import logging
import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Self
from uuid import uuid4

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from zdc_jax.config import ModelConfig
from zdc_jax.errors import CalibrationError, CheckpointError
from zdc_jax.files import hash_arrays, hash_file, load_json, replace_folder

QKKind = Literal["stacked", "balanced", "keys", "pairs", "oscar"]
VOKind = Literal["stacked", "balanced", "output", "oscar"]

FORMAT_VERSION = 1

logger = logging.getLogger("zdc_jax")


@dataclass(frozen=True, eq=False)
class Basis:
    """Coordinates of Q/K and V/O in order of importance, per layer and KV head (ZDC §4.3, extended here).

    Row vectors map as k' = k A_K, q' = q A_Q with A_Q A_Kᵀ = I, and v' = v C, W_O' = C⁻¹ W_O. The outputs
    of the model are therefore unchanged until trailing coordinates are dropped. The G query heads of a
    group share the basis of their KV head.

    Attributes:
      k_map, v_map: A_K and C, float64 [L, K, H, H]. Columns are the new coordinates.
      qk_kind, vo_kind: methods that chose them (`convert.calibration.make_basis`).
      qk_spectrum, vo_spectrum: σ, float64 [L, K, H]. σ_i² is the decrease of the squared error due to
        coordinate i, or 0 if the coordinate increases it. For Q/K the error is that of a score q kᵀ/√H,
        so Σσ² is the mean squared score over all query-key pairs. For V/O it is that of a token's v W_O,n
        (o W_O,n for `output`), summed over the group. For `balanced`, σ are the singular values of
        C_Q^½ C_K^½/√H, descending. Other kinds keep the order of their coordinates.
      qk_error, vo_error: error certificate, float64 [L, K, H + 1]. Entry r is the relative
        root-mean-square error of these products when r coordinates are stored: 1 at r = 0, about 0 at
        r = H. It covers all query-key pairs, after centering, and is computed from the calibration moments
        without ridge.
      qk_condition, vo_condition: condition numbers (2-norm) of A_K and C, float64 [L, K].
      num_tokens, context_length: number of calibration tokens, and the length of the windows.
      fingerprint: fingerprint of the calibrated model.
      record: calibration options and the perplexities of candidate bases, a JSON object.
      pairs: order of the rotary pairs for `qk_kind="pairs"`, int32 [L, K, H/2]. Column 2i of `k_map` selects
        the original coordinate p_i, and column 2i + 1 selects p_i + H/2.
      key_shift: m of `zdc_jax.ops.shift`, what keys leave out before the maps, float64 [L, K, H]. None if
        calibration did not collect means by position, as in folders of older releases.
      shifted: for each layer, whether the maps of q and k were made for keys without their mean; empty
        without `key_shift`.
      value_mean: means subtracted from values before the map, float64 [L, K, H], in original coordinates;
        None without centering.
      key_mean: means of keys in folders of older releases, which subtracted them. They are not used.
      q_rms, k_rms, v_rms: root mean squares of the new coordinates of q, k and v over the calibration tokens,
        float64 [L, K, H]. They are measured where attention reads q, k and v; q also over the query heads of
        a group. None in folders of older releases.
      k_latent: principal components of the keys before the rotary embedding, in descending order, orthogonal,
        float64 [L, K, H, H]. Columns are the new coordinates. None if calibration did not collect these keys.
    """

    k_map: np.ndarray
    v_map: np.ndarray
    qk_kind: QKKind
    vo_kind: VOKind
    qk_spectrum: np.ndarray
    vo_spectrum: np.ndarray
    qk_error: np.ndarray
    vo_error: np.ndarray
    qk_condition: np.ndarray
    vo_condition: np.ndarray
    num_tokens: int
    context_length: int
    fingerprint: str
    record: dict[str, Any] = field(default_factory=dict)
    pairs: np.ndarray | None = None
    key_mean: np.ndarray | None = None
    key_shift: np.ndarray | None = None
    shifted: list[bool] = field(default_factory=list)
    value_mean: np.ndarray | None = None
    q_rms: np.ndarray | None = None
    k_rms: np.ndarray | None = None
    v_rms: np.ndarray | None = None
    k_latent: np.ndarray | None = None

    @cached_property
    def q_map(self) -> np.ndarray:
        """Map of queries A_Q, the inverse transpose of A_K: float64 [L, K, H, H]. Columns are coordinates."""
        return np.linalg.inv(self.k_map).swapaxes(-1, -2)

    @cached_property
    def o_map(self) -> np.ndarray:
        """Map of the output projection C⁻¹, float64 [L, K, H, H]. Rows are the new coordinates."""
        return np.linalg.inv(self.v_map)

    @cached_property
    def coordinates_hash(self) -> str:
        """Hash of the maps, pairs and means, 16 hex digits. Plans identify their basis by it."""
        names = ("k_map", "v_map", "pairs", "key_mean", "value_mean", "k_latent", "key_shift")
        arrays = ((name, getattr(self, name)) for name in names)
        return hash_arrays((name, value) for name, value in arrays if value is not None)[:16]

    @classmethod
    @lru_cache(maxsize=8)
    def identity(cls, num_layers: int, num_kv_heads: int, head_dim: int) -> "Basis":
        """Return the basis of a model without calibration: its own coordinates."""
        heads = num_layers, num_kv_heads
        maps = np.broadcast_to(np.eye(head_dim), (*heads, head_dim, head_dim))
        unknown = np.full((*heads, head_dim), np.nan)
        errors = np.full((*heads, head_dim + 1), np.nan)
        return cls(
            maps,
            maps,
            "balanced",
            "balanced",
            *(unknown, unknown, errors, errors),
            *(np.ones(heads), np.ones(heads)),
            num_tokens=0,
            context_length=0,
            fingerprint="",
        )

    def check_model(self, fingerprint: str, config: ModelConfig) -> None:
        """Raise `CalibrationError` if this basis was calibrated on another model."""
        expected = (config.num_layers, config.num_kv_heads, config.head_dim)
        if self.k_map.shape[:3] != expected:
            raise CalibrationError(
                f"the basis has (layers, KV heads, head dim) = {self.k_map.shape[:3]}, the model has "
                f"{expected}; use a basis calibrated on this model"
            )
        if self.fingerprint != fingerprint:
            raise CalibrationError(
                f"the basis was calibrated on model {self.fingerprint!r}, this model is {fingerprint!r}; "
                "use a basis calibrated on this model"
            )

    def save(self, folder: str | Path) -> None:
        """Write `basis.safetensors` and `basis.json` atomically.

        Raises:
          CheckpointError: the folder exists and contains other files.
        """
        save_fields(folder, "basis", {f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load a basis from a folder that `save` wrote.

        Raises:
          CheckpointError: the folder is missing, corrupt or of another format version.
        """
        optional = {"q_rms", "k_rms", "v_rms", "k_latent", "key_shift", "shifted", "key_mean"}
        values = load_fields(folder, "basis", {f.name for f in fields(cls)}, optional=optional)
        basis = cls(**values)
        square = (*basis.k_map.shape[:2], basis.k_map.shape[-1], basis.k_map.shape[-1])
        if not basis.k_map.shape == basis.v_map.shape == square:
            raise CheckpointError(
                f"{folder}: k_map {basis.k_map.shape} and v_map {basis.v_map.shape} are not [L, K, H, H]"
            )
        if basis.key_shift is None and basis.qk_kind != "pairs" and basis.record.get("reduction") != "kmeans":
            logger.warning(
                "%s was calibrated by an older release, without the shift of keys; quantized keys are more "
                "accurate after `zdc calibrate MODEL TEXT --overwrite`",
                folder,
            )
        return basis


def save_fields(folder: str | Path, kind: str, values: Mapping[str, Any]) -> None:
    """Write arrays to `{kind}.safetensors`, and other values to `{kind}.json` with the sha256 of the arrays.

    Both files are first written to a sibling folder, which then replaces `folder`.

    Args:
      folder: folder to create or to replace.
      kind: `basis` or `profile`; stem of the file names.
      values: fields by name. Arrays are numpy; other values are JSON.

    Raises:
      CheckpointError: the folder exists and contains other files, which would be deleted.
    """
    folder = Path(folder).absolute()
    names = {f"{kind}.json", f"{kind}.safetensors"}
    if folder.exists() and (not folder.is_dir() or not {path.name for path in folder.iterdir()} <= names):
        raise CheckpointError(
            f"{folder} exists and is not a saved {kind}; choose another folder or delete it"
        )
    # safetensors writes an array's memory as it is, so non-contiguous arrays would be stored out of order.
    arrays = {name: np.ascontiguousarray(x) for name, x in values.items() if isinstance(x, np.ndarray)}
    scalars = {name: x for name, x in values.items() if name not in arrays}
    temporary = folder.with_name(f".{folder.name}.{uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        save_file(arrays, temporary / f"{kind}.safetensors")
        digest = hash_file(temporary / f"{kind}.safetensors").hex()
        text = json.dumps({"format_version": FORMAT_VERSION, "sha256": digest, **scalars}, indent=2)
        (temporary / f"{kind}.json").write_text(text + "\n")
        # safetensors ignores the umask and creates files that only the owner can read.
        shutil.copymode(temporary / f"{kind}.json", temporary / f"{kind}.safetensors")
        replace_folder(temporary, folder, folder.with_name(f"{temporary.name}.old"))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_fields(
    folder: str | Path, kind: str, names: set[str], *, optional: Set[str] = frozenset()
) -> dict[str, Any]:
    """Return the fields that `save_fields` wrote.

    Args:
      folder: folder that contains the two files.
      kind: stem of the file names.
      names: expected fields.
      optional: fields that may be missing, because older releases do not write them.

    Raises:
      CheckpointError: the folder is missing, corrupt or of another format version, or the sha256 of the
        arrays differs. Folders of older releases have no sha256 and are not checked.
    """
    path = Path(folder) / f"{kind}.json"
    try:
        values = load_json(path)
        arrays = load_file(path.with_suffix(".safetensors"))
        digest = hash_file(path.with_suffix(".safetensors")).hex()
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {kind} {folder}: {error}") from error
    version = values.pop("format_version", None) if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version={version!r} is not supported; this release reads {FORMAT_VERSION}"
        )
    if values.pop("sha256", digest) != digest:
        raise CheckpointError(
            f"{path.with_suffix('.safetensors')} is damaged (its sha256 changed); "
            "run `zdc calibrate MODEL TEXT --overwrite`"
        )
    values |= arrays
    if wrong := (values.keys() ^ names) - optional:
        raise CheckpointError(f"{folder}: missing or unknown fields: {', '.join(sorted(wrong))}")
    return values
