"""`load`: a converted folder and a plan → a model whose arrays are already folded and sliced."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax.numpy as jnp
from tokenizers import Tokenizer

from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import DTYPES, ModelConfig
from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.errors import CalibrationError, CheckpointError, MeshError, PlanError, foreign_errors_as
from zdc_jax.fold import cast, prepared_layers
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Embeddings, Transformer
from zdc_jax.ops.rotary import rope_frequencies
from zdc_jax.parallel.classes import check_classes
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.payload import Payload, check_basis, check_payload
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.parallel.weights import WEIGHT_PLACEMENTS, WeightPlacement
from zdc_jax.plan import CompressionPlan

logger = logging.getLogger("zdc_jax")


class TextModel(Protocol):
    """What texts need of a model: no weights. `LanguageModel` and `TextSide` are such."""

    @property
    def config(self) -> ModelConfig:
        """Architecture."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for models made from arrays."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """None for models that come without one."""


@dataclass(frozen=True, eq=False)
class TextSide:
    """A model without its weights, for a process that others compute for."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None

    @classmethod
    def load(cls, path: str | Path, max_positions: int | None = None) -> "TextSide":
        """Of a converted folder, as `load` takes it; raises `CheckpointError`."""
        checkpoint = Checkpoint.open(path)
        config = _config(checkpoint, max_positions)
        return cls(config, checkpoint.tokenizer(), ChatTemplate.of(checkpoint))


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A network ready to run, with what is needed to talk to it.

    `basis` is None for the unmodified model; `tokenizer` is None for models made from arrays; `chat_template`
    is None for models that come without one.
    """

    network: Transformer | ShardedTransformer
    tokenizer: Tokenizer | None = None
    basis: Basis | None = None
    chat_template: ChatTemplate | None = None

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
    max_positions: int | None = None,
    mesh: MeshConfig | str | None = None,
    weights: WeightPlacement = "replicated",
    payload: Payload = "native",
) -> LanguageModel:
    """Loads a converted folder; with a plan, folds the calibrated basis in and keeps the plan's coordinates.

    `zdc_jax.choose_plan` finds a plan within a limit.

    Args:
      path: folder written by `zdc convert`.
      plan: a plan or the path of its JSON; None loads the unmodified weights at full rank.
      basis: basis to fold, with a plan; default the one stored by `zdc calibrate`.
      dtype: dtype of weights, activations and cache; default that of the stored weights.
      max_positions: longest context, in tokens; default the checkpoint's. Rotary scaling of `longrope` and
        `dynamic` goes by it, whatever the length of a prompt; `yarn` and `dynamic` allow more than the
        checkpoint's, up to `factor` times those of training.
      mesh: devices to run on, also as `MeshConfig.parse` takes them; default one. Layers are read one at a
        time, and each device gets its share.
      weights: on a mesh, `replicated` for prompts, or `gathered` from all devices layer by layer
        (`zdc_jax.parallel.weights`).
      payload: what devices exchange of a prompt: `native`; or `float8`, which halves the bytes of 16 bits; or
        `coded`, integers of a quarter of them in the mean. The latter two round, with q and o, what the cache
        holds of the prompt (`zdc_jax.parallel.payload`). Caches in codes exchange keys and values as their
        own codes, and only q and o as the payload says.

    Raises:
      CheckpointError: unreadable folder (or files of its chat template), unknown dtype, more positions than
        the model can be used with.
      PlanError: corrupt plan, or one made for another model or on another basis; a basis without a plan that
        folds one.
      CalibrationError: a plan was given and the folder holds no basis, or that of another model; a payload
        that rounds without a plan on a basis; `float8` with a basis too old to give scales.
      MeshError: the model cannot be divided over the mesh, there are too few devices; a payload that rounds
        or `gathered` without one.
      ValueError: unknown weights or payload.
      NotImplementedError: a payload that rounds for a plan with token classes; a method that does not run on
        a mesh.
    """
    mesh = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    check_options(dtype, mesh, weights, payload)
    devices = None if mesh is None else mesh.create()
    checkpoint = Checkpoint.open(path)
    target = jnp.dtype(dtype or checkpoint.config.dtype)
    config = _config(checkpoint, max_positions)
    chat_template = ChatTemplate.of(checkpoint)
    plan, basis = _plan_and_basis(checkpoint, plan, basis)
    if basis is not None and _frequencies(config) != _frequencies(checkpoint.config):
        logger.warning(
            "max_positions=%d changes the rotary frequencies, and the basis was calibrated with those of %d; "
            "plans may lose more than they did there",
            config.max_positions,
            checkpoint.config.max_positions,
        )
    check_basis(payload, basis)
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
        network = ShardedTransformer(config, plan, ends, blocks, devices, weights=weights, payload=payload)
    return LanguageModel(network, checkpoint.tokenizer(), basis, chat_template)


def _config(checkpoint: Checkpoint, max_positions: int | None) -> ModelConfig:
    """The model's own, for contexts of so many tokens; raises `CheckpointError`."""
    if max_positions is None:
        return checkpoint.config
    with foreign_errors_as(CheckpointError, f"{checkpoint.path}"):
        return checkpoint.config.with_positions(max_positions)


def _frequencies(config: ModelConfig) -> list[bytes]:
    """The rotary frequencies of all layers."""
    ropes = (layer.rope for layer in config.layers if layer.rope is not None)
    return [rope_frequencies(rope, config.head_dim, config.max_positions).tobytes() for rope in ropes]


def check_options(
    dtype: str | None, mesh: MeshConfig | None, weights: WeightPlacement, payload: Payload
) -> None:
    """Refuses what `load` cannot do on any model; raises `CheckpointError`, `ValueError` or `MeshError`."""
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype!r} must be one of {DTYPES}")
    check_payload(payload)
    if weights not in WEIGHT_PLACEMENTS:
        raise ValueError(f"{weights=} must be one of {WEIGHT_PLACEMENTS}")
    if weights == "gathered" and mesh is None:
        raise MeshError(f"{weights=} are divided over devices; give mesh= with it")
    if payload != "native" and mesh is None:
        raise MeshError(f"{payload=} is exchanged between devices; give mesh= with it")


def _plan_and_basis(
    checkpoint: Checkpoint, plan: CompressionPlan | str | Path | None, basis: Basis | None
) -> tuple[CompressionPlan, Basis | None]:
    """The plan and the basis to fold, of this model and of each other; no basis for the unmodified model."""
    if plan is None:
        if basis is not None:
            raise PlanError("basis= was given without plan=, which says what of it is kept")
        logger.info("loading %s at full rank; pass plan= to compress its KV cache", checkpoint.path)
        return CompressionPlan.full(checkpoint.config), None
    if not isinstance(plan, CompressionPlan | str | Path):
        raise PlanError(f"plan must be a CompressionPlan or the path of its JSON, got {plan!r:.80}")
    plan = plan if isinstance(plan, CompressionPlan) else CompressionPlan.load(plan)
    plan.check_model(checkpoint.config, checkpoint.fingerprint)
    if not plan.rotated:
        if basis is not None:
            raise PlanError("basis= was given for a plan that is not rotated")
        return plan, None
    basis = basis or stored_basis(checkpoint)
    basis.check_model(checkpoint.fingerprint, checkpoint.config)
    plan.check_basis(basis.coordinates_hash)
    return plan, basis


def stored_basis(checkpoint: Checkpoint) -> Basis:
    """The basis in the folder; raises `CalibrationError` where there is none."""
    folder = checkpoint.calibration_path / "basis"
    if not folder.exists():
        raise CalibrationError(
            f"{checkpoint.path} has no calibrated basis, which a plan needs; "
            f"run: zdc calibrate {checkpoint.path} TEXT"
        )
    return Basis.load(folder)
