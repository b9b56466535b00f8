"""Choosing a plan for a converted and calibrated folder, within a limit on its error (`choose_plan`)."""

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
from zdc_jax.methods import get_search_kind
from zdc_jax.parallel.mesh import DATA, MeshConfig
from zdc_jax.parallel.payload import Payload, check_basis
from zdc_jax.parallel.weights import WeightPlacement
from zdc_jax.plan import CompressionPlan
from zdc_jax.planning.certificate import plan_from_error
from zdc_jax.planning.checked import checked_plan
from zdc_jax.planning.coded_costs import coded_forecast
from zdc_jax.planning.predictor import Predictor, check_limit
from zdc_jax.planning.profile import stored_profile

logger = logging.getLogger("zdc_jax")

PlanMethod = Literal["zdc", "coded"]
"""Methods that `choose_plan` supports."""

CHECK_WINDOWS = 16
"""Largest number of windows of `check_text` on which plans are measured."""
CHECK_SEED = 2
"""Seed that chooses these windows. Calibration and search use other seeds."""


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
    """Choose the smallest plan within one limit, bound to the model and the basis, for `zdc_jax.load`.

    Exactly one of `max_score_error` and `max_degradation` must be passed. A prediction of `max_degradation`
    causes a warning unless it is checked on text.

    Args:
      path: folder written by `zdc convert` and calibrated by `zdc calibrate`.
      max_score_error: limit on the calibrated relative error of scores and values, in (0, 1)
        (`zdc_jax.planning.certificate.plan_from_error`).
      max_degradation: limit on the predicted relative increase of the perplexity; 0.02 means 2 %
        (`zdc_jax.planning.predictor.Predictor.plan`).
      check_text: text files or folders on which a few predicted plans are measured. The smallest plan within
        `max_degradation` is chosen (`zdc_jax.planning.checked.checked_plan`).
      method: method of the plan. `zdc` stores fewer coordinates; `coded` also stores fewer bits. The costs of
        `coded` plans are predicted from a single model, so they always need `check_text`.
      basis: basis whose coordinates are chosen. Default: the one stored by `zdc calibrate`, which the
        predictions are made for.
      dtype: as in `zdc_jax.load`; used to measure plans on `check_text`.
      mesh: as in `zdc_jax.load`; used to measure plans on `check_text`.
      weights: as in `zdc_jax.load`; used to measure plans on `check_text`.
      payload: as in `zdc_jax.load`; used to measure plans on `check_text`.

    Returns:
      the plan, or None with a warning if no measured plan is within the limit. In this case load the model
      without a plan, and with `payload="native"`.

    Raises:
      PlanError: not exactly one limit, or a limit out of range; `check_text` without `max_degradation`; an
        unknown method; `coded` without `check_text` or on a mesh; `dtype` or `mesh` without `check_text`.
      CheckpointError: the folder is unreadable or `dtype` is unknown.
      CalibrationError: the basis or the profile is missing or belongs to another model or basis; `check_text`
        without a tokenizer; `float8` with a basis of an older release.
      TextError: `check_text` is missing, or shorter than one window.
      MeshError: as in `zdc_jax.load`.
      ValueError: as in `zdc_jax.load`.
    """
    if check_text is not None and max_degradation is None:
        raise PlanError(f"{check_text=} needs a limit on the perplexity; pass max_degradation= as well")
    if (max_score_error is None) == (max_degradation is None):
        raise PlanError(
            f"{max_score_error=} and {max_degradation=}: exactly one limit is needed; pass one of them"
        )
    if max_degradation is not None:
        check_limit(max_degradation)
    mesh = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    _check_method(method, checked=check_text is not None, on_mesh=mesh is not None)
    check_options(dtype, mesh, weights, payload)
    for name, value in (("dtype", dtype), ("mesh", mesh)):  # `weights` and `payload` need a mesh.
        if check_text is None and value is not None:
            raise PlanError(f"{name}={value!r} is used only to measure plans; pass check_text= as well")
    checkpoint = Checkpoint.open(path)
    basis = basis or stored_basis(checkpoint)
    basis.check_model(checkpoint.fingerprint, checkpoint.config)
    if max_score_error is not None:
        return plan_from_error(basis, max_score_error=max_score_error).within(checkpoint.config)
    assert max_degradation is not None
    profile = stored_profile(checkpoint, basis)
    context = basis.context_length

    def bind(plan: CompressionPlan) -> CompressionPlan:
        return plan.for_model(checkpoint.fingerprint, basis.coordinates_hash, basis.shifted)

    if check_text is None:
        warnings.warn(
            f"{max_degradation=} is a prediction from the calibration text, not a measurement; "
            "pass check_text= to measure plans",
            stacklevel=2,
        )
        predictor, config = Predictor.stored(), checkpoint.config
        return bind(predictor.plan(config, profile, max_degradation=max_degradation, context=context))
    check_basis(payload, basis)
    windows = _read_windows(checkpoint, context, check_text)
    # Each plan is loaded from the folder, so that the host never holds all weights in memory.
    load_dense = partial(load, path, dtype=dtype, mesh=mesh, weights=weights)

    def load_plan(plan: CompressionPlan) -> LanguageModel:
        return load_dense(plan=bind(plan), basis=basis, payload=payload)

    measure = _make_measure(load_dense, load_plan, windows)
    forecast = (
        coded_forecast(checkpoint.config, profile, basis)
        if get_search_kind(method) == "bits"
        else Predictor.stored().forecast(checkpoint.config, profile)
    )
    plan = checked_plan(forecast, measure, max_degradation=max_degradation, context=context)
    if plan is None:
        warnings.warn(
            f"no measured plan is within {max_degradation=} on check_text; the model is not compressed",
            stacklevel=2,
        )
        return None
    return bind(plan)


def _check_method(method: PlanMethod, *, checked: bool, on_mesh: bool) -> None:
    if method not in get_args(PlanMethod):
        raise PlanError(f"{method=} must be one of {get_args(PlanMethod)}")
    if get_search_kind(method) == "bits" and not checked:
        raise PlanError(f"{method=} needs text to measure plans; pass max_degradation= and check_text=")
    if get_search_kind(method) == "bits" and on_mesh:
        raise PlanError(f"{method=} does not support a mesh; pass mesh=None")


def _read_windows(
    checkpoint: Checkpoint, length: int, texts: str | Path | Sequence[str | Path]
) -> Int[np.ndarray, "W T"]:
    """Return at most `CHECK_WINDOWS` windows of `length` tokens."""
    if (tokenizer := checkpoint.tokenizer()) is None:
        raise CalibrationError(f"{checkpoint.path} has no tokenizer, which is needed for check_text")
    windows, _ = token_windows(
        read_documents([texts] if isinstance(texts, str | Path) else texts),
        tokenizer,
        length=length,
        num_windows=CHECK_WINDOWS,
        seed=CHECK_SEED,
        eos_id=next(iter(checkpoint.config.eos_ids), None),
    )
    return windows


def _make_measure(
    load_dense: Callable[[], LanguageModel],
    load_plan: Callable[[CompressionPlan], LanguageModel],
    windows: Int[np.ndarray, "W T"],
) -> Callable[[CompressionPlan], float]:
    """Return a function that measures the relative increase of the perplexity of a plan.

    The unmodified model is measured here, once.
    """
    dense = load_dense().network
    batch = dense.count_devices(DATA)
    dense_nll = window_nll(dense, windows, batch=batch)
    full, context = CompressionPlan.full(dense.config), windows.shape[1]

    def measure(plan: CompressionPlan) -> float:
        nll = window_nll(load_plan(plan).network, windows, batch=batch)
        increase = float(np.expm1((nll - dense_nll).mean()))
        share = plan.bytes(context) / full.bytes(context)
        logger.info(
            "check_text: a plan with %.1f %% of the cache size increases the perplexity by %+.2f %%",
            100 * share,
            100 * increase,
        )
        return increase

    return measure
