"""Calibration of a converted folder: moments of q, k, v, o on text, basis and profile (ZDC §4.3, §5.1)."""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

from convert.calibration.collect_profile import collect_profile, whole_plan
from convert.calibration.estimate_shift import estimate_shift, list_mean_keys
from convert.calibration.far_values import sum_far_values
from convert.calibration.kmeans import kmeans_moments
from convert.calibration.make_basis import make_basis
from convert.calibration.moments import Moments
from convert.progress import track
from zdc_jax.axes import Array
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.errors import CalibrationError, CheckpointError
from zdc_jax.evaluation.batches import pad_batch
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.evaluation.splits import Split, documents_of, split_seed
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.loading import load
from zdc_jax.model.observe import Seen, observe
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.contract import einsum_f32
from zdc_jax.ops.shift import BLOCK
from zdc_jax.plan import CompressionPlan, allowed_ranks
from zdc_jax.planning.profile import Profile

logger = logging.getLogger("zdc_jax")

QkChoice = Literal["auto", "stacked", "balanced", "keys", "pairs", "oscar"]
VoChoice = Literal["auto", "stacked", "balanced", "output", "oscar"]

MAX_CONTEXT = 8192
"""Longest window unless `CalibrationOptions.context` asks for more, in tokens."""
AUTO_WINDOWS = 4
"""Calibration windows on which `auto` compares bases."""
SHIFT_WINDOWS = 2
"""Windows from which the mean of keys is estimated."""
FEW_TOKENS = 32_768
"""Fewest tokens of text for an accurate basis."""


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """Options of `calibrate`.

    Attributes:
      qk: Kind of the basis of Q and K. balanced weighs queries and keys alike. auto picks stacked or
        balanced by the lower perplexity at half rank, which suits plans that truncate.
      vo: Kind of the basis of V and O. auto picks as for Q and K.
      center: Subtract the mean of values first, weighted by the attention to older tokens.
      tokens: Tokens of text to read.
      context: Window length in tokens; best the length of the longest prompts. Rotary embeddings rotate keys
        beyond this length in ways that calibration does not see.
      batch: Windows to run at once, rounded up to a multiple of the devices.
      seed: Seed that chooses the windows and the starting points of K-means.
      reduction: Statistics of the text. moments: exact second moments of all tokens; kmeans: the paper's
        method, which prunes sequences and clusters vectors.
      prune: Share of each topic's windows that kmeans drops.
      clusters: Centroids per head and per kind of vector for kmeans.
      profile: Measure each layer's need for older tokens, on eight windows a layer. A search and
        `choose_plan` require the profile.
    """

    qk: QkChoice = "balanced"
    vo: VoChoice = "balanced"
    center: bool = False
    tokens: int = 1_000_000
    context: Annotated[
        int | None,
        tyro.conf.arg(help_behavior_hint=f"(default: the model's positions, at most {MAX_CONTEXT})"),
    ] = None
    batch: int = 1
    seed: int = 0
    reduction: Literal["moments", "kmeans"] = "moments"
    prune: float = 0.5
    clusters: int = 1024
    profile: bool = True

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("batch", 1), ("clusters", 1), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                raise CalibrationError(f"{name}={value}: must be at least {least}")
        if self.context is not None and self.context < 2:
            raise CalibrationError(f"context={self.context}: must be at least 2 tokens")
        if self.reduction != "kmeans":
            for name in ("clusters", "prune"):
                if (value := getattr(self, name)) != getattr(CalibrationOptions, name):
                    raise CalibrationError(
                        f"{name}={value}: has no effect on moments; use reduction='kmeans' or leave it out"
                    )
        if not 0 <= self.prune < 1:
            raise CalibrationError(f"prune={self.prune}: must be in [0, 1), a share of the windows")

    def window_length(self, config: ModelConfig) -> int:
        """Return the window length for a model; raise `CalibrationError` if it exceeds the positions."""
        context = self.context or min(config.max_positions, MAX_CONTEXT)
        if context > config.max_positions:
            raise CalibrationError(
                f"{context=}: exceeds the model's {config.max_positions} positions; choose fewer tokens"
            )
        return context

    def check_model(self, config: ModelConfig) -> None:
        """Raise `CalibrationError` if the requested basis cannot be folded into a model."""
        if self.qk == "pairs" and any(spec.qk_norm for spec in config.layers):
            raise CalibrationError(
                f"qk={self.qk!r}: cannot be folded past the norms of q and k in this model; use 'balanced'"
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
    """Calibrate a converted folder on text and store moments, basis and profile in it.

    Text of fewer than `FEW_TOKENS` tokens logs a warning.

    Args:
      path: folder written by `zdc convert`.
      texts: files or folders, see `zdc_jax.evaluation.text.read_documents`; topics are folder names. If
        empty, the basis is made from the moments of an earlier calibration, and no profile is stored.
      options: default `CalibrationOptions()`.
      overwrite: replace an existing basis and its profile. Plans made with the old basis no longer load.
      dtype: dtype the model runs in; default that of the stored weights.
      progress: show progress on standard error.

    Returns:
      The stored basis.

    Raises:
      CalibrationError, TextError, CheckpointError: bad options, text or folder, before anything is written;
        or a basis exists and `overwrite` is False.
    """
    options = options or CalibrationOptions()
    checkpoint = Checkpoint.open(path)
    if not overwrite and (checkpoint.calibration_path / "basis").exists():
        raise CheckpointError(
            f"{checkpoint.path} is already calibrated, and plans made with its basis load with no other; "
            "pass --overwrite to replace the basis"
        )
    context = options.window_length(checkpoint.config)
    options.check_model(checkpoint.config)
    windows: np.ndarray | None = None
    if not texts:
        moments, record = stored_moments(checkpoint)
    else:
        windows, topics = calibration_windows(checkpoint, texts, context, options)
        if windows.size < FEW_TOKENS:
            logger.warning(
                "calibrating on %s tokens only; an accurate basis needs at least %s",
                f"{windows.size:,}",
                f"{FEW_TOKENS:,}",
            )
        began = time.perf_counter()
        network = load(path, dtype=dtype).network
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
                far=options.center,
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
        # Measured before anything is replaced, because an unusable basis fails here.
        profile = measured_profile(checkpoint, basis, windows, dtype=dtype, progress=progress)
    basis.save(checkpoint.calibration_path / "basis")
    # The old profile belongs to the old basis.
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
    """Measure the profile of a model in a basis on `windows` [W, T]."""
    plan = whole_plan(checkpoint.config).for_model("", "", basis.shifted)
    network = load(checkpoint.path, plan, basis=basis, dtype=dtype).network
    profile = collect_profile(network, windows, fingerprint=checkpoint.fingerprint, progress=progress)
    return replace(profile, basis=basis.coordinates_hash)


def stored_moments(checkpoint: Checkpoint) -> tuple[Moments, dict[str, Any]]:
    """Return the moments in a folder, and what the record of its basis says about them.

    Raises:
      CheckpointError: the folder has no moments, or unreadable ones.
      CalibrationError: the moments are of another model.
    """
    folder = checkpoint.calibration_path
    if not (folder / "moments").exists():
        raise CheckpointError(
            f"{checkpoint.path} has no moments of an earlier calibration; "
            f"run: zdc calibrate {checkpoint.path} TEXT"
        )
    moments = Moments.load(folder / "moments")
    if moments.fingerprint != checkpoint.fingerprint:
        raise CalibrationError(
            f"{checkpoint.path} has moments of another model, {moments.fingerprint!r}, and holds model "
            f"{checkpoint.fingerprint!r}; run: zdc calibrate {checkpoint.path} TEXT --overwrite"
        )
    record = Basis.load(folder / "basis").record if (folder / "basis").exists() else {}
    names = ("reduction", "seed", "topics", "seconds_moments")
    return moments, {name: record[name] for name in names if name in record}


def calibration_windows(
    checkpoint: Checkpoint,
    texts: Sequence[str | Path],
    context: int,
    options: CalibrationOptions,
    split: Split | None = None,
) -> tuple[np.ndarray, list[str]]:
    """Tokenize about `options.tokens` tokens of the texts or of one split of them.

    Returns:
      Windows [W, context], and the topic of each.

    Raises:
      CalibrationError: the folder has no tokenizer, or the tokens are fewer than those of one window.
      TextError: no text, or too little for one window.
    """
    if options.tokens < context:
        raise CalibrationError(
            f"tokens={options.tokens}: must be at least {context}, one window; raise it, or lower context="
        )
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        raise CalibrationError(f"{checkpoint.path} has no tokenizer, so it cannot read text")
    documents = read_documents(texts)
    return token_windows(
        documents if split is None else documents_of(split, documents),
        tokenizer,
        length=context,
        num_windows=options.tokens // context,
        seed=options.seed if split is None else split_seed(split, options.seed),
        eos_id=next(iter(checkpoint.config.eos_ids), None),
    )


def collect_moments(
    network: Transformer,
    windows: np.ndarray,
    *,
    fingerprint: str,
    batch: int = 1,
    far: bool = False,
    progress: bool = False,
) -> Moments:
    """Compute second moments and sums of q, k, v, o over all tokens of `windows` [W, T] in one pass.

    With `far` also those of values by the attention to older tokens, which takes longer.
    Activations in the model's dtype are accumulated in float32, and keys before they are rounded. Batches are
    sharded over all devices.
    """
    devices = jax.devices()
    batch = -(-batch // len(devices)) * len(devices)
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    network = jax.device_put(network, replicated)
    sums = jax.device_put(zero_sums(network, far=far), replicated)
    shift = estimate_shift(network, windows[:SHIFT_WINDOWS])
    keys = jax.device_put(list_mean_keys(network.config, shift, windows.shape[1]), replicated)
    starts = range(0, len(windows), batch)
    for start in track(starts, "moments", shown=progress):
        weight = np.arange(batch) < len(windows) - start
        padded = np.stack(pad_batch(list(windows[start : start + batch]), batch))
        tokens, weight = (jax.device_put(x, sharded) for x in (padded, weight))
        sums = add_moments(network, sums, keys, tokens, weight)
        jax.block_until_ready(sums)  # Progress shows finished work, not dispatched work.
    host = {name: np.asarray(value, np.float64) for name, value in sums.items()}
    return Moments(
        **host,
        key_shift=shift,
        num_tokens=windows.size,
        context_length=windows.shape[1],
        group_size=network.config.group_size,
        fingerprint=fingerprint,
    )


def zero_sums(network: Transformer, *, far: bool = False) -> dict[str, Array]:
    """Create sums for `add_moments`, float32.

    Arrays q, k, v, o, k_before, k_rest and v_scored are [L, K, H, H]; q_sum and others are [L, K, H]. With
    `far` there are also v_far [L, K, H] and far [L, K].
    """
    config = network.config
    L, K, H = config.num_layers, config.num_kv_heads, config.head_dim
    names = (*"qkvo", "k_before", "k_rest", "v_scored")
    grams = {name: jnp.zeros((L, K, H, H), jnp.float32) for name in names}
    sums = grams | {f"{name}_sum": jnp.zeros((L, K, H), jnp.float32) for name in "qkvo"}
    if not far:
        return sums
    return sums | {"v_far": jnp.zeros((L, K, H), jnp.float32), "far": jnp.zeros((L, K), jnp.float32)}


@partial(jax.jit, donate_argnums=1)
def add_moments(
    network: Transformer, sums: dict[str, Array], keys: Sequence[Array], tokens: Array, weight: Array
) -> dict[str, Array]:
    """Add the moments of windows to the sums.

    Args:
      network: the model.
      sums: from `zero_sums`.
      keys: mean keys of each layer, from `list_mean_keys`.
      tokens: windows [B, T].
      weight: 0 for padding, else 1, [B].
    """
    K = network.config.num_kv_heads
    blocks = np.arange(tokens.shape[1]) // BLOCK

    def compute_grams(seen: Seen, keys: Array) -> dict[str, Array]:
        seen = seen._replace(k=seen.exact_k)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        vectors = {name: getattr(seen, name) for name in "qkvo"} | {
            "k_before": seen.attention.before_rope(seen.k, positions),
            "k_rest": seen.k - keys[blocks],
            "v_scored": _weigh_by_scores(seen),
        }
        grams = sum_far_values(seen, weight) if "v_far" in sums else {}
        for name, x in vectors.items():
            grams |= _gram(name, x, weight, K)
        return grams

    layers = observe(network, tokens, compute_grams, keys)
    return {name: total + jnp.stack([layer[name] for layer in layers]) for name, total in sums.items()}


def _weigh_by_scores(seen: Seen) -> Float[Array, "B T K H"]:
    """Return values times the root of the summed squared scores of their keys with all queries of the window.

    Scores of later keys count too, since OSCAR's weights kᵀ(QᵀQ)k have no causal mask (Zhou et al. 2026).
    """
    B, T, K, H = seen.k.shape
    q = seen.q.reshape(B, T, K, -1, H)
    with jax.default_matmul_precision("highest"):
        gram = einsum_f32("BTKGH,BTKGI->BKHI", q, q)
        squares = jnp.einsum("BTKH,BKHI,BTKI->BTK", seen.k, gram, seen.k)
    return seen.v.astype(jnp.float32) * jnp.sqrt(jnp.maximum(squares, 0))[..., None]


def _gram(name: str, x: Array, weight: Array, num_kv_heads: int) -> dict[str, Array]:
    """Return the Gram matrix [K, H, H] and the sum [K, H] of x [B, T, N or K, H] over each group's heads."""
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
    """Make the basis that the options ask for.

    `auto` picks the kind with the lower perplexity at half rank, for QK and VO separately. Without windows,
    it means `balanced`.
    """
    config = checkpoint.config
    output_weights = [
        np.asarray(checkpoint.layer(index)["attention"]["o"], np.float64)
        for index in range(config.num_layers)
    ]
    make: Callable[..., Basis] = partial(
        make_basis,
        moments,
        output_weights,
        center=options.center,
        # Sliding layers store few tokens, in nearly all bits. A shift would only cost time.
        shiftable=[layer.window is None for layer in config.layers],
    )
    H = config.head_dim
    half = min(allowed_ranks(H), key=lambda rank: abs(rank - H / 2) if rank else H)
    halved = {"qk": {"qk": half, "v": H}, "vo": {"qk": H, "v": half}}
    default = {"qk": "balanced", "vo": "balanced"}
    requested = {"qk": options.qk, "vo": options.vo}
    open_sides = [side for side, kind in requested.items() if kind == "auto" and windows is not None]
    perplexities: dict[str, dict[str, float]] = {side: {} for side in open_sides}
    candidates = [(side, kind) for side in open_sides for kind in ("balanced", "stacked")]
    for side, kind in track(candidates, "basis", shown=progress):
        assert windows is not None
        plan = CompressionPlan.uniform(config, **halved[side])
        network = load(checkpoint.path, plan, basis=make(**default | {side: kind}), dtype=dtype).network
        perplexities[side][kind] = float(np.exp(window_nll(network, windows[:AUTO_WINDOWS]).mean()))
    best = {side: min(values, key=values.__getitem__) for side, values in perplexities.items()}
    fixed = {side: kind for side, kind in requested.items() if kind != "auto"}
    basis = make(**default | fixed | best)
    return replace(basis, record={**basis.record, "auto": perplexities, "auto_rank": half})
