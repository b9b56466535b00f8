"""Perplexity of a plan against the unmodified model, on the same windows, with a paired interval."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.model.transformer import Embeddings, Transformer
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.plan import CompressionPlan

_POSITIONS_PER_BLOCK = 512
"""Positions whose logits are in memory at once."""
BOOTSTRAP_SAMPLES = 10_000


@dataclass(frozen=True)
class PerplexityReport:
    """Perplexity per token with and without a plan; `increase` is the relative degradation Q of ZDC §5.2.

    `interval` is the 95 % paired bootstrap interval of `increase` over windows, `window_increases` their own;
    None where there is one window, which says nothing about others.
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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value."""
        return asdict(self)


@jax.jit
def _summed_nll(
    embeddings: Embeddings, hidden: Float[Array, "B T_padded D"], tokens: Int[Array, "B T"]
) -> Float[Array, " B"]:
    """Sum over positions of the negative log likelihood of the next token, float32 [B]."""
    targets = tokens[:, 1:]
    length = targets.shape[1]
    hidden = hidden[:, :length]  # without the padding of tokens on a mesh
    blocks = -(-length // _POSITIONS_PER_BLOCK)
    pad = blocks * _POSITIONS_PER_BLOCK - length
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, pad)))
    valid = jnp.arange(blocks * _POSITIONS_PER_BLOCK) < length

    def block(start: Array) -> Array:
        cut = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, start, _POSITIONS_PER_BLOCK, axis)
        logits = embeddings.unembed(cut(hidden, 1))
        chosen = jnp.take_along_axis(logits, cut(targets, 1)[..., None], axis=-1)[..., 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - chosen
        return jnp.where(cut(valid, 0), nll, 0).sum(1)

    return jax.lax.map(block, jnp.arange(blocks) * _POSITIONS_PER_BLOCK).sum(0)


def window_nll(
    network: Transformer | ShardedTransformer, windows: Int[np.ndarray, "W T"], *, batch: int = 1
) -> Float[np.ndarray, " W"]:
    """Mean negative log likelihood (nats a token) of each window, float64 [W].

    Layers run one after another, so that a plan not seen before compiles only the layers that are new.
    """
    sums = []
    for start in range(0, len(windows), batch):
        piece = windows[start : start + batch]
        whole = np.concatenate([piece, np.repeat(piece[-1:], batch - len(piece), axis=0)])
        tokens = jnp.asarray(whole)
        nll = _summed_nll(network.embeddings, network.hidden(tokens), tokens)
        sums.append(np.asarray(nll)[: len(piece)])
    return np.concatenate(sums).astype(np.float64) / (windows.shape[1] - 1)


def compare(
    network: Transformer | ShardedTransformer, dense_nll: np.ndarray, windows: np.ndarray, *, batch: int = 1
) -> PerplexityReport:
    """Perplexity of `network` on `windows` [W, T], beside the unmodified model's `dense_nll` [W] on them."""
    nll = window_nll(network, windows, batch=batch)
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
    )


def bootstrap_interval(differences: np.ndarray, *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of exp(mean difference) - 1 over resampled windows [W]."""
    picks = np.random.default_rng(seed).integers(len(differences), size=(BOOTSTRAP_SAMPLES, len(differences)))
    increases = np.expm1(differences[picks].mean(1))
    tail = (1 - level) / 2
    low, high = np.quantile(increases, [tail, 1 - tail])
    return float(low), float(high)
