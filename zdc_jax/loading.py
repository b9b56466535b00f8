"""`load`: a converted folder and a plan → a model whose arrays are already folded and sliced."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.errors import CalibrationError, CheckpointError, PlanError
from zdc_jax.fold import fold_attention
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

logger = logging.getLogger("zdc_jax")

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A network ready to run, with what is needed to talk to it.

    `basis` is None for the unmodified model; `tokenizer` is None for models made from arrays.
    """

    network: Transformer
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
    max_score_error: float | None = None,
) -> LanguageModel:
    """Loads a converted folder; with a plan, folds the calibrated basis in and keeps the plan's coordinates.

    Args:
      path: folder written by `zdc convert`.
      plan: a plan or the path of its JSON; None loads the unmodified weights at full rank.
      basis: basis to fold; default the one stored by `zdc calibrate`.
      dtype: dtype of weights, activations and cache; default that of the stored weights.
      max_score_error: instead of a plan, the fewest coordinates within this calibrated relative error of
        scores and values (`CompressionPlan.from_error`).

    Raises:
      CheckpointError: unreadable folder, unknown dtype.
      PlanError: corrupt plan, or one made for another model; a limit outside (0, 1), or beside a plan.
      CalibrationError: a plan was given and the folder holds no basis, or that of another model.
    """
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype!r} must be one of {DTYPES}")
    target = jnp.dtype(dtype or config.dtype)
    if max_score_error is not None:
        if plan is not None:
            raise PlanError(f"{max_score_error=} chooses a plan; give it or plan=, not both")
        basis = basis or stored_basis(checkpoint)
        plan = CompressionPlan.from_error(basis, max_score_error=max_score_error)
    if plan is None:
        logger.info("loading %s at full rank; pass plan= to compress its KV cache", path)
        plan, basis = CompressionPlan.full(config), None
    else:
        plan = plan if isinstance(plan, CompressionPlan) else CompressionPlan.load(plan)
        plan.check_model(config, checkpoint.fingerprint)
        basis = basis or stored_basis(checkpoint)
        basis.check_model(checkpoint.fingerprint, config)
    layers = (checkpoint.layer(index) for index in range(config.num_layers))
    network = Transformer(
        config,
        plan,
        cast(checkpoint.embeddings(), target),
        prepared_layers(layers, config, plan, basis, target),
    )
    return LanguageModel(network, checkpoint.tokenizer(), basis)


def stored_basis(checkpoint: Checkpoint) -> Basis:
    """The basis in the folder; raises `CalibrationError` where there is none."""
    folder = checkpoint.calibration_path / "basis"
    if not folder.exists():
        raise CalibrationError(
            f"{checkpoint.path} has no calibrated basis, which a plan needs; "
            f"run: zdc calibrate {checkpoint.path} TEXT"
        )
    return Basis.load(folder)


def prepared_layers(
    layers: Iterator[Any],
    config: ModelConfig,
    plan: CompressionPlan,
    basis: Basis | None,
    dtype: jnp.dtype,
) -> Iterator[dict[str, Any]]:
    """Folded (if there is a basis), sliced and rounded layers, one at a time."""
    for index, layer in enumerate(layers):
        if basis is not None:
            folded = fold_attention(
                layer["attention"],
                config,
                basis,
                index,
                plan.stored_ranks(index),
                full_width=plan.keeps_full_width,
            )
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
