"""Calibration: text → moments of q, k, v, o → basis, stored in the converted folder (ZDC §4.3, §5.1)."""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from convert.calibration.collect_profile import collect_profile, whole_plan
from convert.calibration.kmeans import kmeans_moments
from convert.calibration.make_basis import make_basis
from convert.calibration.moments import Moments
from convert.progress import track
from zdc_jax.axes import Array
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.errors import CalibrationError, CheckpointError
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.evaluation.splits import Split, documents_of, split_seed
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.loading import load
from zdc_jax.model.observe import Seen, observe
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.contract import einsum_f32
from zdc_jax.plan import CompressionPlan, allowed_ranks
from zdc_jax.planning.profile import Profile

logger = logging.getLogger("zdc_jax")

QkChoice = Literal["auto", "stacked", "balanced", "keys", "pairs"]
VoChoice = Literal["auto", "stacked", "balanced", "output"]

MOST_CONTEXT = 8192
"""Tokens of a window at most, where nothing is said."""
AUTO_WINDOWS = 4
"""Calibration windows on which `auto` compares bases."""
FEW_TOKENS = 32_768
"""Calibrated on fewer, a basis is poor."""


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """What `calibrate` does; lengths and counts are in tokens."""

    qk: QkChoice = "auto"
    """Basis of Q and K; auto takes the lower calibration perplexity of stacked and balanced."""
    vo: VoChoice = "auto"
    """Basis of V and O, likewise."""
    center: bool = False
    """Take the means off keys and values first."""
    tokens: int = 1_000_000
    """Tokens of text to read."""
    context: int | None = None
    """Length of the windows, that of the longest prompts where it can be; default the model's positions, at
    most 8192. Rotary embeddings turn keys where calibration did not see them otherwise than where it did."""
    batch: int = 1
    """Windows at a time, rounded up to a multiple of the devices."""
    seed: int = 0
    """Chooses the windows, and K-means' starts."""
    reduction: Literal["moments", "kmeans"] = "moments"
    """Exact moments of all tokens, or the paper's route: prune sequences and cluster vectors."""
    prune: float = 0.5
    """Share of each topic's windows that kmeans drops."""
    clusters: int = 1024
    """Centroids per head and kind for kmeans."""
    profile: bool = True
    """Measure what each layer needs of distant tokens, by eight windows a layer: searches for a plan and
    `choose_plan` go by it."""

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("batch", 1), ("clusters", 1), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                raise CalibrationError(f"{name}={value} must be >= {least}")
        if self.context is not None and self.context < 2:
            raise CalibrationError(f"context={self.context} must be >= 2 tokens")
        if not 0 <= self.prune < 1:
            raise CalibrationError(f"prune={self.prune} must lie in [0, 1), a share of the sequences")

    def window_length(self, config: ModelConfig) -> int:
        """Tokens a window for this model; raises `CalibrationError` beyond its positions."""
        context = self.context or min(config.max_positions, MOST_CONTEXT)
        if context > config.max_positions:
            raise CalibrationError(f"{context=} exceeds the model's {config.max_positions} positions")
        return context

    def check_model(self, config: ModelConfig) -> None:
        """Raises `CalibrationError` where the basis asked for could not be folded into this model."""
        if self.qk == "pairs" and any(spec.qk_norm for spec in config.layers):
            raise CalibrationError(
                f"qk={self.qk!r} does not fold past this model's norms of q and k; use 'balanced'"
            )


def calibrate(
    path: str | Path,
    texts: Sequence[str | Path],
    options: CalibrationOptions | None = None,
    *,
    overwrite: bool = False,
    dtype: str | None = None,
    progress: bool = True,
) -> Basis:
    """Calibrates a converted folder on text and stores moments, profile and basis in it.

    Args:
      path: folder written by `zdc convert`.
      texts: files or folders, see `zdc_jax.evaluation.text.read_documents`; topics are folder names. Empty: a
        new basis from the moments stored by an earlier calibration, and no profile.
      overwrite: replace an existing basis and its profile; plans that were made with it do not load then.
      dtype: dtype the model runs in; default that of the stored weights.
      progress: show how far it has come, on standard error.

    Texts of few tokens are logged as a warning.

    Raises:
      CalibrationError, TextError, CheckpointError: bad options, text or folder, before anything is written; a
        basis exists and `overwrite` is False.
    """
    options = options or CalibrationOptions()
    checkpoint = Checkpoint.open(path)
    if not overwrite and (checkpoint.calibration_path / "basis").exists():
        raise CheckpointError(
            f"{checkpoint.path} has a basis, and plans made with it load with no other; "
            "pass --overwrite to replace it"
        )
    context = options.window_length(checkpoint.config)
    options.check_model(checkpoint.config)
    windows: np.ndarray | None = None
    if not texts:
        moments, record = stored_moments(checkpoint)
    else:
        windows, topics = calibration_windows(checkpoint, texts, context, options)
        if windows.size < FEW_TOKENS:
            few = f"{windows.size:,} tokens are few, at least {FEW_TOKENS:,} are needed for a good basis"
            logger.warning(few)
        began = time.perf_counter()
        network = load(path, dtype=dtype).network
        assert isinstance(network, Transformer)  # It was not loaded onto a mesh.
        if options.reduction == "kmeans":
            moments = kmeans_moments(
                network,
                windows,
                topics,
                prune=options.prune,
                clusters=options.clusters,
                seed=options.seed,
                fingerprint=checkpoint.fingerprint,
            )
        else:
            moments = collect_moments(
                network,
                windows,
                fingerprint=checkpoint.fingerprint,
                batch=options.batch,
                progress=progress,
            )
        del network
        moments.save(checkpoint.calibration_path / "moments")
        record = {
            "reduction": options.reduction,
            "seed": options.seed,
            "topics": sorted(set(topics)),
            "seconds_moments": time.perf_counter() - began,
        }
    basis = choose_basis(checkpoint, moments, windows, options, dtype=dtype, progress=progress)
    basis = replace(basis, record={**basis.record, **record, "center": options.center})
    profile = None
    if windows is not None and options.profile:
        # Before anything is replaced: here it shows whether the basis can be used.
        profile = measured_profile(checkpoint, basis, windows, dtype=dtype, progress=progress)
    basis.save(checkpoint.calibration_path / "basis")
    # A profile is of one basis: it goes where it is not measured anew.
    shutil.rmtree(checkpoint.calibration_path / "profile", ignore_errors=True)
    if profile is not None:
        profile.save(checkpoint.calibration_path / "profile")
    return basis


def measured_profile(
    checkpoint: Checkpoint,
    basis: Basis,
    windows: np.ndarray,
    *,
    dtype: str | None = None,
    progress: bool = False,
) -> Profile:
    """Profile of the model in this basis."""
    network = load(checkpoint.path, whole_plan(checkpoint.config), basis=basis, dtype=dtype).network
    assert isinstance(network, Transformer)  # It was not loaded onto a mesh.
    found = collect_profile(network, windows, fingerprint=checkpoint.fingerprint, progress=progress)
    return replace(found, basis=basis.coordinates_hash)


def stored_moments(checkpoint: Checkpoint) -> tuple[Moments, dict[str, Any]]:
    """The folder's moments, and what the record of its basis says of them.

    Raises:
      CheckpointError: no moments, or unreadable ones.
      CalibrationError: they are another model's.
    """
    folder = checkpoint.calibration_path
    moments = Moments.load(folder / "moments")
    if moments.fingerprint != checkpoint.fingerprint:
        raise CalibrationError(
            f"the moments are of model {moments.fingerprint!r}, this one is {checkpoint.fingerprint!r}"
        )
    record = Basis.load(folder / "basis").record if (folder / "basis").exists() else {}
    kept = ("reduction", "seed", "topics", "seconds_moments")
    return moments, {name: record[name] for name in kept if name in record}


def calibration_windows(
    checkpoint: Checkpoint,
    texts: Sequence[str | Path],
    context: int,
    options: CalibrationOptions,
    split: Split | None = None,
) -> tuple[np.ndarray, list[str]]:
    """About `options.tokens` tokens of the texts, or of a split of them, in windows [W, context]; topics."""
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        raise CalibrationError(f"{checkpoint.path} has no tokenizer, so text cannot be read")
    documents = read_documents(texts)
    return token_windows(
        documents if split is None else documents_of(split, documents),
        tokenizer,
        length=context,
        num_windows=max(1, options.tokens // context),
        seed=options.seed if split is None else split_seed(split, options.seed),
        eos_id=next(iter(checkpoint.config.eos_ids), None),
    )


def collect_moments(
    network: Transformer,
    windows: np.ndarray,
    *,
    fingerprint: str,
    batch: int = 1,
    progress: bool = False,
) -> Moments:
    """Exact second moments and sums of q, k, v, o over all tokens of `windows` [W, T], in one pass.

    Grams are accumulated in float32 from activations in the model's dtype; batches are sharded over the
    devices present.
    """
    devices = jax.devices()
    batch = -(-batch // len(devices)) * len(devices)
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec("data"))
    network = jax.device_put(network, replicated)
    sums = jax.device_put(zero_sums(network), replicated)
    steps = range(0, len(windows), batch)
    for start in track(steps, "moments", shown=progress):
        piece = windows[start : start + batch]
        weight = np.arange(batch) < len(piece)
        whole = np.concatenate([piece, np.repeat(piece[-1:], batch - len(piece), axis=0)])
        sums = add_moments(network, sums, jax.device_put(whole, rows), jax.device_put(weight, rows))
        jax.block_until_ready(sums)  # What is shown is done, not only asked for.
    host = {name: np.asarray(value, np.float64) for name, value in sums.items()}
    return Moments(
        **host,
        num_tokens=windows.size,
        context_length=windows.shape[1],
        group_size=network.config.group_size,
        fingerprint=fingerprint,
    )


def zero_sums(network: Transformer) -> dict[str, Array]:
    """Empty sums for `add_moments`: q, k, v, o, k_before [L, K, H, H] and q_sum, … [L, K, H], float32."""
    config = network.config
    L, K, H = config.num_layers, config.num_kv_heads, config.head_dim
    grams = {name: jnp.zeros((L, K, H, H), jnp.float32) for name in (*"qkvo", "k_before")}
    return grams | {f"{name}_sum": jnp.zeros((L, K, H), jnp.float32) for name in "qkvo"}


@partial(jax.jit, donate_argnums=1)
def add_moments(
    network: Transformer, sums: dict[str, Array], tokens: Array, weight: Array
) -> dict[str, Array]:
    """Adds the moments of windows `tokens` [B, T] that have `weight` [B] 1 to the running sums."""
    K = network.config.num_kv_heads

    def tap(seen: Seen) -> dict[str, Array]:
        grams = [_gram(name, getattr(seen, name), weight, K) for name in "qkvo"]
        before = seen.attention.before_rope(
            seen.k, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        )
        latent = {"k_before": _gram("k_before", before, weight, K)["k_before"]}
        return latent | {name: value for gram in grams for name, value in gram.items()}

    new = observe(network, tokens, tap)
    return {name: total + jnp.stack([seen[name] for seen in new]) for name, total in sums.items()}


def _gram(name: str, x: Array, weight: Array, num_kv_heads: int) -> dict[str, Array]:
    """Gram matrix [K, H, H] and sum [K, H] of x [B, T, N or K, H], added over a group's heads."""
    B, T, _, H = x.shape
    x = x.reshape(B, T, num_kv_heads, -1, H) * weight[:, None, None, None, None].astype(x.dtype)
    with jax.default_matmul_precision("highest"):
        gram = einsum_f32("BTKGH,BTKGI->KHI", x, x)
    return {name: gram, f"{name}_sum": x.sum((0, 1, 3), dtype=jnp.float32)}


def choose_basis(
    checkpoint: Checkpoint,
    moments: Moments,
    windows: np.ndarray | None,
    options: CalibrationOptions,
    *,
    dtype: str | None = None,
    progress: bool = False,
) -> Basis:
    """The basis of the options; `auto` takes, for QK and VO apart, the lower perplexity at half rank.

    Without windows there is nothing to compare on: `auto` then means `balanced`.
    """
    output_weights = [
        np.asarray(checkpoint.layer(index)["attention"]["o"], np.float64)
        for index in range(checkpoint.config.num_layers)
    ]
    make: Callable[..., Basis] = partial(make_basis, moments, output_weights, center=options.center)
    H = checkpoint.config.head_dim
    half = min(allowed_ranks(H), key=lambda rank: abs(rank - H / 2) if rank else H)
    halved = {"qk": {"qk": half, "v": H}, "vo": {"qk": H, "v": half}}
    default = {"qk": "balanced", "vo": "balanced"}
    chosen = {"qk": options.qk, "vo": options.vo}
    open_sides = [side for side, kind in chosen.items() if kind == "auto" and windows is not None]
    perplexities: dict[str, dict[str, float]] = {side: {} for side in open_sides}
    candidates = [(side, kind) for side in open_sides for kind in ("balanced", "stacked")]
    for side, kind in track(candidates, "basis", shown=progress):
        assert windows is not None
        plan = CompressionPlan.uniform(checkpoint.config, **halved[side])
        network = load(checkpoint.path, plan, basis=make(**default | {side: kind}), dtype=dtype).network
        perplexities[side][kind] = float(np.exp(window_nll(network, windows[:AUTO_WINDOWS]).mean()))
    best = {side: min(found, key=found.__getitem__) for side, found in perplexities.items()}
    fixed = {side: kind for side, kind in chosen.items() if kind != "auto"}
    basis = make(**default | fixed | best)
    return replace(basis, record={**basis.record, "auto": perplexities, "auto_rank": half})
