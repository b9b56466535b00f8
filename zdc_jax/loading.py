"""Loading a converted folder into a `LanguageModel`, compressed as a plan says (`load`)."""

import functools
import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from threadpoolctl import threadpool_limits
from tokenizers import Tokenizer

from kernels_pallas import device_refusal
from kernels_pallas.tuning import has_table
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import DTYPES, ModelConfig
from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.errors import CalibrationError, CheckpointError, MeshError, PlanError, foreign_errors_as
from zdc_jax.fold import cast, prepared_layer
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.rotary import rope_frequencies
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.payload import Payload, check_basis, check_payload
from zdc_jax.parallel.weights import WEIGHT_PLACEMENTS, WeightPlacement
from zdc_jax.plan import CompressionPlan
from zdc_jax.presets import resolve_plan

logger = logging.getLogger("zdc_jax")

AHEAD = 4
"""Layers that are read, folded and sent to the device at once. Each takes host memory."""
OVERFLOWING = frozenset({"gemma3_text"})
"""Families whose activations exceed the range of float16, as in vLLM."""


class TextModel(Protocol):
    """Interface of a model for code that handles text only. `LanguageModel` and `TextSide` implement it."""

    @property
    def config(self) -> ModelConfig:
        """Architecture of the model."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer; None for models made from arrays."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """Chat template; None for models without one."""


@dataclass(frozen=True, eq=False)
class TextSide:
    """Model without its weights, for a process that leaves the computation to other processes.

    Attributes:
      config: architecture of the model.
      tokenizer: tokenizer; None if the folder has none.
      chat_template: chat template; None if the folder has none.
    """

    config: ModelConfig
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None

    @classmethod
    def load(cls, path: str | Path, max_positions: int | None = None) -> "TextSide":
        """Load a converted folder; `path`, `max_positions` and `CheckpointError` are those of `load`."""
        checkpoint = Checkpoint.open(path)
        config = _read_config(checkpoint, max_positions)
        return cls(config, checkpoint.tokenizer(), ChatTemplate.of(checkpoint))


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """Network with its tokenizer, basis and chat template, returned by `load`.

    Attributes:
      network: network with folded and sliced weights.
      tokenizer: tokenizer; None for models made from arrays.
      basis: folded basis; None for the unmodified model.
      chat_template: chat template; None for models without one.
    """

    network: Transformer
    tokenizer: Tokenizer | None = None
    basis: Basis | None = None
    chat_template: ChatTemplate | None = None

    @property
    def config(self) -> ModelConfig:
        """Architecture of the model."""
        return self.network.config

    @property
    def plan(self) -> CompressionPlan:
        """Plan that the weights were sliced to."""
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
    reproducible: bool = False,
) -> LanguageModel:
    """Load a converted folder; with a plan, fold in the calibrated basis and store the plan's coordinates.

    `zdc_jax.choose_plan` chooses a plan within an error limit.

    Args:
      path: folder written by `zdc convert`.
      plan: plan, path of its JSON file, or a preset (`zdc_jax.presets`): 8bit, 4bit, 3bit, small or none.
        None loads the unmodified model at full rank.
      basis: basis to fold in; requires a plan. Default: the basis stored by `zdc calibrate`.
      dtype: dtype of weights, activations and cache. Default: dtype of the stored weights, or bfloat16 for a
        family whose activations exceed float16 (`OVERFLOWING`).
      max_positions: longest context, in tokens. Default: that of the checkpoint. Rotary scaling `yarn` and
        `dynamic` allow up to `factor` times the context of training. `longrope` and `dynamic` choose their
        frequencies by `max_positions`, not by the length of a prompt.
      mesh: devices to run on, or a string for `MeshConfig.parse`. Default: one device. Layers are sent one
        at a time, and each device receives its share.
      weights: placement of the weights on a mesh: `replicated`, or `gathered` from all devices layer by
        layer, which saves memory (`zdc_jax.parallel.weights`).
      payload: format in which devices exchange a prompt (`zdc_jax.parallel.payload`). `native` keeps the
        dtype of the model. `float8` halves the bytes of 16-bit values. `coded` uses integers, on average a
        quarter of these bytes. Both round q and o, and also the keys and values in the cache of the prompt.
        Quantized caches exchange keys and values in their own format, and use the payload for q and o only.
      reproducible: compute every token with the same arithmetic, whatever else a program computes. Results
        then do not depend on chunk widths, cached prefixes or other sequences (`zdc_jax.model.tiles`), but on
        the capacity of the cache. Slow.

    Raises:
      CheckpointError: the folder or its chat template is unreadable, `dtype` is unknown or too narrow for the
        family, or `max_positions` exceeds the limit of the model.
      PlanError: the plan is corrupt, or made for another model or basis; `basis` without a plan that uses it.
      CalibrationError: the plan needs a basis and the folder has none, or the basis is of another model;
        `float8` or `coded` without a plan on a basis; `float8` with a basis of an older release.
      MeshError: the model cannot be divided over the mesh; there are too few devices; `gathered`, `float8`
        or `coded` without a mesh; `reproducible` with one.
      ValueError: unknown `weights` or `payload`.
      NotImplementedError: a method that does not run on a mesh.
    """
    mesh = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    check_options(dtype, mesh, weights, payload)
    if reproducible and mesh is not None:
        raise MeshError("reproducible=True runs on one device; leave out mesh= or reproducible=")
    devices = None if mesh is None else mesh.create()
    checkpoint = Checkpoint.open(path)
    log_device()
    target = jnp.dtype(choose_dtype(checkpoint.config, dtype))
    config = _read_config(checkpoint, max_positions)
    chat_template = ChatTemplate.of(checkpoint)
    plan, basis = _resolve_plan(checkpoint, plan, basis)
    if basis is not None and _list_frequencies(config) != _list_frequencies(checkpoint.config):
        logger.warning(
            "max_positions=%d changes the rotary frequencies, but the basis was calibrated with "
            "max_positions=%d; plans may lose more quality than measured",
            config.max_positions,
            checkpoint.config.max_positions,
        )
    check_basis(payload, basis)

    def read_embeddings() -> dict[str, Any]:
        return send(cast(checkpoint.embeddings(), target))

    def read_layer(index: int) -> dict[str, Any]:
        return send(prepared_layer(index, checkpoint.layer(index), config, plan, basis, target, payload))

    device = jax.config.jax_default_device  # Each thread has its own setting.

    def send(tree: dict[str, Any]) -> dict[str, Any]:
        if devices is not None:  # A mesh takes arrays of the host, of which each device receives its share.
            return tree
        with jax.default_device(device):
            return jax.device_put(tree)

    reads: list[Callable[[], dict[str, Any]]] = [
        read_embeddings,
        *(partial(read_layer, index) for index in range(config.num_layers)),
    ]
    read = _call_ahead(reads)
    # Matrices are too small for BLAS's own threads, which would wait for each other.
    with threadpool_limits(1, "blas"), closing(read):
        embeddings = next(read)
        network = Transformer(
            config,
            plan,
            embeddings,
            read,
            devices,
            reproducible=reproducible,
            weights=weights,
            payload=payload,
        )
    return LanguageModel(network, checkpoint.tokenizer(), basis, chat_template)


def _call_ahead[T](functions: Sequence[Callable[[], T]]) -> Generator[T]:
    """Yield the results of functions in order; threads compute `AHEAD` of them at once."""
    threads, started = ThreadPoolExecutor(AHEAD), deque[Future[T]]()
    try:
        for function in functions:
            started.append(threads.submit(function))
            if len(started) > AHEAD:
                yield started.popleft().result()
        while started:
            yield started.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)


def choose_dtype(config: ModelConfig, dtype: str | None) -> str:
    """Return the dtype to run in, of which the default is that of the stored weights.

    Raises:
      CheckpointError: activations of the family exceed the range of `dtype`.
    """
    chosen = dtype or config.dtype
    if chosen != "float16" or config.family not in OVERFLOWING:
        return chosen
    supported = [name for name in DTYPES if name != "float16"]
    if dtype is not None:
        raise CheckpointError(
            f"dtype={dtype!r}: activations of {config.family} exceed its range; choose one of {supported}"
        )
    logger.warning(
        "activations of %s exceed float16, the dtype of the stored weights: running in bfloat16; "
        "dtype may be one of %s",
        config.family,
        supported,
    )
    return "bfloat16"


def _read_config(checkpoint: Checkpoint, max_positions: int | None) -> ModelConfig:
    if max_positions is None:
        return checkpoint.config
    with foreign_errors_as(CheckpointError, f"{checkpoint.path}"):
        return checkpoint.config.with_positions(max_positions)


def _list_frequencies(config: ModelConfig) -> list[bytes]:
    """Return the rotary frequencies of all layers, as bytes for comparison."""
    ropes = (layer.rope for layer in config.layers if layer.rope is not None)
    return [rope_frequencies(rope, config.head_dim, config.max_positions).tobytes() for rope in ropes]


@functools.cache
def log_device() -> None:
    """Log once if this GPU has no kernels, or if their tile sizes were not tuned on it."""
    if jax.default_backend() != "gpu":
        return
    device = jax.devices()[0].device_kind
    if (reason := device_refusal(jax.ShapeDtypeStruct((1,), jnp.bfloat16))) is not None:
        logger.warning(
            "%s runs on XLA, where plans save memory but no time; use an H100 or H200 for the kernels (%s)",
            device,
            reason,
        )
    elif not has_table(device):
        logger.info("kernels use default tile sizes, because none were tuned on %s", device)


def check_options(
    dtype: str | None, mesh: MeshConfig | None, weights: WeightPlacement, payload: Payload
) -> None:
    """Check the options of `load` that do not depend on the model; raise as `load` does."""
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype!r} must be one of {DTYPES}")
    if mesh is not None and not isinstance(mesh, MeshConfig):
        raise MeshError(f"{mesh=!r:.80} must be a MeshConfig, or a text such as 'sequence=2'")
    check_payload(payload)
    if weights not in WEIGHT_PLACEMENTS:
        raise ValueError(f"{weights=} must be one of {WEIGHT_PLACEMENTS}")
    if weights == "gathered" and mesh is None:
        raise MeshError(f"{weights=} divides the weights over several devices; pass mesh= as well")
    if payload != "native" and mesh is None:
        raise MeshError(f"{payload=} is a format for the exchange between devices; pass mesh= as well")


def _resolve_plan(
    checkpoint: Checkpoint, plan: CompressionPlan | str | Path | None, basis: Basis | None
) -> tuple[CompressionPlan, Basis | None]:
    """Return the plan and its basis after checking that both match the model and each other.

    The basis is None for plans that use none.
    """
    if not isinstance(plan, CompressionPlan | str | Path | None):
        raise PlanError(f"plan={plan!r:.80} must be a CompressionPlan or the path of its JSON file")
    if isinstance(plan, str | Path):
        plan = resolve_plan(plan, checkpoint.path)
    if plan is None:
        if basis is not None:
            raise PlanError("basis= needs a plan that chooses among its coordinates; pass plan= as well")
        logger.info("loading %s at full rank; pass plan= to compress its KV cache", checkpoint.path)
        return CompressionPlan.full(checkpoint.config), None
    plan.check_model(checkpoint.config, checkpoint.fingerprint)
    if not plan.rotated:
        if basis is not None:
            raise PlanError("basis= needs a plan with rotated=True; this plan has rotated=False")
        return plan, None
    basis = basis or stored_basis(checkpoint)
    basis.check_model(checkpoint.fingerprint, checkpoint.config)
    plan.check_basis(basis.coordinates_hash)
    if basis.key_shift is None and any(ranks.shift for ranks in plan.layers):
        raise CalibrationError(
            f"the plan shifts keys, but {checkpoint.path} was calibrated by an older release; "
            f"run `zdc calibrate {checkpoint.path} TEXT --overwrite` and `zdc plan`"
        )
    return plan, basis


def stored_basis(checkpoint: Checkpoint) -> Basis:
    """Load the basis of a converted folder; raise `CalibrationError` if the folder has none."""
    folder = checkpoint.calibration_path / "basis"
    if not folder.exists():
        raise CalibrationError(
            f"{checkpoint.path} has no calibrated basis, which plans need; {checkpoint.calibration_advice}"
        )
    return Basis.load(folder)
