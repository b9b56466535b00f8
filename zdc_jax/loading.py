"""`load`: a converted folder and a plan → a model whose arrays are already folded and sliced."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.errors import CalibrationError, CheckpointError, MeshError, PlanError
from zdc_jax.fold import fold_attention
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Embeddings, Transformer
from zdc_jax.parallel.classes import check_classes
from zdc_jax.parallel.mesh import DATA, MeshConfig
from zdc_jax.parallel.payload import PAYLOADS, Payload, check_scales, scale_weights
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.parallel.weights import WEIGHT_PLACEMENTS, WeightPlacement
from zdc_jax.plan import CompressionPlan
from zdc_jax.planning.checked import checked_plan
from zdc_jax.planning.evaluate import window_nll
from zdc_jax.planning.predictor import Predictor, check_limit
from zdc_jax.planning.profile import Profile
from zdc_jax.planning.text import read_documents, token_windows

logger = logging.getLogger("zdc_jax")

CHECK_WINDOWS = 16
"""Windows of `check_text` on which a predicted plan is measured."""
CHECK_SEED = 2
"""Chooses them; another than calibration's and the search's."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A network ready to run, with what is needed to talk to it.

    `basis` is None for the unmodified model; `tokenizer` is None for models made from arrays.
    """

    network: Transformer | ShardedTransformer
    tokenizer: Tokenizer | None = None
    basis: Basis | None = None

    @property
    def config(self) -> ModelConfig:
        """Architecture."""
        return self.network.config

    @property
    def plan(self) -> CompressionPlan:
        """The plan its arrays were cut to."""
        return self.network.plan


def load(
    path: str | Path,
    plan: CompressionPlan | str | Path | None = None,
    *,
    basis: Basis | None = None,
    dtype: str | None = None,
    mesh: MeshConfig | str | None = None,
    weights: WeightPlacement = "replicated",
    payload: Payload = "native",
    max_score_error: float | None = None,
    max_degradation: float | None = None,
    check_text: str | Path | Sequence[str | Path] | None = None,
) -> LanguageModel:
    """Loads a converted folder; with a plan, folds the calibrated basis in and keeps the plan's coordinates.

    Args:
      path: folder written by `zdc convert`.
      plan: a plan or the path of its JSON; None loads the unmodified weights at full rank.
      basis: basis to fold; default the one stored by `zdc calibrate`, for which predictions are made.
      dtype: dtype of weights, activations and cache; default that of the stored weights.
      mesh: devices to run on, also as `MeshConfig.parse` takes them; default one. Layers are read one at a
        time, and each device gets its share.
      weights: on a mesh, `replicated` for prompts, or `gathered` from all devices layer by layer
        (`zdc_jax.parallel.weights`).
      payload: what devices exchange of a prompt: `native`, or `float8`, which halves the bytes of 16 bits and
        rounds, with q and o, what the cache holds of the prompt (`zdc_jax.parallel.payload`).
      max_score_error: instead of a plan, the fewest coordinates within this calibrated relative error of
        scores and values (`CompressionPlan.from_error`).
      max_degradation: instead of a plan, the fewest coordinates predicted to raise perplexity by no more
        (`Predictor.plan`; 0.02 means 2 %). With a warning, unless it is checked.
      check_text: text files or folders on which a few plans are measured, as they will run, and the smallest
        within the limit is taken (`checked_plan`); where none is, the unmodified model is loaded, with a
        warning, and nothing is exchanged as `float8`.

    Raises:
      CheckpointError: unreadable folder, unknown dtype.
      PlanError: corrupt plan, or one made for another model; an impossible limit, or one beside a plan or
        another limit; `check_text` without `max_degradation`.
      CalibrationError: a plan was asked for and the folder holds no basis, or that of another model; `float8`
        without a plan, or with a basis too old to give scales.
      TextError: `check_text` is missing, or shorter than one window.
      MeshError: the model cannot be divided over the mesh, there are too few devices; `float8` or `gathered`
        without one.
      ValueError: unknown weights or payload.
      NotImplementedError: `float8` for a plan with token classes.
    """
    mesh = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    _check_placement(mesh, weights, payload)
    devices = None if mesh is None else mesh.create()
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype!r} must be one of {DTYPES}")
    target = jnp.dtype(dtype or config.dtype)
    if sum(choice is not None for choice in (plan, max_score_error, max_degradation)) > 1:
        raise PlanError("plan=, max_score_error= and max_degradation= each choose a plan; give one of them")
    if check_text is not None and max_degradation is None:
        raise PlanError(f"{check_text=} checks a prediction; give max_degradation= with it")
    if max_score_error is not None:
        basis = basis or stored_basis(checkpoint)
        plan = CompressionPlan.from_error(basis, max_score_error=max_score_error)
    if max_degradation is not None:
        check_limit(max_degradation)
        basis = basis or stored_basis(checkpoint)
        if check_text is None:
            plan = predicted_plan(checkpoint, basis, max_degradation=max_degradation)
        else:
            placed = partial(load, path, dtype=target.name, mesh=mesh, weights=weights)
            plan = predicted_and_checked_plan(
                checkpoint, basis, placed, max_degradation=max_degradation, texts=check_text, payload=payload
            )
            payload = "native" if plan is None else payload
    if plan is None:
        logger.info("loading %s at full rank; pass plan= to compress its KV cache", path)
        plan, basis = CompressionPlan.full(config), None
    else:
        if not isinstance(plan, CompressionPlan | str | Path):
            raise PlanError(f"plan must be a CompressionPlan or the path of its JSON, got {plan!r:.80}")
        plan = plan if isinstance(plan, CompressionPlan) else CompressionPlan.load(plan)
        plan.check_model(config, checkpoint.fingerprint)
        basis = basis or stored_basis(checkpoint)
        basis.check_model(checkpoint.fingerprint, config)
    if payload == "float8":
        check_scales(basis)
        if plan.classes is not None:
            check_classes(payload)
    embeddings = cast(checkpoint.embeddings(), target)
    stored = (checkpoint.layer(index) for index in range(config.num_layers))
    layers = prepared_layers(stored, config, plan, basis, target, payload)
    network: Transformer | ShardedTransformer
    if devices is None:
        network = Transformer(config, plan, embeddings, layers)
    else:
        blocks = (Block(layer, config, spec) for layer, spec in zip(layers, config.layers, strict=True))
        ends = Embeddings(embeddings, config)
        network = ShardedTransformer(config, plan, ends, blocks, devices, weights=weights)
    return LanguageModel(network, checkpoint.tokenizer(), basis)


def _check_placement(mesh: MeshConfig | None, weights: WeightPlacement, payload: Payload) -> None:
    if payload not in PAYLOADS:
        raise ValueError(f"{payload=} must be one of {PAYLOADS}")
    if weights not in WEIGHT_PLACEMENTS:
        raise ValueError(f"{weights=} must be one of {WEIGHT_PLACEMENTS}")
    if weights == "gathered" and mesh is None:
        raise MeshError(f"{weights=} are divided over devices; give mesh= with it")
    if payload == "float8" and mesh is None:
        raise MeshError(f"{payload=} is exchanged between devices; give mesh= with it")


def predicted_plan(checkpoint: Checkpoint, basis: Basis, *, max_degradation: float) -> CompressionPlan:
    """The plan predicted for a limit on perplexity, unchecked: with a margin, and with a warning.

    Raises:
      PlanError: a limit of 0 or below. CalibrationError: no profile in the folder, or another model's.
    """
    profile, context = stored_profile(checkpoint), basis.context_length
    plan = Predictor.stored().plan(
        checkpoint.config, profile, max_degradation=max_degradation, context=context
    )
    warnings.warn(
        f"{max_degradation=} was predicted, not measured, from the text of calibration; check it on your own",
        stacklevel=3,
    )
    return plan


def predicted_and_checked_plan(
    checkpoint: Checkpoint,
    basis: Basis,
    placed: Callable[..., LanguageModel],
    *,
    max_degradation: float,
    texts: str | Path | Sequence[str | Path],
    payload: Payload,
) -> CompressionPlan | None:
    """The plan that `load` takes with `check_text`; None stands for the unmodified model, with a warning.

    placed: `load` of this folder, where the model is to run and in its dtype. The folder is read anew for
    each plan: at no time does the host hold the model.

    Raises:
      As `predicted_plan` does. TextError: `texts` are missing, or shorter than one window. As `placed` does.
    """
    config, context, tokenizer = checkpoint.config, basis.context_length, checkpoint.tokenizer()
    profile = stored_profile(checkpoint)
    if payload == "float8":
        check_scales(basis)
    if tokenizer is None:
        raise CalibrationError(f"{checkpoint.path} has no tokenizer, so check_text cannot be read")
    windows, _ = token_windows(
        read_documents([texts] if isinstance(texts, str | Path) else texts),
        tokenizer,
        length=context,
        num_windows=CHECK_WINDOWS,
        seed=CHECK_SEED,
        eos_id=next(iter(config.eos_ids), None),
    )
    dense = placed().network
    batch = dense.mesh.shape[DATA] if isinstance(dense, ShardedTransformer) else 1
    dense_nll = window_nll(dense, windows, batch=batch)
    del dense

    def measure(plan: CompressionPlan) -> float:
        network = placed(plan, basis=basis, payload=payload).network
        increase = float(np.expm1((window_nll(network, windows, batch=batch) - dense_nll).mean()))
        share = plan.bytes(context) / CompressionPlan.full(config).bytes(context)
        logger.info("check_text: a plan of %.1f %% of the bytes costs %+.2f %%", 100 * share, 100 * increase)
        return increase

    plan = checked_plan(
        Predictor.stored(), config, profile, measure, max_degradation=max_degradation, context=context
    )
    if plan is None:
        warnings.warn(
            f"no predicted plan holds {max_degradation=} on check_text; nothing is compressed", stacklevel=3
        )
    return plan


def stored_basis(checkpoint: Checkpoint) -> Basis:
    """The basis in the folder; raises `CalibrationError` where there is none."""
    folder = checkpoint.calibration_path / "basis"
    if not folder.exists():
        raise CalibrationError(
            f"{checkpoint.path} has no calibrated basis, which a plan needs; "
            f"run: zdc calibrate {checkpoint.path} TEXT"
        )
    return Basis.load(folder)


def stored_profile(checkpoint: Checkpoint) -> Profile:
    """The profile in the folder; raises `CalibrationError` where there is none of this model."""
    folder = checkpoint.calibration_path / "profile"
    if not folder.exists():
        raise CalibrationError(f"{checkpoint.path} has no profile; run: zdc calibrate {checkpoint.path} TEXT")
    profile = Profile.load(folder)
    if profile.fingerprint != checkpoint.fingerprint:
        raise CalibrationError(f"the profile is of another model, {profile.fingerprint!r}")
    return profile


def prepared_layers(
    layers: Iterator[Any],
    config: ModelConfig,
    plan: CompressionPlan,
    basis: Basis | None,
    dtype: jnp.dtype,
    payload: Payload = "native",
) -> Iterator[dict[str, Any]]:
    """Folded (if there is a basis), sliced and rounded layers, one at a time; `float8`: with scales."""
    for index, layer in enumerate(layers):
        if basis is not None:
            folded = fold_attention(
                layer["attention"],
                config,
                basis,
                index,
                plan.stored_ranks(index),
                full_width=any(plan.near(index)),
            )
            if payload == "float8":
                folded |= scale_weights(basis, index)
            layer = {**layer, "attention": folded}
        yield cast(layer, dtype)


def cast(tree: Any, dtype: jnp.dtype) -> Any:
    """A nested dict of arrays rounded once to the model's dtype; rotary frequencies stay float32."""
    return {
        name: cast(value, dtype)
        if isinstance(value, dict)
        else np.asarray(value).astype(np.float32 if name == "frequencies" else dtype)
        for name, value in tree.items()
    }
