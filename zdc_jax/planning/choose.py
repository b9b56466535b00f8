"""`choose_plan`: the plan of a converted and calibrated folder that keeps a limit on what it costs."""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from jaxtyping import Int

from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import CalibrationError, PlanError
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.loading import LanguageModel, check_options, load, stored_basis
from zdc_jax.parallel.mesh import DATA, MeshConfig
from zdc_jax.parallel.payload import Payload, check_basis
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.parallel.weights import WeightPlacement
from zdc_jax.plan import CompressionPlan
from zdc_jax.planning.certificate import plan_from_error
from zdc_jax.planning.checked import checked_plan
from zdc_jax.planning.coded_costs import coded_forecast
from zdc_jax.planning.predictor import Predictor, check_limit
from zdc_jax.planning.profile import Profile, stored_profile

logger = logging.getLogger("zdc_jax")

PlanMethod = Literal["zdc", "coded"]

CHECK_WINDOWS = 16
"""Windows of `check_text` on which a predicted plan is measured."""
CHECK_SEED = 2
"""Chooses them; another than calibration's and the search's."""


def choose_plan(
    path: str | Path,
    *,
    max_score_error: float | None = None,
    max_degradation: float | None = None,
    check_text: str | Path | Sequence[str | Path] | None = None,
    method: PlanMethod = "zdc",
    basis: Basis | None = None,
    dtype: str | None = None,
    mesh: MeshConfig | str | None = None,
    weights: WeightPlacement = "replicated",
    payload: Payload = "native",
) -> CompressionPlan | None:
    """A plan within exactly one limit, bound to the model and the basis, for `zdc_jax.load`.

    Args:
      path: folder written by `zdc convert` and calibrated.
      max_score_error: the fewest coordinates within this calibrated relative error of scores and values, in
        (0, 1) (`plan_from_error`).
      max_degradation: the fewest coordinates predicted to raise perplexity by no more (`Predictor.plan`; 0.02
        means 2 %). With a warning, unless it is checked.
      check_text: text files or folders on which a few plans are measured, as they will run; the smallest
        within the limit is taken (`checked_plan`).
      method: of the plan; `zdc` keeps fewer coordinates, `coded` also fewer bits. What codes cost is foretold
        from one model, so a `coded` plan is always checked.
      basis: basis whose coordinates are chosen; default the one stored by `zdc calibrate`, for which
        predictions are made.
      dtype, mesh, weights, payload: of `load`; how the plans of `check_text` are measured, and only with it.

    Returns:
      None where no plan measured on `check_text` holds the limit, with a warning: load the unmodified model
      then, and exchange nothing in fewer bits.

    Raises:
      PlanError: no limit, an impossible one or both; `check_text` without `max_degradation`; another method;
        `coded` without `check_text`, or on a mesh; `dtype` or `mesh` without `check_text`.
      CheckpointError: unreadable folder, unknown dtype.
      CalibrationError: no basis or profile in the folder, or that of another model, or a profile of another
        basis; `check_text` without a tokenizer; `float8` with a basis too old to give scales.
      TextError: `check_text` is missing, or shorter than one window.
      MeshError, ValueError: as `load`.
    """
    if check_text is not None and max_degradation is None:
        raise PlanError(f"{check_text=} checks a prediction; give max_degradation= with it")
    if (max_score_error is None) == (max_degradation is None):
        raise PlanError(
            f"{max_score_error=} and {max_degradation=}: each chooses a plan by itself; give one of them"
        )
    if max_degradation is not None:
        check_limit(max_degradation)
    mesh = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    _check_method(method, checked=check_text is not None, on_mesh=mesh is not None)
    check_options(dtype, mesh, weights, payload)
    for name, value in (("dtype", dtype), ("mesh", mesh)):  # Without a mesh, the others were refused.
        if check_text is None and value is not None:
            raise PlanError(f"{name}={value!r} says how plans are measured; give check_text= with it")
    checkpoint = Checkpoint.open(path)
    basis = basis or stored_basis(checkpoint)
    basis.check_model(checkpoint.fingerprint, checkpoint.config)
    if max_score_error is not None:
        return plan_from_error(basis, max_score_error=max_score_error).within(checkpoint.config)
    assert max_degradation is not None
    profile = stored_profile(checkpoint, basis)
    if check_text is None:
        return _predicted(checkpoint, basis, profile, max_degradation)
    check_basis(payload, basis)
    windows = _check_windows(checkpoint, basis.context_length, check_text)
    # The folder is read anew for each plan: at no time does the host hold the model.
    placed = partial(load, path, dtype=dtype, mesh=mesh, weights=weights)
    measure = _measure(placed, partial(placed, basis=basis, payload=payload), windows)
    forecast = (
        coded_forecast(checkpoint.config, profile, basis)
        if method == "coded"
        else Predictor.stored().forecast(checkpoint.config, profile)
    )
    context = basis.context_length
    plan = checked_plan(forecast, measure, max_degradation=max_degradation, context=context)
    if plan is None:
        warnings.warn(
            f"no predicted plan holds {max_degradation=} on check_text; nothing is compressed", stacklevel=2
        )
        return None
    return plan.for_model(checkpoint.fingerprint, basis.coordinates_hash)


def _check_method(method: PlanMethod, *, checked: bool, on_mesh: bool) -> None:
    if method not in get_args(PlanMethod):
        raise PlanError(f"{method=} must be one of {get_args(PlanMethod)}")
    if method == "coded" and not checked:
        raise PlanError("method='coded' plans are measured: give max_degradation= and check_text=")
    if method == "coded" and on_mesh:
        raise PlanError("method='coded': plans are checked on one device, mesh= must be None")


def _predicted(
    checkpoint: Checkpoint, basis: Basis, profile: Profile, max_degradation: float
) -> CompressionPlan:
    """The plan predicted for a limit on perplexity, unchecked: with a margin, and with a warning."""
    plan = Predictor.stored().plan(
        checkpoint.config, profile, max_degradation=max_degradation, context=basis.context_length
    )
    warnings.warn(
        f"{max_degradation=} was predicted, not measured, from the text of calibration; check it on your own",
        stacklevel=3,
    )
    return plan.for_model(checkpoint.fingerprint, basis.coordinates_hash)


def _check_windows(
    checkpoint: Checkpoint, length: int, texts: str | Path | Sequence[str | Path]
) -> Int[np.ndarray, "W T"]:
    """At most `CHECK_WINDOWS` windows of `length` tokens."""
    if (tokenizer := checkpoint.tokenizer()) is None:
        raise CalibrationError(f"{checkpoint.path} has no tokenizer, so check_text cannot be read")
    windows, _ = token_windows(
        read_documents([texts] if isinstance(texts, str | Path) else texts),
        tokenizer,
        length=length,
        num_windows=CHECK_WINDOWS,
        seed=CHECK_SEED,
        eos_id=next(iter(checkpoint.config.eos_ids), None),
    )
    return windows


def _measure(
    load_dense: Callable[[], LanguageModel],
    load_plan: Callable[[CompressionPlan], LanguageModel],
    windows: Int[np.ndarray, "W T"],
) -> Callable[[CompressionPlan], float]:
    """Measures the unmodified model; returns what gives a plan's relative increase of perplexity."""
    dense = load_dense().network
    batch = dense.mesh.shape[DATA] if isinstance(dense, ShardedTransformer) else 1
    dense_nll = window_nll(dense, windows, batch=batch)
    full, context = CompressionPlan.full(dense.config), windows.shape[1]

    def measure(plan: CompressionPlan) -> float:
        nll = window_nll(load_plan(plan).network, windows, batch=batch)
        increase = float(np.expm1((nll - dense_nll).mean()))
        share = plan.bytes(context) / full.bytes(context)
        logger.info("check_text: a plan of %.1f %% of the bytes costs %+.2f %%", 100 * share, 100 * increase)
        return increase

    return measure
