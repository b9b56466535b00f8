"""Predictions of a plan compared with those of the unmodified model: perplexity and KL divergence."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.errors import NonFiniteError
from zdc_jax.evaluation.batches import padded_batches
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.xla import by_query_blocks
from zdc_jax.plan import CompressionPlan

_POSITIONS_PER_BLOCK = 512
"""Positions whose logits are in memory at the same time."""
BOOTSTRAP_SAMPLES = 10_000
"""Resamples for a bootstrap interval."""
KL_STRIDE = 16
"""Every sixteenth token counts for the KL divergence, because all logits would not fit into memory."""
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
      kl: mean KL(dense ‖ plan) of the next token, in nats, at every `KL_STRIDE`-th token.
      top1: share of these tokens at which both rank the same next token first.
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
    kl: float
    top1: float
    far: FarRetention | None


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

    def compute_block(hidden: Array, targets: Array) -> Array:
        logits = embeddings.unembed(hidden)
        target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - target_logits

    nll: Array = by_query_blocks(compute_block, _POSITIONS_PER_BLOCK, hidden[:, : targets.shape[1]], targets)
    return nll


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of a network for windows of text.

    Attributes:
      embeddings: embeddings and output head of the network.
      nll: negative log-likelihood of each token after a window's first, float32 [W, T-1], in nats.
      states: hidden states of every `KL_STRIDE`-th token, [W, S, D] in the model's dtype, on the host.
    """

    embeddings: Embeddings
    nll: Float[np.ndarray, "W T_next"]
    states: Float[np.ndarray, "W S D"]


def predict(network: Transformer, windows: Int[np.ndarray, "W T"], *, batch: int = 1) -> Predictions:
    """Run a network on windows of text; the arguments are those of `token_nll`.

    Raises:
      NonFiniteError: logits are NaN or Inf.
    """
    nll, states = [], []
    last = windows.shape[1] - 2  # The last token that predicts another.
    for hidden, tokens, count in _read_batches(network, windows, batch):
        nll.append(np.asarray(next_token_nll(network.embeddings, hidden, tokens))[:count])
        states.append(np.asarray(hidden[:, last % KL_STRIDE : last + 1 : KL_STRIDE])[:count])
    predictions = Predictions(network.embeddings, np.concatenate(nll), np.concatenate(states))
    if not np.isfinite(predictions.nll).all():
        raise NonFiniteError("logits are", network.dtype.name)
    return predictions


def token_nll(
    network: Transformer, windows: Int[np.ndarray, "W T"], *, batch: int = 1
) -> Float[np.ndarray, "W T_next"]:
    """Return the negative log-likelihood of each token after a window's first, float32 [W, T-1], in nats.

    Layers run one after another, so that a new plan compiles only layers that no earlier plan had.

    Args:
      network: network to evaluate.
      windows: token ids, int32.
      batch: windows per call.
    """
    return np.concatenate(
        [
            np.asarray(next_token_nll(network.embeddings, hidden, tokens))[:count]
            for hidden, tokens, count in _read_batches(network, windows, batch)
        ]
    )


def _read_batches(
    network: Transformer, windows: Int[np.ndarray, "W T"], batch: int
) -> Iterator[tuple[Array, Array, int]]:
    """Yield the hidden states and tokens of each batch, and how many of its windows are not padding."""
    for padded, count in padded_batches(list(windows), batch):
        tokens = jnp.asarray(np.stack(padded))
        yield network.hidden(tokens), tokens, count


def window_nll(
    network: Transformer, windows: Int[np.ndarray, "W T"], *, batch: int = 1
) -> Float[np.ndarray, " W"]:
    """Return the mean of `token_nll` over each window, float64 [W], in nats per token."""
    return token_nll(network, windows, batch=batch).mean(1, dtype=np.float64)


@jax.jit
def compare_predictions(
    dense: Embeddings,
    dense_states: Float[Array | np.ndarray, "B tokens D"],
    embeddings: Embeddings,
    states: Float[Array | np.ndarray, "B tokens D"],
) -> tuple[Float[Array, "B tokens"], Bool[Array, "B tokens"]]:
    """Return KL(dense ‖ plan) of each token, float32, and whether both predict the same token.

    Sequences are mapped one by one, so that only the logits of one sequence are in memory.
    """

    def compare_sequence(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        log_p, log_q = (
            jax.nn.log_softmax(head.unembed(x), axis=-1)
            for head, x in zip((dense, embeddings), pair, strict=True)
        )
        kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
        return kl, jnp.argmax(log_p, axis=-1) == jnp.argmax(log_q, axis=-1)

    return jax.lax.map(compare_sequence, (dense_states, states))


def compare(
    network: Transformer,
    dense: Predictions,
    windows: Int[np.ndarray, "W T"],
    *,
    batch: int = 1,
) -> PerplexityReport:
    """Compare the predictions of a network with those of the unmodified model.

    Args:
      network: network under a plan.
      dense: predictions of the unmodified model for the same windows.
      windows: token ids, int32.
      batch: windows per call.
    """
    own = predict(network, windows, batch=batch)
    nll, dense_nll = (each.nll.mean(1, dtype=np.float64) for each in (own, dense))
    kl, same = map(
        np.asarray, compare_predictions(dense.embeddings, dense.states, own.embeddings, own.states)
    )
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
        kl=float(kl.mean(dtype=np.float64)),
        top1=float(same.mean()),
        far=_compute_far_retention(dense.nll - own.nll, windows, network.plan.window or DEFAULT_WINDOW),
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
    return bootstrap(len(differences), lambda picks: np.expm1(differences[picks].mean(1)))


def bootstrap(
    count: int, compute: Callable[[Int[np.ndarray, "samples count"]], Float[np.ndarray, " samples"]]
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a statistic over resampled items.

    Args:
      count: number of items.
      compute: function that returns the statistic of each sample, given the indices of its items.
    """
    picks = np.random.default_rng(0).integers(count, size=(BOOTSTRAP_SAMPLES, count))
    low, high = np.quantile(compute(picks), [0.025, 0.975])
    return float(low), float(high)
