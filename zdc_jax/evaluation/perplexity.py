"""Perplexity of a plan against the unmodified model, on the same windows, with a paired interval."""

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
"""Positions whose logits are in memory at once."""
BOOTSTRAP_SAMPLES = 10_000
DEFAULT_WINDOW = 256
"""Tokens beyond which a repeated token counts as far, for plans without a window."""


@dataclass(frozen=True)
class FarRetention:
    """Loss on tokens that stand earlier in the text, but not among the last `window` tokens.

    retention: exp of the mean over windows of text of how the mean log-probability of these tokens changes; 1
    where nothing is lost. interval: its 95 % paired bootstrap interval; None for one window of text. tokens:
    how many there are.
    """

    retention: float
    interval: tuple[float, float] | None
    tokens: int
    window: int


@dataclass(frozen=True)
class PerplexityReport:
    """Perplexity per token with and without a plan; `increase` is the relative degradation Q of ZDC §5.2.

    `interval` is the 95 % paired bootstrap interval of `increase` over windows, `window_increases` their own;
    None where there is one window, which says nothing about others. far: None where no token is far.
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
        """Plain JSON value."""
        return asdict(self)


@jax.jit
def next_token_nll(
    embeddings: Embeddings, hidden: Float[Array, "B T_padded D"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T_next"]:
    """Negative log likelihood of the next token at all positions but the last, float32 [B, T-1]."""
    targets = tokens[:, 1:]
    length = targets.shape[1]
    hidden = hidden[:, :length]  # without the padding of tokens on a mesh
    blocks = -(-length // _POSITIONS_PER_BLOCK)
    pad = blocks * _POSITIONS_PER_BLOCK - length
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, pad)))

    def block(start: Array) -> Array:
        def cut(x, axis):
            return jax.lax.dynamic_slice_in_dim(x, start, _POSITIONS_PER_BLOCK, axis)

        logits = embeddings.unembed(cut(hidden, 1))
        chosen = jnp.take_along_axis(logits, cut(targets, 1)[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen

    nll = jax.lax.map(block, jnp.arange(blocks) * _POSITIONS_PER_BLOCK)
    return jnp.concatenate(list(nll), axis=1)[:, :length]


def token_nll(
    network: Transformer | ShardedTransformer, windows: Int[np.ndarray, "W T"], *, batch: int = 1
) -> Float[np.ndarray, "W T_next"]:
    """Negative log likelihood in nats of all tokens of each window but its first, float32 [W, T-1].

    Layers run one after another, so that a plan not seen before compiles only the layers that are new.
    """
    found = []
    for start in range(0, len(windows), batch):
        piece = windows[start : start + batch]
        whole = np.concatenate([piece, np.repeat(piece[-1:], batch - len(piece), axis=0)])
        tokens = jnp.asarray(whole)
        nll = next_token_nll(network.embeddings, network.hidden(tokens), tokens)
        found.append(np.asarray(nll)[: len(piece)])
    return np.concatenate(found)


def window_nll(
    network: Transformer | ShardedTransformer, windows: Int[np.ndarray, "W T"], *, batch: int = 1
) -> Float[np.ndarray, " W"]:
    """Mean negative log likelihood (nats a token) of each window, float64 [W]; see `token_nll`."""
    return token_nll(network, windows, batch=batch).mean(1, dtype=np.float64)


def compare(
    network: Transformer | ShardedTransformer,
    dense_token_nll: Float[np.ndarray, "W T_next"],
    windows: Int[np.ndarray, "W T"],
    *,
    batch: int = 1,
) -> PerplexityReport:
    """Perplexity of `network` on windows, beside what `token_nll` gives of the unmodified model on them."""
    own = token_nll(network, windows, batch=batch)
    nll, dense_nll = (each.mean(1, dtype=np.float64) for each in (own, dense_token_nll))
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
        far=_far_tokens(dense_token_nll - own, windows, network.plan.window or DEFAULT_WINDOW),
    )


def _far_tokens(
    changes: Float[np.ndarray, "W T_next"], windows: Int[np.ndarray, "W T"], window: int
) -> FarRetention | None:
    """From the change of each token's log-probability; None where no token is far."""
    far = is_far(windows, window)[:, 1:]
    means = np.array(
        [row[at].mean(dtype=np.float64) for row, at in zip(changes, far, strict=True) if at.any()]
    )
    if not len(means):
        return None
    low, high = bootstrap_interval(means)
    interval = (1 + low, 1 + high) if len(means) > 1 else None
    return FarRetention(float(np.exp(means.mean())), interval, int(far.sum()), window)


def is_far(windows: Int[np.ndarray, "W T"], window: int) -> Bool[np.ndarray, "W T"]:
    """Whether a token stands earlier in its row, but not among the `window` tokens before it."""
    order = np.argsort(windows, axis=1, kind="stable")
    ordered = np.take_along_axis(windows, order, axis=1)
    again = (ordered[:, 1:] == ordered[:, :-1]) & (np.diff(order) > window)
    far = np.zeros(windows.shape, bool)
    np.put_along_axis(far, order[:, 1:], again, axis=1)
    return far


def bootstrap_interval(differences: np.ndarray) -> tuple[float, float]:
    """Percentile interval of exp(mean difference) - 1 over resampled windows [W], at a level of 95 %."""
    picks = np.random.default_rng(0).integers(len(differences), size=(BOOTSTRAP_SAMPLES, len(differences)))
    increases = np.expm1(differences[picks].mean(1))
    low, high = np.quantile(increases, [0.025, 0.975])
    return float(low), float(high)
