"""Perplexity of a plan compared with the unmodified model on the same windows, with paired intervals."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.model.transformer import Embeddings, Transformer
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.plan import CompressionPlan

_POSITIONS_PER_BLOCK = 512
"""Positions whose logits are in memory at the same time."""
BOOTSTRAP_SAMPLES = 10_000
"""Resamples for a bootstrap interval."""
DEFAULT_WINDOW = 256
"""Window that `FarRetention` uses for plans without a window, in tokens."""


@dataclass(frozen=True)
class FarRetention:
    """Retention of far tokens: tokens that occur earlier in the text, but not in the last `window` tokens.

    Attributes:
      retention: exp of the mean change of their log-probability, averaged first within and then over windows
        of text; 1: no loss.
      interval: 95 % paired bootstrap interval of `retention`; None for one window of text.
      tokens: number of far tokens.
      window: number of preceding tokens that do not contain a far token.
    """

    retention: float
    interval: tuple[float, float] | None
    tokens: int
    window: int


@dataclass(frozen=True)
class PerplexityReport:
    """Perplexity per token with and without a plan.

    Attributes:
      perplexity: perplexity with the plan.
      dense_perplexity: perplexity of the unmodified model.
      increase: relative increase of the perplexity, the degradation Q of ZDC §5.2.
      interval: 95 % paired bootstrap interval of `increase` over windows; None for one window.
      windows: number of windows.
      window_length: tokens per window.
      kv_bytes: cache size for one window, in bytes.
      dense_kv_bytes: cache size of the unmodified model.
      window_increases: relative increase of each window.
      far: retention of far tokens; None if there are none.
    """

    perplexity: float
    dense_perplexity: float
    increase: float
    interval: tuple[float, float] | None
    windows: int
    window_length: int
    kv_bytes: int
    dense_kv_bytes: int
    window_increases: tuple[float, ...]
    far: FarRetention | None

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)


@jax.jit
def next_token_nll(
    embeddings: Embeddings, hidden: Float[Array, "B T_padded D"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T_next"]:
    """Return the negative log-likelihood of each token after the first, float32 [B, T-1].

    Args:
      embeddings: embeddings and output head.
      hidden: last hidden states, padded at the end on a mesh.
      tokens: token ids.
    """
    targets = tokens[:, 1:]
    length = targets.shape[1]
    hidden = hidden[:, :length]
    blocks = -(-length // _POSITIONS_PER_BLOCK)
    pad = blocks * _POSITIONS_PER_BLOCK - length
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, pad)))

    def compute_block(start: Array) -> Array:
        def slice_block(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, _POSITIONS_PER_BLOCK, 1)

        logits = embeddings.unembed(slice_block(hidden))
        target_logits = jnp.take_along_axis(logits, slice_block(targets)[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - target_logits

    nll = jax.lax.map(compute_block, jnp.arange(blocks) * _POSITIONS_PER_BLOCK)
    return jnp.concatenate(list(nll), axis=1)[:, :length]


def token_nll(
    network: Transformer | ShardedTransformer, windows: Int[np.ndarray, "W T"], *, batch: int = 1
) -> Float[np.ndarray, "W T_next"]:
    """Return the negative log-likelihood of each token after a window's first, float32 [W, T-1], in nats.

    Layers run one after another, so that a new plan compiles only layers that no earlier plan had.

    Args:
      network: network to evaluate.
      windows: token ids, int32.
      batch: windows per call.
    """
    parts = []
    for start in range(0, len(windows), batch):
        part = windows[start : start + batch]
        tokens = jnp.asarray(np.concatenate([part, np.repeat(part[-1:], batch - len(part), axis=0)]))
        nll = next_token_nll(network.embeddings, network.hidden(tokens), tokens)
        parts.append(np.asarray(nll)[: len(part)])
    return np.concatenate(parts)


def window_nll(
    network: Transformer | ShardedTransformer, windows: Int[np.ndarray, "W T"], *, batch: int = 1
) -> Float[np.ndarray, " W"]:
    """Return the mean of `token_nll` over each window, float64 [W], in nats per token."""
    return token_nll(network, windows, batch=batch).mean(1, dtype=np.float64)


def compare(
    network: Transformer | ShardedTransformer,
    dense_token_nll: Float[np.ndarray, "W T_next"],
    windows: Int[np.ndarray, "W T"],
    *,
    batch: int = 1,
) -> PerplexityReport:
    """Compare the perplexity of a network with that of the unmodified model.

    Args:
      network: network under a plan.
      dense_token_nll: `token_nll` of the unmodified model on the same windows.
      windows: token ids, int32.
      batch: windows per call.
    """
    plan_token_nll = token_nll(network, windows, batch=batch)
    nll, dense_nll = (each.mean(1, dtype=np.float64) for each in (plan_token_nll, dense_token_nll))
    length, dtype = windows.shape[1], network.dtype.name
    return PerplexityReport(
        perplexity=float(np.exp(nll.mean())),
        dense_perplexity=float(np.exp(dense_nll.mean())),
        increase=float(np.exp(nll.mean() - dense_nll.mean()) - 1),
        interval=bootstrap_interval(nll - dense_nll) if len(windows) > 1 else None,
        windows=len(windows),
        window_length=length,
        kv_bytes=network.plan.bytes(length, 1, dtype),
        dense_kv_bytes=CompressionPlan.full(network.config).bytes(length, 1, dtype),
        window_increases=tuple(np.expm1(nll - dense_nll).tolist()),
        far=_compute_far_retention(
            dense_token_nll - plan_token_nll, windows, network.plan.window or DEFAULT_WINDOW
        ),
    )


def _compute_far_retention(
    changes: Float[np.ndarray, "W T_next"], windows: Int[np.ndarray, "W T"], window: int
) -> FarRetention | None:
    """Compute `FarRetention` from the change of the log-probability of each token."""
    far = is_far(windows, window)[:, 1:]
    means = np.array(
        [row[mask].mean(dtype=np.float64) for row, mask in zip(changes, far, strict=True) if mask.any()]
    )
    if not len(means):
        return None
    low, high = bootstrap_interval(means)
    interval = (1 + low, 1 + high) if len(means) > 1 else None
    return FarRetention(float(np.exp(means.mean())), interval, int(far.sum()), window)


def is_far(windows: Int[np.ndarray, "W T"], window: int) -> Bool[np.ndarray, "W T"]:
    """Return which tokens occur earlier in their sequence, but not in the `window` tokens before them."""
    order = np.argsort(windows, axis=1, kind="stable")
    ordered = np.take_along_axis(windows, order, axis=1)
    repeats_far = (ordered[:, 1:] == ordered[:, :-1]) & (np.diff(order) > window)
    far = np.zeros(windows.shape, bool)
    np.put_along_axis(far, order[:, 1:], repeats_far, axis=1)
    return far


def bootstrap_interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile interval of exp(mean difference) - 1 over resampled windows.

    Args:
      differences: difference of each window in nats, float64 [W].
    """
    picks = np.random.default_rng(0).integers(len(differences), size=(BOOTSTRAP_SAMPLES, len(differences)))
    increases = np.expm1(differences[picks].mean(1))
    low, high = np.quantile(increases, [0.025, 0.975])
    return float(low), float(high)
