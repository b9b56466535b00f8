"""Finding the KV heads that retrieve, for the method `duo`. Replaces the trained gates of DuoAttention.

A sequence of random tokens is repeated. At each token of the repetition, a retrieving head attends to the
token that followed the first occurrence (induction; Olsson et al., 2022). Only older tokens contain that
information, so the measurement needs neither text nor labels.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.errors import PlanError
from zdc_jax.model.observe import Seen, observe
from zdc_jax.model.transformer import Transformer


def retrieving_heads(
    network: Transformer, share: float, *, length: int = 256, sequences: int = 4, seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Return the KV heads of each layer that retrieve, in the form of the settings of method `duo`.

    Args:
      network: unmodified network, or one with a folded basis at full rank.
      share: share of all KV heads of all layers to return, in (0, 1]. Sliding-window layers have none.
      length: length of the repeated sequence, in tokens.
      sequences: number of sequences to average over.
      seed: seed of the random tokens.

    Raises:
      PlanError: `share` is outside (0, 1], or twice `length` exceeds the positions of the model.
    """
    if not 0 < share <= 1:
        raise PlanError(f"share={share} must lie in (0, 1]")
    scores = induction_scores(network, length=length, sequences=sequences, seed=seed)
    return best_heads(scores, share, slides=[spec.window is not None for spec in network.config.layers])


def induction_scores(
    network: Transformer, *, length: int = 256, sequences: int = 4, seed: int = 0
) -> Float[np.ndarray, "L K"]:
    """Return the mean of `induction` over sequences, for each layer; arguments as in `retrieving_heads`."""
    config = network.config
    if not 2 <= length <= config.max_positions // 2:
        raise PlanError(
            f"length={length} must be 2 to {config.max_positions // 2} tokens, half the model's positions"
        )
    once = np.random.default_rng(seed).integers(config.vocab_size, size=(sequences, length), dtype=np.int32)
    return np.stack(jax.device_get(observe(network, jnp.asarray(np.tile(once, 2)), induction)))


def induction(seen: Seen) -> Float[Array, " K"]:
    """Return the mean attention probability of the token after the first occurrence, for each KV head.

    A sequence has T/2 tokens and their repetition. A query at t ≥ T/2 is scored by its
    probability of position t - T/2 + 1. The mean is over sequences, queries and the query heads of a group.
    """
    B, T, K, H = seen.k.shape
    half = T // 2
    q = seen.q[:, half:].reshape(B, half, K, -1, H).astype(jnp.float32)
    k = seen.k[:, 1 : half + 1].astype(jnp.float32)
    scores = seen.attention.scale * jnp.einsum("BTKGH,BTKH->BKGT", q, k)
    lse = seen.lse[:, :, half:].reshape(B, K, -1, half)
    return jnp.exp(scores - lse).mean((0, 2, 3))


def best_heads(
    scores: Float[np.ndarray, "L K"], share: float, slides: list[bool]
) -> tuple[tuple[int, ...], ...]:
    """Return the heads of each layer that are among the best of all L·K heads.

    Args:
      scores: score of each head. The first of equal scores wins.
      share: share of all heads to return.
      slides: whether each layer has a sliding window; such layers have no heads.
    """
    K = scores.shape[1]
    order = np.argsort(-scores, axis=None, kind="stable").tolist()
    candidates = [head for head in order if not slides[head // K]]
    best = candidates[: round(share * scores.size)]
    return tuple(
        tuple(sorted(head % K for head in best if head // K == layer)) for layer in range(len(scores))
    )
